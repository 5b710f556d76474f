package transport_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/paceline/paceline/transport"
)

func TestAPeerIsSilentWhoseHostSaysNothing(t *testing.T) {
	for err, want := range map[error]bool{
		os.ErrDeadlineExceeded: true, os.NewSyscallError("read", syscall.ETIMEDOUT): true, os.NewSyscallError("write", syscall.EHOSTUNREACH): true,
		syscall.ECONNREFUSED: false, syscall.ECONNRESET: false, io.EOF: false, net.ErrClosed: false, io.ErrUnexpectedEOF: false,
	} {
		if got := transport.Silent(fmt.Errorf("its connection ended: %w", err)); got != want {
			t.Errorf("%v: silent %v, want %v", err, got, want)
		}
	}
}
