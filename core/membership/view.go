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

// Reach is Anew where other nodes are later already, which had been joined so often.
func (v *View) Reach(joins uint32) {
	_ = v.change(func(now *Epoch) (*Epoch, error) { // it has no error to return
		if now.Joins >= joins {
			return now, nil
		}
		next := now.Anew()
		next.Joins = joins
		return next, nil
	})
}

// News is what a node has not known of a later epoch of an elastic job.
type News struct {
	Joined []int // servers
	Lost   []Departure
	Moved  bool // keys have been moved from servers that stay
}

// Follow goes on as a later epoch of an elastic job does: with the servers that have joined, without the members that were lost or
// drained, and with the keys where they have been moved. A node numbers its epochs by itself: it may hear of a change before
// all ranks have joined, in Horovod's sense, and another node after.
func (v *View) Follow(later *Epoch) (news News, err error) {
	err = v.change(func(now *Epoch) (next *Epoch, err error) {
		news, next = News{}, now
		var join, lose Change
		for i := len(now.Servers); i < len(later.Servers) && later.Elastic; i++ {
			news.Joined = append(news.Joined, i)
			join.Servers = append(join.Servers, later.Servers[i].Node)
		}
		if news.Moved = later.moved.times > now.moved.times; news.Moved {
			join.Moved = later.moved
		}
		if len(news.Joined) > 0 || news.Moved {
			if next, err = now.Next(join); err != nil {
				return nil, err
			}
		}
		for _, d := range later.gone {
			if (d.Lost || d.Drained) && next.Return(d.Member, d.Incarnation) == nil {
				news.Lost = append(news.Lost, d)
				lose.Lose = append(lose.Lose, Loss{d.Member, d.Drained, d.Why, d.Among})
			}
		}
		if len(news.Lost) > 0 {
			next, err = next.Next(lose)
		}
		return next, err
	})
	return news, err
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
