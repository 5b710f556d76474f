package wire

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
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

func FuzzFixed(f *testing.F) {
	for _, s := range samples {
		if p, ok := s.payload.(fixed); ok {
			f.Add(p.Append(nil))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []decoder{&Window{}, &Report{}, &Stop{}} {
			if p.Decode(b) == nil && !bytes.Equal(p.Append(nil), b) {
				t.Fatalf("%x came back as %+v", b, p)
			}
		}
	})
}
