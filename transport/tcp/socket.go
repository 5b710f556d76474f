package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/forked"
)

// maxVector is the number of buffers that the kernel accepts in one call (IOV_MAX).
const maxVector = 1024

// quick is up to how many bytes Go's scheduler does not hear of a system call, which does not wait. To tell it wakes the monitor
// thread, if that sleeps: two context switches for each small message. A longer call may keep its processor from others.
const quick = 64 << 10

// socket is a TCP connection that can write without waiting (stream.TryWriter), and waits
// only a bounded time for a peer that reads nothing (stream.BuffersWriter).
type socket struct {
	*net.TCPConn
	raw      syscall.RawConn
	patience time.Duration

	// Arguments and results of one TryWrite, here because a closure would allocate each time. One sender has
	// the turn, so they are not shared.
	write   func(fd uintptr) bool
	buffers net.Buffers
	vector  []unix.Iovec
	taken   int
	err     error

	// The same of one Read of few bytes; one reader has them.
	read   func(fd uintptr) bool
	into   []byte
	got    int
	failed syscall.Errno
}

func newSocket(c *net.TCPConn, patience time.Duration) (*socket, error) {
	raw, err := c.SyscallConn()
	s := &socket{TCPConn: c, raw: raw, patience: patience}
	s.write, s.read = s.writeOnce, s.readOnce
	forked.Note(c)
	return s, err
}

// Read distinguishes the end of a stream from a broken connection: the kernel reports a failure once, and
// if a sender got it, the reader sees a plain end.
func (s *socket) Read(b []byte) (int, error) {
	n, err := s.receive(b)
	if errors.Is(err, io.EOF) && s.broken() {
		err = &net.OpError{Op: "read", Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: syscall.ECONNABORTED}
	}
	return n, err
}

func (s *socket) receive(b []byte) (int, error) {
	if len(b) == 0 || len(b) > quick {
		return s.TCPConn.Read(b)
	}
	s.into = b
	err := s.raw.Read(s.read)
	s.into = nil
	switch {
	case err != nil:
		return 0, err
	case s.failed != 0:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: s.failed}
	case s.got == 0:
		return 0, io.EOF
	}
	return s.got, nil
}

// readOnce reports false where the runtime is to wait until there are bytes.
func (s *socket) readOnce(fd uintptr) bool {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&s.into[0])), uintptr(len(s.into)))
		switch errno {
		case 0:
			s.got, s.failed = int(n), 0
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		default:
			s.got, s.failed = 0, errno
		}
		return true
	}
}

// broken reports whether both directions of the connection have ended, not only the peer's.
func (s *socket) broken() bool {
	const closed = 7 // TCP_CLOSE in the kernel's tcp_states.h
	var state uint8
	err := s.raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			state = info.State
		}
	})
	return err == nil && state == closed
}

// WriteBuffers implements stream.BuffersWriter by writev. TCP_USER_TIMEOUT does not end the wait for a
// peer whose kernel acknowledges what its process does not read: while acknowledgements come, the kernel
// counts from one repetition to the next, and those become rare.
func (s *socket) WriteBuffers(buffers *net.Buffers) error {
	defer func() { _ = s.SetWriteDeadline(time.Time{}) }() // it would apply to TryWrite, too
	for {
		if err := s.SetWriteDeadline(time.Now().Add(s.patience)); err != nil {
			return err
		}
		n, err := buffers.WriteTo(s.TCPConn)
		if n == 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

// Close ends the stream too. Where bytes came that nobody has read, the peer may hear of the end first and then of a reset, which Read tells as ECONNABORTED.
func (s *socket) Close() error { return forked.Close(s.TCPConn) }

// TryWrite implements stream.TryWriter by one writev on a socket that does not block.
func (s *socket) TryWrite(buffers net.Buffers) (int, error) {
	s.buffers, s.taken, s.err = buffers[:min(len(buffers), maxVector)], 0, nil
	err := s.raw.Write(s.write)
	s.buffers = nil
	if err == nil && s.err != nil {
		err = &net.OpError{Op: "write", Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: s.err}
	}
	return s.taken, err
}

// writeOnce always reports true, "done": at false the runtime would wait until there is room.
func (s *socket) writeOnce(fd uintptr) bool {
	for {
		n, err := s.writev(fd)
		switch err {
		case 0:
			s.taken = n
		case unix.EINTR:
			continue
		case unix.EAGAIN:
		default:
			s.err = err
		}
		return true
	}
}

// writev is the system call. unix.Writev, under the race detector, reads the memory once more after the
// call, when the peer's answer may already arrive in it.
func (s *socket) writev(fd uintptr) (int, syscall.Errno) {
	s.vector = s.vector[:0]
	bytes := 0
	for _, b := range s.buffers {
		bytes += len(b)
		if len(b) > 0 {
			v := unix.Iovec{Base: &b[0]}
			v.SetLen(len(b))
			s.vector = append(s.vector, v)
		}
	}
	if len(s.vector) == 0 {
		return 0, 0
	}
	var n uintptr
	var errno syscall.Errno
	if at, count := unsafe.Pointer(&s.vector[0]), uintptr(len(s.vector)); bytes <= quick {
		n, _, errno = unix.RawSyscall(unix.SYS_WRITEV, fd, uintptr(at), count)
	} else {
		n, _, errno = unix.Syscall(unix.SYS_WRITEV, fd, uintptr(at), count)
	}
	clear(s.vector) // release the memory
	return int(n), errno
}
