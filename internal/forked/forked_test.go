package forked

import (
	"net"
	"testing"
)

// TestOpenSocketsAreListed, each once, as far as there are places.
func TestOpenSocketsAreListed(t *testing.T) {
	open := func() *net.TCPListener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l.(*net.TCPListener)
	}
	a, b, c := open(), open(), open()
	Note(a) // without a table
	places := make([]Socket, 2)
	Use(places, nil)
	t.Cleanup(func() { Use(nil, nil) })
	listed := func() (n int) {
		for i := range places {
			if places[i].fd.Load() > 0 && places[i].cookie != 0 {
				n++
			}
		}
		return n
	}
	for i, step := range []struct {
		do   func()
		want int
	}{
		{func() { Note(a) }, 1},
		{func() { Note(a) }, 1},
		{func() { Note(b) }, 2},
		{func() { Note(c) }, 2},
		{func() { Forget(a) }, 1},
		{func() { Forget(a) }, 1},
		{func() { Note(c) }, 2},
		{func() { c.Close(); Forget(c) }, 2}, // too late
		{func() { Note(open()) }, 2},         // it gets the descriptor
		{func() { Forget(b); b.Close() }, 1},
	} {
		if step.do(); listed() != step.want {
			t.Errorf("step %d: %d are listed, want %d", i, listed(), step.want)
		}
	}
}
