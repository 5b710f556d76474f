package auth

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/transport"
)

var secret = []byte("the secret of the job")

// handshake runs a client and a server against each other and returns their errors.
func handshake(t *testing.T, client, server Keys) (clientErr, serverErr error) {
	t.Helper()
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() { done <- client.Client(a, "server:1") }()
	serverErr = server.Server(b, "client:1")
	return <-done, serverErr
}

// pipe is a connection that ends with the test, and after a second at the latest.
func pipe(t *testing.T) (a, b net.Conn) {
	a, b = net.Pipe()
	deadline := time.Now().Add(time.Second)
	a.SetDeadline(deadline)
	b.SetDeadline(deadline)
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func wantAuthError(t *testing.T, err error, text string) {
	t.Helper()
	if !errors.Is(err, transport.ErrAuth) || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want transport.ErrAuth with %q", err, text)
	}
}

func TestPeersWithOneSecretAcceptEachOther(t *testing.T) {
	keys := Keys{Secret: secret, Binding: []byte("session")}
	if c, s := handshake(t, keys, keys); c != nil || s != nil {
		t.Fatalf("client: %v, server: %v", c, s)
	}
}

func TestAWrongSecretIsToldToBothSides(t *testing.T) {
	c, s := handshake(t, Keys{Secret: []byte("another")}, Keys{Secret: secret})
	wantAuthError(t, c, "server:1 rejected this node")
	wantAuthError(t, s, "the peer at client:1 does not know the job secret: give every node the same PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE")
}

func TestAPeerThatLostItsPlaceMayComeAgain(t *testing.T) {
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() { done <- Keys{Secret: secret}.Client(a, "server:1") }()
	crowded := errors.New("no place is left")
	if err := (Keys{Secret: secret, Proved: func() error { return crowded }}).Server(b, "client:1"); !errors.Is(err, crowded) {
		t.Errorf("error %v, want the one of Proved", err)
	}
	b.Close()
	if err := <-done; !errors.Is(err, ErrInterrupted) {
		t.Errorf("error %v, want one after which the client tries again", err)
	}
}

func TestAProofDoesNotFitAnotherTLSSession(t *testing.T) {
	c, s := handshake(t, Keys{Secret: secret, Binding: []byte("one")}, Keys{Secret: secret, Binding: []byte("two")})
	wantAuthError(t, c, "rejected")
	wantAuthError(t, s, "does not know the job secret")
}

func TestANodeWithoutASecretTalksToNobody(t *testing.T) {
	a, _ := pipe(t)
	wantAuthError(t, Keys{}.Client(a, "x"), "has no job secret")
	wantAuthError(t, Keys{}.Server(a, "x"), "has no job secret")
}

func TestAServerThatDoesNotKnowTheSecretIsFoundOut(t *testing.T) {
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() { done <- Keys{Secret: secret}.Client(a, "server:1") }()
	io.ReadFull(b, make([]byte, helloSize))
	b.Write(newHello())
	io.ReadFull(b, make([]byte, proofSize))
	b.Write(append([]byte{accepted}, make([]byte, proofSize)...))
	wantAuthError(t, <-done, "the peer at server:1 does not know the job secret")
}

func TestOurOwnWordsSentBackAreRefused(t *testing.T) {
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() { done <- Keys{Secret: secret}.Client(a, "server:1") }()
	go io.Copy(b, b)
	wantAuthError(t, <-done, "reflected")
}

func TestAReplayedProofIsRefused(t *testing.T) {
	a, b := pipe(t)
	var heard bytes.Buffer // what an honest client says
	done := make(chan error, 1)
	go func() {
		done <- Keys{Secret: secret}.Client(struct {
			io.Reader
			io.Writer
		}{a, io.MultiWriter(a, &heard)}, "server:1")
	}()
	if err := (Keys{Secret: secret}).Server(b, "client:1"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}

	a, b = pipe(t)
	go func() {
		a.Write(heard.Bytes()[:helloSize])
		io.ReadFull(a, make([]byte, helloSize))
		a.Write(heard.Bytes()[helloSize:])
		io.Copy(io.Discard, a)
	}()
	wantAuthError(t, Keys{Secret: secret}.Server(b, "client:1"), "does not know the job secret")
}

func TestStrangersAreToldApart(t *testing.T) {
	old := newHello()
	old[len(magic)]++
	for name, c := range map[string]struct{ send, want string }{
		"garbage":      {"GET / HTTP/1.1\r\n\r\n", `sent "GET / H" instead of the handshake`},
		"early close":  {"", "ended during the handshake"},
		"half a hello": {magic + "\x01\x01half", "ended during the handshake"},
		"old version":  {string(old), "install the same release everywhere"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pipe(t)
			go func() {
				a.Write([]byte(c.send))
				a.Close()
			}()
			wantAuthError(t, Keys{Secret: secret}.Server(b, "peer:1"), c.want)
		})
	}
}

func TestASilentPeerMeetsTheDeadline(t *testing.T) {
	_, b := pipe(t)
	b.SetDeadline(time.Now().Add(-time.Second))
	err := Keys{Secret: secret}.Server(b, "peer:1")
	var timeout net.Error
	if wantAuthError(t, err, "peer:1"); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("%v is not a timeout", err)
	}
}

func FuzzServer(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(newHello())
	f.Add(append(newHello(), make([]byte, proofSize)...))
	f.Fuzz(func(t *testing.T, said []byte) {
		peer := struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(said), io.Discard}
		if err := (Keys{Secret: secret}).Server(peer, "peer:1"); !errors.Is(err, transport.ErrAuth) {
			t.Fatalf("an unauthenticated peer got in, or the error is of another kind: %v", err)
		}
	})
}
