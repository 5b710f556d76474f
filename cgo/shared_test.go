package main

import (
	"sync/atomic"
	"testing"
)

// Operations may end before their submission is answered: then their caller has looked already, has found no answer, and sleeps
// on the count of ended operations again.
func TestAnAnswerHasItsCallerLookAgainWhereTheOperationsHaveEnded(t *testing.T) {
	ended := func() uint32 { return atomic.LoadUint32(count(&shared.ended)) }
	for _, one := range []struct {
		name   string
		waits  bool
		ends   bool
		answer int32
		looks  bool
	}{
		{"ended before", true, true, 0, true},
		{"to end", true, false, 0, false},
		{"refused", true, false, -1, true},
		{"not waited for", false, true, 0, false},
	} {
		r := new(request)
		if one.waits {
			r.waits = 1
		}
		before := ended()
		*count(&r.ended) = before
		if one.ends {
			before = atomic.AddUint32(count(&shared.ended), 1)
		}
		reply(r, one.answer)
		if looks := ended() != before; looks != one.looks {
			t.Errorf("%s: the caller looks again: %v, want %v", one.name, looks, one.looks)
		}
		if int32(r.answer) != one.answer {
			t.Errorf("%s: answer %d, want %d", one.name, r.answer, one.answer)
		}
	}
}
