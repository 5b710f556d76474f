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
func unpack(payload []byte, count uint32) (frames [][]byte, err error) {
	err = Frames(payload, count, func(h *Header, payload []byte) error {
		frames = append(frames, AppendFrame(nil, *h, payload))
		return nil
	})
	return frames, err
}

func TestABatchGivesItsFramesBack(t *testing.T) {
	want := [][]byte{AppendFrame(nil, push, []byte("four")), AppendFrame(nil, pull, nil), AppendFrame(nil, push, bytes.Repeat([]byte{7}, 1000))}
	batch := AppendFrame(nil, Header{Type: TypeBatch, Count: 3}, slices.Concat(want...))
	var h Header
	if err := h.Decode(batch); err != nil || h.Type != TypeBatch || h.Count != 3 || int(h.Length) != len(batch)-HeaderSize {
		t.Fatalf("header %+v, error %v", h, err)
	}
	got, err := unpack(batch[HeaderSize:], h.Count)
	if err != nil || !slices.EqualFunc(got, want, bytes.Equal) {
		t.Errorf("got %x, error %v, want %x", got, err, want)
	}
	if got, err := unpack(nil, 0); len(got) > 0 || err != nil {
		t.Errorf("an empty batch: %x, error %v", got, err)
	}
}

func TestBadBatchesAreRefusedWithTheReason(t *testing.T) {
	one := AppendFrame(nil, push, []byte("four"))
	for want, c := range map[string]struct {
		payload []byte
		count   uint32
	}{
		"frame 2 of 2: bad frame header: 0 bytes":   {one, 2},
		"68 bytes behind the last of 1 frames":      {append(slices.Clone(one), one...), 1},
		"1 bytes behind the last of 0 frames":       {[]byte{0}, 0},
		"is a batch itself":                         {AppendFrame(nil, Header{Type: TypeBatch, Count: 1}, one), 1},
		"a push of 4 bytes, ends behind the batch":  {one[:len(one)-1], 1},
		"frame 1 of 4294967295: bad frame header: ": {[]byte("garbage"), 1<<32 - 1},
	} {
		if _, err := unpack(c.payload, c.count); !errors.Is(err, ErrBatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want ErrBatch with %q", err, want)
		}
	}
}

func TestNoPrefixOfABatchIsTaken(t *testing.T) {
	payload := AppendFrame(AppendFrame(nil, push, []byte("four")), pull, nil)
	for n := range payload {
		if _, err := unpack(payload[:n], 2); !errors.Is(err, ErrBatch) {
			t.Errorf("%d bytes: error %v", n, err)
		}
	}
}

func TestAFrameWithinABatchCannotReachIntoTheNext(t *testing.T) {
	payload := AppendFrame(AppendFrame(nil, push, []byte("four")), push, []byte("more"))
	before := slices.Clone(payload)
	err := Frames(payload, 2, func(_ *Header, part []byte) error {
		_ = append(part, bytes.Repeat([]byte("x"), 200)...)
		return nil
	})
	if err != nil || !bytes.Equal(payload, before) {
		t.Errorf("appending to one frame changed another, error %v", err)
	}
}

func TestAnErrorOfTheReceiverEndsABatch(t *testing.T) {
	calls, stop := 0, errors.New("stop")
	err := Frames(AppendFrame(AppendFrame(nil, pull, nil), pull, nil), 2, func(*Header, []byte) error {
		calls++
		return stop
	})
	if !errors.Is(err, stop) || calls != 1 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

func FuzzBatch(f *testing.F) {
	for _, s := range samples {
		f.Add(s.bytes(), uint32(1))
	}
	f.Add(AppendFrame(AppendFrame(nil, push, []byte("four")), pull, nil), uint32(2))
	f.Fuzz(func(t *testing.T, payload []byte, count uint32) {
		if len(payload) > limits.MaxBatch {
			return
		}
		frames, err := unpack(payload, count)
		if err == nil && (uint32(len(frames)) != count || len(slices.Concat(frames...)) != len(payload)) {
			t.Fatalf("%d frames of %d, %d bytes of %d", len(frames), count, len(slices.Concat(frames...)), len(payload))
		}
		if err != nil && !errors.Is(err, ErrBatch) {
			t.Fatalf("error of another kind: %v", err)
		}
	})
}
