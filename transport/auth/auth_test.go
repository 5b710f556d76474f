package auth

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

var secret = []byte("the secret of the job")

// handshake runs a client and a server against each other and returns their errors.
func handshake(t *testing.T, client, server Keys) (clientErr, serverErr error) {
	t.Helper()
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() {
		_, err := client.Client(a, "server:1")
		done <- err
	}()
	_, serverErr = server.Server(b, "client:1")
	return <-done, serverErr
}

// dial and serve are the two ends of a handshake with the secret.
func dial(rw io.ReadWriter) error {
	_, err := Keys{Secret: secret}.Client(rw, "server:1")
	return err
}

func serve(rw io.ReadWriter) error {
	_, err := Keys{Secret: secret}.Server(rw, "client:1")
	return err
}

// pipe is a connection that ends with the test.
func pipe(t *testing.T) (a, b net.Conn) {
	a, b = net.Pipe()
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
	go func() { done <- dial(a) }()
	crowded := errors.New("no place is left")
	if _, err := (Keys{Secret: secret, Proved: func() error { return crowded }}).Server(b, "client:1"); !errors.Is(err, crowded) {
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
	_, err := Keys{}.Client(a, "x")
	wantAuthError(t, err, "has no job secret")
	_, err = Keys{}.Server(a, "x")
	wantAuthError(t, err, "has no job secret")
}

func TestAServerThatDoesNotKnowTheSecretIsFoundOut(t *testing.T) {
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() { done <- dial(a) }()
	io.ReadFull(b, make([]byte, helloSize))
	b.Write(Keys{}.newHello())
	io.ReadFull(b, make([]byte, proofSize))
	b.Write(append([]byte{accepted}, make([]byte, proofSize)...))
	wantAuthError(t, <-done, "the peer at server:1 does not know the job secret")
}

func TestOurOwnWordsSentBackAreRefused(t *testing.T) {
	a, b := pipe(t)
	done := make(chan error, 1)
	go func() { done <- dial(a) }()
	go io.Copy(b, b)
	wantAuthError(t, <-done, "reflected")
}

func TestAReplayedProofIsRefused(t *testing.T) {
	a, b := pipe(t)
	var heard bytes.Buffer // what an honest client says
	done := make(chan error, 1)
	go func() {
		done <- dial(struct {
			io.Reader
			io.Writer
		}{a, io.MultiWriter(a, &heard)})
	}()
	if err := serve(b); err != nil {
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
	wantAuthError(t, serve(b), "does not know the job secret")
}

func TestStrangersAreToldApart(t *testing.T) {
	old := Keys{}.newHello()
	old[len(magic)]++
	unknown := Keys{Level: numLevels}.newHello()
	for name, c := range map[string]struct{ send, want string }{
		"garbage":      {"GET / HTTP/1.1\r\n\r\n", `sent "GET / H" instead of the handshake`},
		"early close":  {"", "ended during the handshake"},
		"half a hello": {magic + "\x01\x01half", "ended during the handshake"},
		"a level":      {string(unknown), "asks for integrity level 3"},
		"old version":  {string(old), "install the same release everywhere"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pipe(t)
			go func() {
				a.Write([]byte(c.send))
				a.Close()
			}()
			wantAuthError(t, serve(b), c.want)
		})
	}
}

// TestBothSidesHearOfAnotherRelease: the one that is refused would try again otherwise.
func TestBothSidesHearOfAnotherRelease(t *testing.T) {
	a, b := pipe(t)
	go func() { _ = serve(b) }()
	old := Keys{}.newHello()
	old[len(magic)+1]++
	if _, err := a.Write(old); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, helloSize)
	if _, err := io.ReadFull(a, answer); err != nil {
		t.Fatal(err)
	}
	answer[len(magic)+1]++ // as the other release reads it
	_, err := readHello(bytes.NewReader(answer), "server:1", old)
	wantAuthError(t, err, "server:1 is of another release")
	if !Refused(err) {
		t.Errorf("%v is no reason to give up", err)
	}
}

func TestASilentPeerMeetsTheDeadline(t *testing.T) {
	_, b := pipe(t)
	b.SetDeadline(time.Now().Add(-time.Second))
	err := serve(b)
	var timeout net.Error
	if wantAuthError(t, err, "client:1"); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("%v is not a timeout", err)
	}
}

func FuzzServer(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(Keys{}.newHello())
	f.Add(append(Keys{}.newHello(), make([]byte, proofSize)...))
	f.Fuzz(func(t *testing.T, said []byte) {
		peer := struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(said), io.Discard}
		if err := serve(peer); !errors.Is(err, transport.ErrAuth) {
			t.Fatalf("an unauthenticated peer got in, or the error is of another kind: %v", err)
		}
	})
}

// session runs a handshake between ends that ask for levels.
func session(t *testing.T, client, server Level) (c, s *Session, clientErr, serverErr error) {
	t.Helper()
	a, b := pipe(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, clientErr = Keys{Secret: secret, Level: client}.Client(a, "server:1")
	}()
	s, serverErr = Keys{Secret: secret, Level: server}.Server(b, "client:1")
	<-done
	return c, s, clientErr, serverErr
}

func TestTheHigherLevelHoldsAtBothEnds(t *testing.T) {
	for _, levels := range [][2]Level{{Control, Control}, {Control, All}, {All, Control}, {All, All}, {Below, Below}} {
		c, s, errC, errS := session(t, levels[0], levels[1])
		if errC != nil || errS != nil {
			t.Fatal(errC, errS)
		}
		all, tagged := max(levels[0], levels[1]) == All, levels[0] != Below
		for _, end := range []*Session{c, s} {
			if end.All != all || (end.In != nil) != tagged || (end.Out != nil) != tagged {
				t.Errorf("levels %v: session %+v", levels, end)
			}
		}
	}
	for _, levels := range [][2]Level{{Below, All}, {Control, Below}} {
		_, _, errC, errS := session(t, levels[0], levels[1])
		wantAuthError(t, errC, "only one end")
		wantAuthError(t, errS, "only one end")
	}
}

func TestATagBelongsToItsBytesFramePartDirectionAndConnection(t *testing.T) {
	c, s, _, _ := session(t, All, All)
	other, _, _, _ := session(t, All, All)
	data := []byte("a header, for example")
	tag := c.Out.Append(nil, 7, 1, data)
	if len(tag) != wire.TagSize || !s.In.Fit(tag, 7, 1, data) {
		t.Fatal("the other end refuses a tag")
	}
	for what, fits := range map[string]bool{
		"bytes":      s.In.Fit(tag, 7, 1, []byte("a header, for Example")),
		"frame":      s.In.Fit(tag, 8, 1, data),
		"part":       s.In.Fit(tag, 7, 0, data),
		"direction":  c.In.Fit(tag, 7, 1, data),
		"connection": other.In.Fit(tag, 7, 1, data) || other.Out.Fit(tag, 7, 1, data),
		"length":     s.In.Fit(tag[:15], 7, 1, data) || s.In.Fit(nil, 7, 1, data),
	} {
		if fits {
			t.Errorf("a tag of another %s fits", what)
		}
	}
}

// TestKeysFollowFromSecretHellosAndBinding repeats RFC 5869 by hand: extract with an empty salt, then one block of expand.
func TestKeysFollowFromSecretHellosAndBinding(t *testing.T) {
	k := Keys{Secret: secret, Binding: []byte("session")}
	client, server := k.newHello(), k.newHello()
	tr := k.transcript(client, server)
	extract := hmac.New(sha256.New, make([]byte, sha256.Size))
	extract.Write(secret)
	expand := hmac.New(sha256.New, extract.Sum(nil))
	expand.Write([]byte("paceline client tags\x00" + string(client) + string(server) + "session\x01"))
	if got := tr.derive(clientTags); !bytes.Equal(got, expand.Sum(nil)) {
		t.Errorf("the key is %x", got)
	}
	if bytes.Equal(tr.derive(clientTags), tr.derive(serverTags)) {
		t.Error("both directions have one key")
	}
}

func TestARelayCannotLowerTheLevel(t *testing.T) {
	a, near := pipe(t)
	far, b := pipe(t)
	go func() {
		hello := make([]byte, helloSize)
		io.ReadFull(near, hello)
		hello[len(magic)+2] = byte(Control)
		far.Write(hello)
		go io.Copy(near, far)
		io.Copy(far, near)
	}()
	done := make(chan error, 1)
	go func() {
		_, err := Keys{Secret: secret, Level: All}.Client(a, "server:1")
		done <- err
	}()
	_, err := Keys{Secret: secret, Level: Control}.Server(b, "client:1")
	wantAuthError(t, err, "does not know the job secret")
	wantAuthError(t, <-done, "rejected")
}
