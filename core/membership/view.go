package membership

import (
	"fmt"
	"sync/atomic"
)

// View holds the current epoch of a round. The parts of a process read it on every operation: Now is one atomic load. Of
// two who make the next epoch at once, the later makes it of the earlier's.
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
	_ = v.change(func(now *Epoch) (*Epoch, error) { return now.Anew(), nil }) // it has no error to return
}

// Lose goes on without the members that later has lost, or drained, and the current epoch has not, and returns them. A node numbers its epochs by
// itself: it may hear of a loss before all ranks have joined, and another node after.
func (v *View) Lose(later *Epoch) (lost []Departure, err error) {
	err = v.change(func(now *Epoch) (*Epoch, error) {
		lost = lost[:0]
		var c Change
		for _, d := range later.gone {
			if (d.Lost || d.Drained) && now.Return(d.Member, d.Incarnation) == nil {
				lost = append(lost, d)
				c.Lose = append(c.Lose, Loss{d.Member, d.Drained, d.Why})
			}
		}
		if len(lost) == 0 {
			return now, nil
		}
		return now.Next(c)
	})
	return lost, err
}

// Advance makes a later epoch of the round the current one. A node that was disconnected may skip some.
func (v *View) Advance(next *Epoch) error {
	return v.change(func(now *Epoch) (*Epoch, error) {
		switch {
		case next.Round != now.Round:
			return nil, fmt.Errorf("epoch %d of round %#x does not follow one of round %#x", next.Number, next.Round, now.Round)
		case next.Number <= now.Number:
			return nil, fmt.Errorf("epoch %d does not follow epoch %d", next.Number, now.Number)
		case next.Origin < now.Origin:
			return nil, fmt.Errorf("epoch %d counts iterations from epoch %d, epoch %d from epoch %d", next.Number, next.Origin, now.Number, now.Origin)
		case next.Origin == now.Origin && next.First < now.First:
			return nil, fmt.Errorf("epoch %d holds from iteration %d, epoch %d from %d", next.Number, next.First, now.Number, now.First)
		}
		return next, nil
	})
}

// change makes the epoch that follow gives of the current one the current one. It asks again where somebody was faster.
func (v *View) change(follow func(now *Epoch) (*Epoch, error)) error {
	for {
		s := v.at.Load()
		next, err := follow(s.epoch)
		if err != nil || next == s.epoch {
			return err
		}
		if v.at.CompareAndSwap(s, &step{next, make(chan struct{})}) {
			close(s.over)
			return nil
		}
	}
}
