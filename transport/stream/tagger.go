package stream

import (
	"fmt"
	"net"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// burst is after how many bytes a sender writes what has tags, before it makes the next ones: the kernel sends meanwhile.
const burst = wire.ChunkBytes

// tagger puts authentication tags into the frames that a connection sends (wire.Tagged). Frames may come in any pieces,
// and end in a later call; only parts that are not in one piece are copied. Whoever has the turn owns it.
type tagger struct {
	tags *auth.Tags
	all  bool

	frame  uint64 // number of the current frame
	part   uint32 // of it: 0 is the header, then come the chunks of the payload
	plain  bool   // the part is a payload without tags
	lacks  int    // bytes until the end of the part
	behind uint32 // bytes of the payload behind the part
	held   []byte // the beginning of a part that comes in several pieces

	made []byte // tags of list
	list net.Buffers
}

func newTagger(tags *auth.Tags, all bool) *tagger {
	return &tagger{tags: tags, all: all, lacks: wire.HeaderSize}
}

// next gives the buffers up to about most bytes with tags among them, and what is left of the buffers. They are valid until
// the next call.
func (t *tagger) next(buffers net.Buffers, most int) (out, rest net.Buffers) {
	t.made, t.list = t.made[:0], t.list[:0]
	for size := 0; len(buffers) > 0 && size < most; {
		n := min(len(buffers[0]), t.lacks)
		piece := buffers[0][:n]
		buffers = Consume(buffers, n)
		if n == 0 {
			continue // an empty buffer
		}
		t.list = append(t.list, piece)
		if t.lacks -= n; t.plain {
			t.pass()
			continue
		}
		size += n
		t.cover(piece)
	}
	return t.list, buffers
}

// pass goes on behind a payload without tags.
func (t *tagger) pass() {
	if t.lacks == 0 {
		t.begin()
	}
}

// cover appends the tag of the part that ends with a piece, and goes on to the next part.
func (t *tagger) cover(piece []byte) {
	whole := piece
	if t.lacks > 0 || len(t.held) > 0 {
		t.held = append(t.held, piece...)
		whole = t.held
	}
	if t.lacks > 0 {
		return
	}
	from := len(t.made)
	t.made = t.tags.Append(t.made, t.frame, t.part, whole) // may move; what list has of it stays
	t.list = append(t.list, t.made[from:])
	if t.part == 0 {
		length, tagged := wire.Tagged(whole, t.all)
		t.plain, t.behind = !tagged, length
	}
	t.held = t.held[:0]
	switch {
	case t.behind == 0:
		t.begin()
	case t.plain:
		t.lacks, t.behind = int(t.behind), 0
	default:
		t.part++
		t.lacks = int(min(t.behind, wire.ChunkBytes))
		t.behind -= uint32(t.lacks)
	}
}

// begin begins the next frame.
func (t *tagger) begin() {
	t.frame++
	t.part, t.plain, t.lacks, t.behind = 0, false, wire.HeaderSize, 0
}

// checker checks the tags of the frames that a connection receives.
type checker struct {
	tags  *auth.Tags
	all   bool
	frame uint64 // number of the current frame; 0 before the first one
	part  uint32
	plain bool // the payload has no tags
	kind  wire.Type

	unread uint32 // bytes of the payload that were not read from the stream yet
	ready  []byte // of a chunk that was read for the sake of its beginning: checked, and not given out yet
	chunk  []byte // memory of ready
}

// header checks the header of the next frame.
func (k *checker) header(header, tag []byte) error {
	if !k.tags.Fit(tag, k.frame, 0, header) {
		return fmt.Errorf("%w: the header of frame %d does not have its authentication tag: %s", transport.ErrIntegrity, k.frame, onTheWay)
	}
	var tagged bool
	k.unread, tagged = wire.Tagged(header, k.all)
	k.plain, k.kind, k.part = !tagged, wire.Type(header[3]), 0
	k.frame++
	return nil
}

// next is how many bytes the next chunk has.
func (k *checker) next() int { return int(min(k.unread, wire.ChunkBytes)) }

// payload checks the next chunk.
func (k *checker) payload(chunk, tag []byte) error {
	k.part++
	if !k.tags.Fit(tag, k.frame-1, k.part, chunk) {
		return fmt.Errorf("%w: bytes %d to %d of the payload of frame %d, a %v, do not have their authentication tag: %s, or the sender's program changed the tensor while it was sent",
			transport.ErrIntegrity, (k.part-1)*wire.ChunkBytes, int(k.part-1)*wire.ChunkBytes+len(chunk)-1, k.frame-1, k.kind, onTheWay)
	}
	k.unread -= uint32(len(chunk))
	return nil
}

// room is memory for a chunk of n bytes.
func (k *checker) room(n int) []byte {
	if cap(k.chunk) < n {
		k.chunk = make([]byte, n)
	}
	return k.chunk[:n]
}

const onTheWay = "something between the two nodes changed, repeated, dropped or moved bytes"
