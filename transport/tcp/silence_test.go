package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// hosts makes two network namespaces with a link between them, as two hosts, and returns their names.
// The second has address 10.77.0.2.
func hosts(t *testing.T) (a, b string) {
	if os.Getuid() != 0 {
		t.Skip("making network namespaces takes root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("the command ip is missing: apt-get install iproute2")
	}
	a, b = fmt.Sprintf("pl-a-%d", os.Getpid()), fmt.Sprintf("pl-b-%d", os.Getpid())
	t.Cleanup(func() {
		for _, name := range []string{a, b} {
			exec.Command("ip", "netns", "del", name).Run()
		}
	})
	if err := exec.Command("ip", "netns", "add", a).Run(); err != nil {
		t.Skip("network namespaces cannot be made here: ", err)
	}
	ip(t, "netns add "+b)
	ip(t, "link add eth0 netns "+a+" type veth peer name eth0 netns "+b)
	for i, name := range []string{a, b} {
		ip(t, fmt.Sprintf("-n %s address add 10.77.0.%d/24 dev eth0", name, i+1))
		ip(t, "-n "+name+" link set eth0 up")
	}
	return a, b
}

func ip(t *testing.T, arguments string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(arguments)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", arguments, err, out)
	}
}

// on runs f on a host, in its network namespace.
func on(t *testing.T, host string, f func()) {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked, so that the thread ends with this goroutine
		fd, err := unix.Open("/var/run/netns/"+host, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd)
			err = unix.Setns(fd, unix.CLONE_NEWNET)
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("entering network namespace %s: %v", host, err)
	}
}

func TestAPeerWhoseHostFallsSilentIsNoticedOnBothSides(t *testing.T) {
	a, b := hosts(t)
	tcp := New(Config{Secret: []byte("secret"), PeerTimeout: time.Second})
	var l transport.Listener
	var x, y transport.Conn
	var err error
	on(t, b, func() { l, err = tcp.Listen("10.77.0.2:0") })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	on(t, a, func() { x, err = tcp.Dial(t.Context(), l.Addr().String()) })
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if y, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	defer y.Close()

	// From now on both hosts send to an absent machine.
	ip(t, "-n "+a+" neigh replace 10.77.0.2 lladdr 02:00:00:00:00:99 nud permanent dev eth0")
	ip(t, "-n "+b+" neigh replace 10.77.0.1 lladdr 02:00:00:00:00:99 nud permanent dev eth0")
	start := time.Now()
	failed := make(chan error, 3)
	go func() { // a sender with data that nobody acknowledges
		h := wire.Header{Type: wire.TypePush, Length: 64 << 20}
		failed <- x.Send(net.Buffers{h.Append(nil), make([]byte, h.Length)})
	}()
	for _, c := range []transport.Conn{x, y} { // y is idle: only keep-alive detects it
		go func() { failed <- c.ReadHeader(new(wire.Header)) }()
	}
	for range cap(failed) {
		err := <-failed
		// x has a sender and a reader: the kernel reports the reason to one, and only the end to the other. On a busy
		// machine the sender's timeout may pass before the kernel's.
		if !errors.Is(err, syscall.ETIMEDOUT) && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, syscall.ECONNABORTED) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("error %v, want one that the peer does not answer", err)
		}
	}
	if took := time.Since(start); took > time.Minute { // the kernel's own patience is many
		t.Errorf("it took %v", took)
	}
}
