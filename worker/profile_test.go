package worker

import (
	"testing"
	"time"

	"github.com/paceline/paceline/core/placement"
)

// TestAServerIsMeasuredWhateverKeyMovesAway: the others of its keys come again, and end an iteration.
func TestAServerIsMeasuredWhateverKeyMovesAway(t *testing.T) {
	for moved := range uint32(3) {
		p := &profiler{}
		for iteration := range 4 {
			for key := range uint32(3) {
				if iteration > 0 && key == moved {
					continue
				}
				at := time.Duration(10*iteration+int(key)) * time.Millisecond
				p.add(0, keyOf{key, 0}, placement.Exchange{Bytes: 1000, Begun: at, Ended: at + time.Millisecond})
			}
		}
		if s := p.take(); len(s) != 1 || s[0].Seconds <= 0 {
			t.Errorf("without key %d: %v", moved, s)
		}
		for iteration := range 4 {
			at := time.Duration(100+10*iteration) * time.Millisecond
			p.add(0, keyOf{(moved + 1) % 3, 0}, placement.Exchange{Bytes: 1000, Begun: at, Ended: at + time.Millisecond})
		}
		if s := p.take(); len(s) != 1 {
			t.Errorf("without key %d, later: %v", moved, s)
		}
	}
}
