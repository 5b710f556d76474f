package auth

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// What is derived from a transcript. A label tells apart what would otherwise be equal.
const (
	clientProof = "paceline client proof"
	serverProof = "paceline server proof"
	clientTags  = "paceline client tags"
	serverTags  = "paceline server tags"
)

const keySize = sha256.Size

const _ = uint(keySize - proofSize) // a proof is as long as a key

// transcript is what only the two ends of one connection know: the secret, both hellos and the binding.
type transcript struct {
	secret []byte
	said   string
	levels [2]Level // of client and server
}

func (k Keys) transcript(clientHello, serverHello []byte) transcript {
	at := len(magic) + 2
	return transcript{
		secret: k.Secret,
		said:   string(clientHello) + string(serverHello) + string(k.Binding), // only the last part varies in length
		levels: [2]Level{Level(clientHello[at]), Level(serverHello[at])},
	}
}

// derive gives the proof or key with a label.
func (t *transcript) derive(label string) []byte {
	key, err := hkdf.Key(sha256.New, t.secret, nil, label+"\x00"+t.said, keySize)
	if err != nil {
		panic(err) // only for lengths that HKDF cannot give
	}
	return key
}

// session is what follows from a handshake whose proofs were right.
func (t *transcript) session(peer, out, in string) (*Session, error) {
	level := max(t.levels[0], t.levels[1])
	if level != Below {
		return &Session{Out: newTags(t.derive(out)), In: newTags(t.derive(in)), All: level == All}, nil
	}
	if t.levels[0] != t.levels[1] {
		return nil, fmt.Errorf("%w: with %s only one end has a stream that protects its bytes: set PACELINE_TLS_* on every node or on none", transport.ErrAuth, peer)
	}
	return &Session{}, nil
}

// Session is what a handshake gives a connection.
type Session struct {
	Out, In *Tags // of the frames that this end sends and receives; nil where the stream below protects them
	All     bool  // payloads of tensors have tags, too
}

// Tags makes and checks the authentication tags (wire.TagSize) of one direction of one connection: AES-256-GMAC, which is
// GCM without a plaintext. A tag belongs to the bytes, the frame's number on the connection and the part of the frame: a frame
// that was changed, repeated, dropped or moved, or comes from another connection or direction, does not have its tag. No
// method allocates; one goroutine at a time may use it.
type Tags struct {
	gcm   cipher.AEAD
	nonce [12]byte // never the same twice: the number of the frame, then that of its part
}

func newTags(key []byte) *Tags {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // only for keys of another length
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		panic(err) // only for ciphers with blocks of another length
	}
	return &Tags{gcm: gcm}
}

const _ = uint(wire.TagSize-16) + uint(16-wire.TagSize) // GCM's tags have 16 bytes

// Append appends the tag of a part of a frame to b: of its header (part 0), or of the chunk part-1 of its payload.
func (t *Tags) Append(b []byte, frame uint64, part uint32, data []byte) []byte {
	t.name(frame, part)
	return t.gcm.Seal(b, t.nonce[:], nil, data)
}

// Fit reports whether a tag is that of a part of a frame.
func (t *Tags) Fit(tag []byte, frame uint64, part uint32, data []byte) bool {
	t.name(frame, part)
	_, err := t.gcm.Open(nil, t.nonce[:], tag, data)
	return err == nil
}

func (t *Tags) name(frame uint64, part uint32) {
	binary.LittleEndian.PutUint64(t.nonce[:], frame)
	binary.LittleEndian.PutUint32(t.nonce[8:], part)
}
