package wire

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/limits"
)

// decoder is a pointer to a payload of a fixed size.
type decoder interface {
	fixed
	Decode(b []byte) error
}

func TestPayloadsOfAFixedSizeComeBackAsTheyWere(t *testing.T) {
	for _, s := range samples {
		if _, ok := s.payload.(fixed); !ok {
			continue
		}
		payload := s.bytes()[HeaderSize:]
		got := reflect.New(reflect.TypeOf(s.payload))
		if err := got.Interface().(decoder).Decode(payload); err != nil || got.Elem().Interface() != s.payload {
			t.Errorf("%s came back as %+v, error %v", s.name, got.Elem(), err)
		}
		if limit := s.header.Type.maxPayload(); int(limit) != len(payload) {
			t.Errorf("a %s may have %d bytes, and has %d", s.name, limit, len(payload))
		}
		for n := range payload {
			if err := got.Interface().(decoder).Decode(payload[:n]); err == nil || !strings.Contains(err.Error(), "bad "+s.name+" payload") {
				t.Errorf("%d bytes of %s: error %v", n, s.name, err)
			}
		}
		if err := got.Interface().(decoder).Decode(append(payload, 0)); err == nil {
			t.Errorf("a byte behind %s is taken", s.name)
		}
	}
}

func TestReportsThatCannotBeAreRefused(t *testing.T) {
	for _, bad := range []Report{{1, -1, 0}, {1, 0, -0.1}, {1, 0, 1.1}, {1, 0, math.NaN()}, {1, time.Second, math.Inf(1)}} {
		if err := new(Report).Decode(bad.Append(nil)); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

func TestMessagesThatCannotBeAreRefused(t *testing.T) {
	for _, bad := range []Offer{{0, 1}, {1, 0}, {limits.MaxTensor + 1, 1 << 30}, {1 << 40, limits.MaxPayload + 1}, {limits.MaxParts + 1, 1}} {
		if err := new(Offer).Decode(bad.Append(nil)); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if err := new(Receive).Decode(Receive{limits.MaxTensor + 1}.Append(nil)); err == nil {
		t.Error("a receive of more than a tensor may have is taken")
	}
	if err := new(Match).Decode(Match{Outcome: outcomes}.Append(nil)); err == nil {
		t.Error("an unknown outcome is taken")
	}
}

func TestPiecesCoverAMessage(t *testing.T) {
	for _, o := range []Offer{{1, 1}, {10, 3}, {9, 3}, {2, 3}, {limits.MaxTensor, limits.MaxPayload}} {
		var at uint64
		for i := range o.Pieces() {
			from, to := o.Piece(uint32(i))
			if from != at || to <= from {
				t.Errorf("piece %d of %+v is from %d to %d, behind %d", i, o, from, to, at)
			}
			at = to
		}
		if from, to := o.Piece(uint32(o.Pieces())); at != o.Bytes || from != to {
			t.Errorf("the pieces of %+v end at %d, and one more is from %d to %d", o, at, from, to)
		}
	}
}

func FuzzFixed(f *testing.F) {
	for _, s := range samples {
		if p, ok := s.payload.(fixed); ok {
			f.Add(p.Append(nil))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []decoder{&Window{}, &Report{}, &Stop{}, &Offer{}, &Receive{}, &Match{}, &Place{}, &Cover{}} {
			if p.Decode(b) == nil && !bytes.Equal(p.Append(nil), b) {
				t.Fatalf("%x came back as %+v", b, p)
			}
		}
	})
}

func TestAPlaceComesBackAsItWas(t *testing.T) {
	want := Place{1 << 20, 1 << 35, 4096}
	b := want.Append(nil)
	var got Place
	if err := got.Decode(b); err != nil || got != want || len(b) != PlaceSize {
		t.Errorf("%+v of %d bytes, error %v, want %+v", got, len(b), err, want)
	}
	for _, wrong := range [][]byte{nil, b[:PlaceSize-1], append(b, 0)} {
		if got.Decode(wrong) == nil {
			t.Errorf("a place of %d bytes is taken", len(wrong))
		}
	}
}
