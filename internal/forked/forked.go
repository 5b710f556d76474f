// Package forked lists what of this process children that are forked, and go on without exec, have too and must not: sockets, for connections to them would not end with this
// process, and nobody could tell that it has; and memory that is shared with others, which they would write to.
package forked

import (
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket is an entry of the table, which a child reads (cgo/handles.c).
type Socket struct {
	fd     atomic.Int32 // and 1; 0 is a free place
	_      int32
	cookie uint64 // of the kernel: another file may have the descriptor, where nobody has called Forget
}

// Memory is memory that maps a file, of which a child gets a copy of its own at the same addresses.
type Memory struct {
	at    uintptr
	bytes uint64
	file  atomic.Int32 // its descriptor and 1; 0 for none
	_     int32
}

var (
	mu     sync.Mutex
	table  []Socket
	shared *Memory
)

// Use has a table be kept, and one memory, where children can read them. Without nothing is.
func Use(t []Socket, m *Memory) {
	mu.Lock()
	defer mu.Unlock()
	table, shared = t, m
}

// Share notes the memory. A file of -1 is for none, as before the descriptor is closed.
func Share(memory []byte, file int) {
	mu.Lock()
	defer mu.Unlock()
	if shared != nil {
		shared.file.Store(0)
		shared.at, shared.bytes = uintptr(unsafe.Pointer(unsafe.SliceData(memory))), uint64(len(memory))
		shared.file.Store(int32(file) + 1)
	}
}

// Note lists a socket. Beyond the table's places they are not.
func Note(c syscall.Conn) {
	control(c, func(fd int) {
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil {
			return
		}
		at := place(fd)
		if at == nil {
			at = place(-1)
		}
		if at != nil {
			at.fd.Store(0)
			at.cookie = cookie
			at.fd.Store(int32(fd) + 1)
		}
	})
}

// Forget takes a socket from the list. It is called before the socket is closed.
func Forget(c syscall.Conn) {
	control(c, func(fd int) {
		if at := place(fd); at != nil {
			at.fd.Store(0)
		}
	})
}

// Stream is a connection that can be ended before its socket is closed.
type Stream interface {
	syscall.Conn
	CloseWrite() error
	Close() error
}

// Close closes a socket that Note lists. The stream ends first, for a child that has the socket because it was not listed when that was forked.
func Close(c Stream) error {
	_ = c.CloseWrite()
	Forget(c)
	return c.Close()
}

// control calls f with the socket's descriptor, if it is open and there is a table.
func control(c syscall.Conn, f func(fd int)) {
	mu.Lock()
	defer mu.Unlock()
	if table == nil {
		return
	}
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
}

// place is the entry of a descriptor, a free one of -1.
func place(fd int) *Socket {
	for i := range table {
		if table[i].fd.Load() == int32(fd)+1 {
			return &table[i]
		}
	}
	return nil
}
