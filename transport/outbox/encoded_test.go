package outbox_test

import (
	"testing"

	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

func TestEncodedFramesTakeNoMemoryThatTheyDoNotGiveBack(t *testing.T) {
	again := func() {
		f := outbox.Encoded(wire.Header{Type: wire.TypeWindow}, wire.Window{Consumed: 1 << 40})
		var w wire.Window
		if err := w.Decode(f.Payload); err != nil || w.Consumed != 1<<40 {
			t.Fatal(w, err)
		}
		f.Owner.Sent(nil)
	}
	if n := testing.AllocsPerRun(1000, again); n >= 1 { // a collection may empty the pool
		t.Errorf("%v allocations", n)
	}
}

func TestAJSONFrameHasItsPayloadAlone(t *testing.T) {
	f, err := outbox.JSON(wire.Header{Type: wire.TypeStall}, wire.Stall{Name: "w"})
	if err != nil {
		t.Fatal(err)
	}
	var s wire.Stall
	if err := wire.DecodeJSON(f.Type, f.Payload, &s); err != nil || s.Name != "w" {
		t.Errorf("%+v, error %v", s, err)
	}
	f.Owner.Sent(nil)
	if f, err := outbox.JSON(wire.Header{Type: wire.TypePull}, s); err == nil {
		t.Errorf("%v has JSON: %s", f.Type, f.Payload)
	}
}
