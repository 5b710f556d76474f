package tcp

import (
	"context"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

func TestBothEndsUseTheCongestionControlThatIsAskedForWhereTheyCan(t *testing.T) {
	system := congestion(t, "")
	for asked, want := range map[string]string{"reno": "reno", "unheard-of": system} {
		if got := congestion(t, asked); got != want {
			t.Errorf("asked for %q: %q, want %q", asked, got, want)
		}
	}
}

// congestion is what a connection between two of our sockets ends up with.
func congestion(t *testing.T, asked string) string {
	n := New(Config{Congestion: asked}).(*network)
	sockets, err := n.listen("127.0.0.1:0", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer sockets[0].Close()
	dialer := net.Dialer{Control: n.control}
	near, err := dialer.DialContext(context.Background(), "tcp", sockets[0].Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := sockets[0].Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	a, b := congestionOf(t, near.(*net.TCPConn)), congestionOf(t, far.(*socket).TCPConn)
	if a != b {
		t.Errorf("asked for %q: %q at one end, %q at the other", asked, a, b)
	}
	return a
}

func congestionOf(t *testing.T, c *net.TCPConn) (name string) {
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { name, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return name
}
