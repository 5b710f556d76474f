// Package auth is the handshake with which every connection begins: both ends prove that they know
// the job secret, without showing it, before any other byte is parsed.
//
//	client → server   hello   magic, versions, level, nonce    (helloSize bytes)
//	server → client   hello   magic, versions, level, nonce    (helloSize bytes)
//	client → server   proof   HKDF of the secret and hellos    (proofSize bytes)
//	server → client   verdict one byte, and the server's proof (1 + proofSize bytes)
//
// The client proves first, so that an unauthenticated peer gets nothing computed from the secret. Proofs, and the keys of the
// tags that authenticate all later bytes (Tags), are derived by HKDF with HMAC-SHA-256 (RFC 5869) from the secret. Each is
// bound to its direction and purpose and to both hellos, that is to both nonces, versions and levels (and to the TLS
// session, if any): it is valid on no other connection, and cannot be reflected. Every blob has a fixed size; nothing
// else is read from an unauthenticated peer.
package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Version is the version of the handshake.
const Version = 2

// Bytes of the handshake from each side.
const (
	ClientBytes = helloSize + proofSize
	ServerBytes = helloSize + 1 + proofSize
)

const (
	magic     = "PCLNJOB"
	nonceSize = 32
	helloSize = len(magic) + 3 + nonceSize
	proofSize = sha256.Size
)

// The server's verdict on the client's proof.
const (
	accepted = 0xA5
	rejected = 0x5A
)

// ErrInterrupted is wrapped, beside transport.ErrAuth, when the connection ended in the middle of the
// handshake: the peer may have just been stopped, so a retry may succeed.
var ErrInterrupted = errors.New("the connection ended during the handshake")

// Level is what protects the bytes of a connection, in rising order of what tags cover.
type Level uint8

// Levels. The two ends of a connection use the higher of their two, so that neither gets less than it asks for. Below is for
// streams that protect themselves, and has to be that of both.
const (
	Control Level = iota // tags on everything but the payloads of tensors
	All                  // tags on everything
	Below                // no tags: the stream below, such as TLS, refuses changed bytes
	numLevels
)

// Keys are shared by both ends of a connection.
type Keys struct {
	Secret  []byte // the job secret
	Binding []byte // identifies the TLS session that carries the connection; empty without TLS
	// Proved, if set, is called by Server when the client has proved the secret, before the client learns it. Its error
	// refuses the client.
	Proved func() error
	Level  Level // that this end asks for
}

// Client proves the secret to the server at the other end of rw and checks the server's proof. The caller
// sets the deadline. Peer is its address, for messages. Errors wrap transport.ErrAuth.
func (k Keys) Client(rw io.ReadWriter, peer string) (*Session, error) {
	if len(k.Secret) == 0 {
		return nil, errNoSecret
	}
	mine := k.newHello()
	if _, err := rw.Write(mine); err != nil {
		return nil, Interrupted(peer, err)
	}
	theirs, err := readHello(rw, peer, mine)
	if err != nil {
		return nil, err
	}
	t := k.transcript(mine, theirs)
	if _, err := rw.Write(t.derive(clientProof)); err != nil {
		return nil, Interrupted(peer, err)
	}
	var answer [1 + proofSize]byte
	if _, err := io.ReadFull(rw, answer[:]); err != nil {
		return nil, Interrupted(peer, err)
	}
	switch {
	case answer[0] == rejected:
		return nil, fmt.Errorf("%w: %s rejected this node, which has a different job secret: %s", transport.ErrAuth, peer, advice)
	case answer[0] != accepted:
		return nil, fmt.Errorf("%w: %s answered the handshake with byte %#02x (is it a Paceline node?)", transport.ErrAuth, peer, answer[0])
	case !hmac.Equal(answer[1:], t.derive(serverProof)):
		return nil, wrongSecret(peer)
	}
	return t.session(peer, clientTags, serverTags)
}

// Server checks the proof of the client at the other end of rw, sends the verdict and proves the secret in
// turn. The caller sets the deadline. Peer is its address, for messages. Errors wrap transport.ErrAuth.
func (k Keys) Server(rw io.ReadWriter, peer string) (*Session, error) {
	if len(k.Secret) == 0 {
		return nil, errNoSecret
	}
	mine := k.newHello()
	theirs, err := readHello(rw, peer, mine)
	if errors.Is(err, errTLS) { // it hears why; what it has sent is read, so that the answer is not lost with the connection
		_, _ = io.WriteString(rw, magic)
		_, _ = io.CopyN(io.Discard, rw, tlsRecord)
	}
	if errors.Is(err, errRelease) { // it finds the same in this node's hello
		_, _ = rw.Write(mine)
	}
	if err != nil {
		return nil, err
	}
	if _, err := rw.Write(mine); err != nil {
		return nil, Interrupted(peer, err)
	}
	var proof [proofSize]byte
	if _, err := io.ReadFull(rw, proof[:]); err != nil {
		return nil, Interrupted(peer, err)
	}
	t := k.transcript(theirs, mine)
	var answer [1 + proofSize]byte
	if !hmac.Equal(proof[:], t.derive(clientProof)) {
		answer[0] = rejected
		_, _ = rw.Write(answer[:]) // best effort: the peer is refused either way
		return nil, wrongSecret(peer)
	}
	if k.Proved != nil {
		if err := k.Proved(); err != nil {
			return nil, Interrupted(peer, err)
		}
	}
	answer[0] = accepted
	copy(answer[1:], t.derive(serverProof))
	if _, err := rw.Write(answer[:]); err != nil {
		return nil, Interrupted(peer, err)
	}
	return t.session(peer, serverTags, clientTags)
}

func (k Keys) newHello() []byte {
	hello := append(make([]byte, 0, helloSize), magic...)
	hello = append(hello, Version, wire.Version, byte(k.Level))
	hello = hello[:helloSize]
	rand.Read(hello[helloSize-nonceSize:]) // never fails
	return hello
}

// readHello reads the peer's hello; mine is this node's own, which must not come back.
func readHello(r io.Reader, peer string, mine []byte) ([]byte, error) {
	hello := make([]byte, helloSize)
	// The magic first: a peer of another protocol that sends only a few bytes is refused at once.
	if _, err := io.ReadFull(r, hello[:len(magic)]); err != nil {
		return nil, Interrupted(peer, err)
	}
	if hello[0] == tlsAlert || hello[0] == tlsHandshake && hello[1] == 3 {
		return nil, fmt.Errorf("%w: %s %w: %s", transport.ErrAuth, peer, errTLS, EverywhereTLS)
	}
	if string(hello[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: %s sent %q instead of the handshake (is it a Paceline node?)", transport.ErrAuth, peer, hello[:len(magic)])
	}
	if _, err := io.ReadFull(r, hello[len(magic):]); err != nil {
		return nil, Interrupted(peer, err)
	}
	if got := [2]byte(hello[len(magic):]); got != [2]byte{Version, wire.Version} {
		return nil, fmt.Errorf("%w: %s %w: it has handshake %d and frames %d, this node %d and %d: install the same release everywhere",
			transport.ErrAuth, peer, errRelease, got[0], got[1], Version, wire.Version)
	}
	if level := hello[len(magic)+2]; level >= byte(numLevels) {
		return nil, fmt.Errorf("%w: %s asks for integrity level %d, which is not known here", transport.ErrAuth, peer, level)
	}
	if hmac.Equal(hello, mine) {
		return nil, fmt.Errorf("%w: %s reflected this node's handshake", transport.ErrAuth, peer)
	}
	return hello, nil
}

// TLS as a peer without it sees it: the types of its first record, and the most that one has.
const (
	tlsAlert     = 21
	tlsHandshake = 22
	tlsRecord    = 5 + 16<<10
)

// NoTLS is what a node with TLS answers a handshake that came without: an alert (protocol_version), of the length that is read
// first.
var NoTLS = []byte{tlsAlert, 3, 3, 0, 2, 2, 70}

// EverywhereTLS is what to do where only one of two nodes uses TLS.
const EverywhereTLS = "set PACELINE_TLS_CERT, PACELINE_TLS_KEY and PACELINE_TLS_CA on every node, or on none"

var errTLS = errors.New("uses TLS, which this node does not")

// errRelease is the error of a peer whose protocol has another version.
var errRelease = errors.New("is of another release")

// Plain reports whether the first bytes of a peer are those of this handshake, which come without TLS.
func Plain(first []byte) bool { return strings.HasPrefix(magic, string(first)) }

const advice = "give every node the same PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE"

var errNoSecret = fmt.Errorf("%w: this node has no job secret: set PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE", transport.ErrAuth)

func wrongSecret(peer string) error {
	return fmt.Errorf("%w: the peer at %s does not know the job secret: %s", transport.ErrAuth, peer, advice)
}

// Refused reports whether one end has refused the other, so that another attempt would end the same.
func Refused(err error) bool {
	return errors.Is(err, transport.ErrAuth) && !errors.Is(err, ErrInterrupted)
}

// Interrupted is the error of a connection that ended, for reason err, during the handshake. A stream may say itself
// that the peer has refused this node.
func Interrupted(peer string, err error) error {
	if errors.Is(err, transport.ErrAuth) {
		return err
	}
	return fmt.Errorf("%w with %s: %w: %w", transport.ErrAuth, peer, ErrInterrupted, err)
}
