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
)

// maxVector is the number of buffers that the kernel accepts in one call (IOV_MAX).
const maxVector = 1024

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
}

func newSocket(c *net.TCPConn, patience time.Duration) (*socket, error) {
	raw, err := c.SyscallConn()
	s := &socket{TCPConn: c, raw: raw, patience: patience}
	s.write = s.writeOnce
	return s, err
}

// Read distinguishes the end of a stream from a broken connection: the kernel reports a failure once, and
// if a sender got it, the reader sees a plain end.
func (s *socket) Read(b []byte) (int, error) {
	n, err := s.TCPConn.Read(b)
	if errors.Is(err, io.EOF) && s.broken() {
		err = &net.OpError{Op: "read", Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: syscall.ECONNABORTED}
	}
	return n, err
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
	for _, b := range s.buffers {
		if len(b) > 0 {
			v := unix.Iovec{Base: &b[0]}
			v.SetLen(len(b))
			s.vector = append(s.vector, v)
		}
	}
	if len(s.vector) == 0 {
		return 0, 0
	}
	n, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&s.vector[0])), uintptr(len(s.vector)))
	clear(s.vector) // release the memory
	return int(n), errno
}
