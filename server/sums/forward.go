package sums

import (
	"fmt"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// What an elastic job forwards by the way of sums (decision 125), so that it survives what they survive: a broadcast is what its root has brought, and an
// allgather what each rank has brought, one behind the other.

// forwards reports whether contributions are forwarded as they are.
func (s *slot) forwards() bool { return s.Gathers || s.Kind.HasRoot() }

// forgetLost forgets the rows that only lost ranks have brought, where the others have gone on: these knew other sizes, by which they did not need the key.
func (n *iterations) forgetLost() {
	if !n.Gathers {
		return
	}
	live := n.machine.Live()
	for i, s := range n.slots {
		if i < n.machine.V() && !s.closed && s.started.Overlap(live).Len() == 0 {
			s.drop()
			delete(n.slots, i)
			n.inherited.Found(i)
		}
	}
}

// forward has acc be what is forwarded.
func (s *slot) forward(contributors rankset.Set) error {
	if s.Gathers {
		return s.gather(contributors)
	}
	b, ok := s.contributions[s.Root]
	if s.Bytes > 0 && !(ok && contributors.Has(s.Root)) {
		return fmt.Errorf("its root, rank %d, has gone before all had what it gives", s.Root)
	}
	delete(s.contributions, s.Root)
	s.acc = b
	return nil
}

// gather puts what the contributors have brought one behind the other, in the order of ranks. A rank that is lost has brought nothing.
func (s *slot) gather(contributors rankset.Set) error {
	rows := make(wire.Rows, len(s.Ranks))
	var bytes int64
	for i, rank := range s.Ranks {
		if contributors.Has(rank) {
			rows[i] = s.contributions[rank]
			bytes += int64(len(rows[i]))
		}
	}
	n := wire.RowsSize(len(rows), bytes)
	if n > limits.MaxPayload {
		return fmt.Errorf("the ranks gather %d bytes in partition %d, limit %d", n, s.Number, limits.MaxPayload)
	}
	b, err := s.Round.Pool.Get(int(n))
	if err != nil {
		return room.MemoryError{Err: err}
	}
	rows.Append(b[:0])
	s.acc = b
	return nil
}
