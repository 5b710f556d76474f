package wire

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

// unpack lists the frames of a batch's payload, each encoded again.
func unpack(payload []byte) (frames [][]byte, err error) {
	err = Frames(payload, func(h *Header, payload []byte) error {
		frames = append(frames, AppendFrame(nil, *h, payload))
		return nil
	})
	return frames, err
}

func TestABatchGivesItsFramesBack(t *testing.T) {
	want := [][]byte{AppendFrame(nil, push, []byte("four")), AppendFrame(nil, pull, nil), AppendFrame(nil, push, bytes.Repeat([]byte{7}, 1000))}
	batch := AppendFrame(nil, Header{Type: TypeBatch}, slices.Concat(want...))
	var h Header
	if err := h.Decode(batch); err != nil || h.Type != TypeBatch || int(h.Length) != len(batch)-HeaderSize {
		t.Fatalf("header %+v, error %v", h, err)
	}
	got, err := unpack(batch[HeaderSize:])
	if err != nil || !slices.EqualFunc(got, want, bytes.Equal) {
		t.Errorf("got %x, error %v, want %x", got, err, want)
	}
	if got, err := unpack(nil); len(got) > 0 || err != nil {
		t.Errorf("an empty batch: %x, error %v", got, err)
	}
}

func TestBadBatchesAreRefusedWithTheReason(t *testing.T) {
	one := AppendFrame(nil, push, []byte("four"))
	for want, payload := range map[string][]byte{
		"frame 2: bad frame header: 1 bytes":                      append(slices.Clone(one), 0),
		"frame 1 is a batch itself":                               AppendFrame(nil, Header{Type: TypeBatch}, one),
		"a push of 4 bytes, is longer than the rest of the batch": one[:len(one)-1],
		"frame 1: bad frame header: ":                             []byte("garbage"),
	} {
		if _, err := unpack(payload); !errors.Is(err, ErrBatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want ErrBatch with %q", err, want)
		}
	}
}

func TestNoPrefixOfABatchIsTaken(t *testing.T) {
	payload := AppendFrame(AppendFrame(nil, push, []byte("four")), pull, nil)
	for n := range payload {
		first := n == 0 || n == HeaderSize+4 // a batch of fewer frames
		if _, err := unpack(payload[:n]); !first && !errors.Is(err, ErrBatch) {
			t.Errorf("%d bytes: error %v", n, err)
		}
	}
}

func TestAFrameWithinABatchCannotReachIntoTheNext(t *testing.T) {
	payload := AppendFrame(AppendFrame(nil, push, []byte("four")), push, []byte("more"))
	before := slices.Clone(payload)
	err := Frames(payload, func(_ *Header, part []byte) error {
		_ = append(part, bytes.Repeat([]byte("x"), 200)...)
		return nil
	})
	if err != nil || !bytes.Equal(payload, before) {
		t.Errorf("appending to one frame changed another, error %v", err)
	}
}

func TestAnErrorOfTheReceiverEndsABatch(t *testing.T) {
	calls, stop := 0, errors.New("stop")
	err := Frames(AppendFrame(AppendFrame(nil, pull, nil), pull, nil), func(*Header, []byte) error {
		calls++
		return stop
	})
	if !errors.Is(err, stop) || calls != 1 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

func FuzzBatch(f *testing.F) {
	for _, s := range samples {
		f.Add(s.bytes())
	}
	f.Add(AppendFrame(AppendFrame(nil, push, []byte("four")), pull, nil))
	f.Fuzz(func(t *testing.T, payload []byte) {
		if len(payload) > limits.MaxBatch {
			return
		}
		frames, err := unpack(payload)
		if got := len(slices.Concat(frames...)); err == nil && got != len(payload) {
			t.Fatalf("%d frames have %d bytes of %d", len(frames), got, len(payload))
		}
		if err != nil && !errors.Is(err, ErrBatch) {
			t.Fatalf("error of another kind: %v", err)
		}
	})
}
