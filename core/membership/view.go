package membership

import (
	"fmt"
	"sync/atomic"
)

// View holds the current epoch of a round. The parts of a process read it on every operation: Now is one atomic load.
// Only one goroutine at a time may call Anew or Advance, for example under the lock of what changes with the epoch.
type View struct{ at atomic.Pointer[step] }

// step is an epoch while it is current.
type step struct {
	epoch *Epoch
	over  chan struct{} // closed by the next one
}

// NewView makes a view at an epoch.
func NewView(e *Epoch) *View {
	v := new(View)
	v.at.Store(&step{e, make(chan struct{})})
	return v
}

// Now is the current epoch.
func (v *View) Now() *Epoch { return v.at.Load().epoch }

// Watch is the current epoch and a channel that is closed when it is no longer current.
func (v *View) Watch() (*Epoch, <-chan struct{}) {
	s := v.at.Load()
	return s.epoch, s.over
}

// Anew makes the current epoch's Anew the current one.
func (v *View) Anew() {
	s := v.at.Load()
	v.at.Store(&step{s.epoch.Anew(), make(chan struct{})})
	close(s.over)
}

// Advance makes a later epoch of the round the current one. A node that was disconnected may skip some.
func (v *View) Advance(next *Epoch) error {
	s := v.at.Load()
	now := s.epoch
	switch {
	case next.Round != now.Round:
		return fmt.Errorf("epoch %d of round %#x does not follow one of round %#x", next.Number, next.Round, now.Round)
	case next.Number <= now.Number:
		return fmt.Errorf("epoch %d does not follow epoch %d", next.Number, now.Number)
	case next.Origin < now.Origin:
		return fmt.Errorf("epoch %d counts iterations from epoch %d, epoch %d from epoch %d", next.Number, next.Origin, now.Number, now.Origin)
	case next.Origin == now.Origin && next.First < now.First:
		return fmt.Errorf("epoch %d holds from iteration %d, epoch %d from %d", next.Number, next.First, now.Number, now.First)
	}
	v.at.Store(&step{next, make(chan struct{})})
	close(s.over)
	return nil
}
