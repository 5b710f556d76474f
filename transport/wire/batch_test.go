package wire

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

// batchOf is the batch that AppendBatch makes of frames.
func batchOf(frames ...[]byte) (b Batch) {
	var h Header
	at := AppendBatch(nil, frames...)
	if err := h.Decode(at); err != nil || h.Type != TypeBatch {
		panic(err)
	}
	b.Headers, at = at[HeaderSize:HeaderSize+h.Length], at[HeaderSize+h.Length:]
	if len(at) > 0 {
		if err := h.Decode(at); err != nil || h.Type != TypeData || int(h.Length) != len(at)-HeaderSize {
			panic(err)
		}
		b.Flags, b.Data = h.Flags, at[HeaderSize:]
	}
	return b
}

// unpack lists the frames of a batch, each encoded again.
func unpack(b Batch) (frames [][]byte, err error) {
	err = b.Frames(func(h *Header, payload []byte) error {
		frames = append(frames, AppendFrame(nil, *h, payload))
		return nil
	})
	return frames, err
}

func TestABatchGivesItsFramesBack(t *testing.T) {
	want := [][]byte{AppendFrame(nil, push, []byte("four")), AppendFrame(nil, pull, nil), AppendFrame(nil, push, bytes.Repeat([]byte{7}, 1000))}
	for n := range want {
		got, err := unpack(batchOf(want[:n]...))
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
		data, err := DataHeader(b.Headers)
		if _, tagged := Tagged(data.Append(nil), false); err != nil || tagged != c.tags {
			t.Errorf("%v: tags %v, error %v, want %v", c.h.Type, tagged, err, c.tags)
		}
		b.Flags = 0
		if _, err := unpack(b); c.tags != errors.Is(err, ErrBatch) {
			t.Errorf("%v in a batch without tags: %v", c.h.Type, err)
		}
	}
}

func TestBadBatchesAreRefusedWithTheReason(t *testing.T) {
	batch, long := Header{Type: TypeBatch}, push
	long.Length = limits.MaxBatch
	for want, b := range map[string]Batch{
		"frame 2: bad frame header: 1 bytes": {Headers: append(pull.Append(nil), 0)},
		"frame 1 is a batch itself":          {Headers: batch.Append(nil)},
		"3 bytes for frames of 4":            {Headers: AppendFrame(nil, push, []byte("four"))[:HeaderSize], Data: []byte("thr")},
		"524288 bytes up to frame 2":         {Headers: long.Append(long.Append(nil))},
		"frame 1: bad frame header: ":        {Headers: []byte("garbage")},
	} {
		if _, err := unpack(b); !errors.Is(err, ErrBatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want ErrBatch with %q", err, want)
		}
	}
}

func TestAFrameWithinABatchCannotReachIntoTheNext(t *testing.T) {
	b := batchOf(AppendFrame(nil, push, []byte("four")), AppendFrame(nil, push, []byte("more")))
	before := slices.Clone(b.Data)
	err := b.Frames(func(_ *Header, part []byte) error {
		_ = append(part, bytes.Repeat([]byte("x"), 200)...)
		return nil
	})
	if err != nil || !bytes.Equal(b.Data, before) {
		t.Errorf("appending to one frame changed another, error %v", err)
	}
}

func TestAnErrorOfTheReceiverEndsABatch(t *testing.T) {
	calls, stop := 0, errors.New("stop")
	b := batchOf(AppendFrame(nil, pull, nil), AppendFrame(nil, pull, nil))
	err := b.Frames(func(*Header, []byte) error {
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
	f.Add(b.Headers, b.Data)
	f.Fuzz(func(t *testing.T, headers, data []byte) {
		if len(headers)+len(data) > limits.MaxBatch {
			return
		}
		frames, err := unpack(Batch{Headers: headers, Data: data, Flags: FlagAuthenticated})
		if got := len(slices.Concat(frames...)); err == nil && got != len(headers)+len(data) {
			t.Fatalf("%d frames have %d bytes of %d", len(frames), got, len(headers)+len(data))
		}
		if err != nil && !errors.Is(err, ErrBatch) {
			t.Fatalf("error of another kind: %v", err)
		}
	})
}
