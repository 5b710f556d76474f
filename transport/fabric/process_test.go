//go:build cgo

package fabric

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// peerOf is the variable that makes a process of this test a peer by the provider that it names.
const peerOf = "PACELINE_TEST_FABRIC_PEER"

func TestMain(m *testing.M) {
	if provider := os.Getenv(peerOf); provider != "" {
		fmt.Fprintln(os.Stderr, peer(provider))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		sweep(os.Getpid())
		os.Exit(code)
	}))
}

// sweep removes what the provider shm leaves of a process.
func sweep(pid int) {
	left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/%d:*", pid))
	for _, path := range left {
		os.Remove(path)
	}
}

// peer sends back what it gets, until it is killed.
func peer(provider string) error {
	f, err := New(Config{Provider: provider, Secret: []byte("secret"), Host: "127.0.0.1"})
	if err != nil {
		return err
	}
	l, err := f.Listen("")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	c, err := l.Accept()
	if err != nil {
		return err
	}
	for {
		var h wire.Header
		if err := c.ReadHeader(&h); err != nil {
			return err
		}
		payload, err := transporttest.Payload(c, &h)
		if err != nil {
			return err
		}
		if err := c.Send(net.Buffers{h.Append(nil), payload}); err != nil {
			return err
		}
	}
}

// startPeer starts a peer in another process and connects with it.
func startPeer(t *testing.T, config Config) (transport.Conn, *os.Process) {
	t.Helper()
	f := over(t, config)
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), peerOf+"="+config.Provider)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
		sweep(c.Process.Pid)
	})
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	conn, err := f.Dial(t.Context(), strings.TrimSpace(address))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, c.Process
}

func TestAnotherProcessGetsAndSendsWholeFrames(t *testing.T) {
	eachProvider(t, func(t *testing.T, config Config) {
		conn, _ := startPeer(t, config)
		for _, size := range []int{0, 100, copyMax + 1, 5_000_000} {
			payload := bytes.Repeat([]byte{byte(size), 1, 2}, size)[:size]
			h := wire.Header{Type: wire.TypePush, Length: uint32(size)}
			sent := make(chan error, 1)
			go func() { sent <- conn.Send(net.Buffers{h.Append(nil), payload}) }()
			var back wire.Header
			got := make([]byte, size)
			if err := errors.Join(conn.ReadHeader(&back), conn.ReadPayload(got), <-sent); err != nil {
				t.Fatal(err)
			}
			if back != h || !bytes.Equal(got, payload) {
				t.Errorf("a frame of %d bytes came back otherwise", size)
			}
		}
	})
}

// TestAPeerThatIsKilledOrStoppedIsNoticed: by a reader that waits, and by a sender whose memory the peer reads.
func TestAPeerThatIsKilledOrStoppedIsNoticed(t *testing.T) {
	eachProvider(t, func(t *testing.T, config Config) {
		for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			conn, process := startPeer(t, config)
			h := wire.Header{Type: wire.TypePush, Length: 4 << 20}
			over := make(chan error, 2)
			go func() {
				var err error
				for err == nil { // the echo fills both directions, so that sends are under way when the peer ends
					err = conn.Send(net.Buffers{h.Append(nil), make([]byte, h.Length)})
				}
				over <- err
			}()
			var back wire.Header
			if err := errors.Join(conn.ReadHeader(&back), conn.ReadPayload(make([]byte, back.Length))); err != nil {
				t.Fatal(err)
			}
			if err := process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			go func() {
				var err error
				for err == nil {
					if err = conn.ReadHeader(&back); err == nil {
						err = conn.ReadPayload(make([]byte, back.Length))
					}
				}
				over <- err
			}()
			for range 2 {
				select {
				case err := <-over:
					t.Logf("%v: %v", signal, err)
				case <-time.After(time.Minute):
					t.Fatalf("%v: a peer that is gone was not noticed", signal)
				}
			}
		}
	})
}
