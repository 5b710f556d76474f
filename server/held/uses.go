package held

import (
	"errors"
)

// The life of a value's reference copies: who uses them, and what is let go when.

var errNotFinite = errors.New("there is no difference to what is not finite")

// add makes a reference copy with one user.
func (d *deltas) add(elements int, fill func(b []byte) error) (*reference, error) {
	r, err := d.copies.add(elements, fill)
	if err != nil {
		return nil, err
	}
	if d.numbers++; d.numbers == 0 { // 0 is none
		d.numbers = 1
	}
	r.number = d.numbers
	return r, nil
}

// outdate lets go what was made of the version before.
func (d *deltas) outdate() {
	if d == nil {
		return
	}
	d.version++
	if d.message != nil {
		d.message.Sent(nil)
		d.message = nil
	}
	for r := range d.current {
		d.drop(r)
	}
	d.leave(d.whole)
	d.whole = nil
}

// leave ends one use of a reference copy; with the last it goes.
func (d *deltas) leave(r *reference) {
	if r == nil {
		return
	}
	if r.users--; r.users == 0 {
		d.copies.remove(r)
		d.drop(r)
	}
}

// drop forgets the delta of a reference copy: the value has changed, or no rank has the copy.
func (d *deltas) drop(r *reference) {
	to := r.delta
	if to == nil {
		return
	}
	r.delta = nil
	delete(d.current, r)
	if to.message != nil {
		to.message.Sent(nil)
	}
	d.leave(to.next)
}

func (d *deltas) forgetRank(rank int) {
	d.leave(d.ranks[rank])
	delete(d.ranks, rank)
}

// forget drops what some ranks have.
func (d *deltas) forget(gone func(rank int) bool) {
	if d == nil {
		return
	}
	for rank := range d.ranks {
		if gone(rank) {
			d.forgetRank(rank)
		}
	}
}
