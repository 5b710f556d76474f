package wire

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

// received is a batch as it arrives.
type received struct {
	headers  []byte
	second   Header
	payloads []byte
}

// batchOf is the batch of whole frames, each encoded as AppendFrame does.
func batchOf(frames ...[]byte) (r received) {
	r.second.Type = TypeData
	for _, f := range frames {
		var h Header
		if err := h.Decode(f); err != nil {
			panic(err)
		}
		r.second.Carry(&h)
		r.headers, r.payloads = append(r.headers, f[:HeaderSize]...), append(r.payloads, f[HeaderSize:]...)
	}
	return r
}

// each opens a batch and calls f with its frames.
func (r received) each(f func(h *Header, payload []byte) error) error {
	b := Batch{Payloads: []byte("of the batch before")}
	more, err := b.Open(r.headers)
	switch {
	case err != nil:
		return err
	case more:
		b.Payloads = r.payloads
		err = b.Check(&r.second)
	case len(r.payloads) > 0:
		err = fmt.Errorf("%w: %d bytes for frames of none", ErrBatch, len(r.payloads))
	}
	if err != nil {
		return err
	}
	return b.Frames(f)
}

// unpack lists the frames of a batch, each encoded again.
func (r received) unpack() (frames [][]byte, err error) {
	err = r.each(func(h *Header, payload []byte) error {
		frames = append(frames, AppendFrame(nil, *h, payload))
		return nil
	})
	return frames, err
}

func TestABatchGivesItsFramesBack(t *testing.T) {
	want := [][]byte{AppendFrame(nil, push, []byte("four")), AppendFrame(nil, pull, nil), AppendFrame(nil, push, bytes.Repeat([]byte{7}, 1000))}
	for n := range want {
		got, err := batchOf(want[:n]...).unpack()
		if err != nil || !slices.EqualFunc(got, want[:n], bytes.Equal) {
			t.Errorf("got %x, error %v, want %x", got, err, want[:n])
		}
	}
}

// Frames whose payloads have authentication tags where they are alone have them in a batch.
func TestABatchHasTagsWhereItsFramesDo(t *testing.T) {
	authenticated := push
	authenticated.Flags |= FlagAuthenticated
	for _, c := range []struct {
		h    Header
		tags bool
	}{{push, false}, {pull, false}, {authenticated, true}, {Header{Type: TypeWindow}, true}} {
		payload := []byte("eight888")
		if c.h.Type == TypePull {
			payload = nil
		}
		b := batchOf(AppendFrame(nil, push, []byte("four")), AppendFrame(nil, c.h, payload))
		if _, tagged := Tagged(b.second.Append(nil), false); tagged != c.tags {
			t.Errorf("%v: tags %v, want %v", c.h.Type, tagged, c.tags)
		}
		b.second.Flags = 0
		if _, err := b.unpack(); c.tags != errors.Is(err, ErrBatch) {
			t.Errorf("%v in a batch without tags: %v", c.h.Type, err)
		}
	}
}

func TestBadBatchesAreRefusedWithTheReason(t *testing.T) {
	batch, long := Header{Type: TypeBatch}, push
	long.Length = limits.MaxBatch
	short := batchOf(AppendFrame(nil, push, []byte("four")))
	short.second.Length--
	other := batchOf(AppendFrame(nil, push, []byte("four")))
	other.second.Type = TypePush
	for want, b := range map[string]received{
		"frame 2: bad frame header: 1 bytes":          {headers: append(pull.Append(nil), 0)},
		"frame 1 is a batch itself":                   {headers: batch.Append(nil)},
		"a data of 3 bytes follows, want the 4 bytes": short,
		"a push of 4 bytes follows, want the 4 bytes": other,
		"524288 bytes up to frame 2":                  {headers: long.Append(long.Append(nil))},
		"frame 1: bad frame header: ":                 {headers: []byte("garbage")},
	} {
		if _, err := b.unpack(); !errors.Is(err, ErrBatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want ErrBatch with %q", err, want)
		}
	}
}

func TestAFrameWithinABatchCannotReachIntoTheNext(t *testing.T) {
	b := batchOf(AppendFrame(nil, push, []byte("four")), AppendFrame(nil, push, []byte("more")))
	before := slices.Clone(b.payloads)
	err := b.each(func(_ *Header, part []byte) error {
		_ = append(part, bytes.Repeat([]byte("x"), 200)...)
		return nil
	})
	if err != nil || !bytes.Equal(b.payloads, before) {
		t.Errorf("appending to one frame changed another, error %v", err)
	}
}

func TestAnErrorOfTheReceiverEndsABatch(t *testing.T) {
	calls, stop := 0, errors.New("stop")
	b := batchOf(AppendFrame(nil, pull, nil), AppendFrame(nil, pull, nil))
	err := b.each(func(*Header, []byte) error {
		calls++
		return stop
	})
	if !errors.Is(err, stop) || calls != 1 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

func FuzzBatch(f *testing.F) {
	for _, s := range samples {
		f.Add(s.bytes(), []byte{})
	}
	b := batchOf(AppendFrame(nil, push, []byte("four")), AppendFrame(nil, pull, nil))
	f.Add(b.headers, b.payloads)
	f.Fuzz(func(t *testing.T, headers, data []byte) {
		if len(headers)+len(data) > limits.MaxBatch {
			return
		}
		second := Header{Type: TypeData, Flags: FlagAuthenticated, Length: uint32(len(data))}
		frames, err := received{headers, second, data}.unpack()
		if got := len(slices.Concat(frames...)); err == nil && got != len(headers)+len(data) {
			t.Fatalf("%d frames have %d bytes of %d", len(frames), got, len(headers)+len(data))
		}
		if err != nil && !errors.Is(err, ErrBatch) {
			t.Fatalf("error of another kind: %v", err)
		}
	})
}
