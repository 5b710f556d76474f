package shm

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bell is a doorbell, by its descriptor: an eventfd. Nobody reads it: each ring is one event for the poller (EPOLLET).
type bell int

var one uint64 = 1

// ring wakes whoever waits. It fails only when the bell has been rung 2^64 times. The call never waits, so the scheduler need not hear of it.
func (b bell) ring() {
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(b), uintptr(unsafe.Pointer(&one)), unsafe.Sizeof(one))
}

// waiter waits for a doorbell in Go's poller.
type waiter struct {
	bell
	file *os.File
	raw  syscall.RawConn
	ask  func(fd uintptr) (done bool)
}

// newWaiter owns the descriptor. ask asks for the bell; at false the waiter waits for it, then asks again.
func newWaiter(fd int, ask func() (done bool)) *waiter {
	w := &waiter{bell: bell(fd), file: os.NewFile(uintptr(fd), "doorbell"), ask: func(uintptr) bool { return ask() }}
	w.raw, _ = w.file.SyscallConn() // fails only for a file that is closed
	return w
}

// wait returns when ask has said that it is done. At a deadline of the file it is os.ErrDeadlineExceeded.
func (w *waiter) wait() error {
	if err := w.raw.Read(w.ask); err != nil {
		return fmt.Errorf("waiting in shared memory: %w", err)
	}
	return nil
}
