package server

import (
	"sync/atomic"

	"github.com/paceline/paceline/internal/lockorder"
)

// cork keeps replies back while a batch of requests is served, so that those to one rank leave together. Who holds it waits
// for nothing meanwhile.
//
// Invariant: a connection that was kept is kicked by one of those who held the cork at that moment.
type cork struct {
	holders atomic.Int32 // changes under mu; without it, 0 says that nobody held it at some moment since the reply was queued

	mu    lockorder.Mutex
	kept  []*conn
	up    kicker  // sums were handed on to it; else nil
	spare []*conn // an empty list
}

type kicker interface{ Kick() }

func (k *cork) hold() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.holders.Add(1)
}

// keeps reports whether the replies that wait on a connection leave with a release; if not, the caller kicks it.
func (k *cork) keeps(c *conn) bool {
	if k.holders.Load() == 0 {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.holders.Load() == 0 {
		return false
	}
	if !c.corked {
		c.corked = true
		k.kept = append(k.kept, c)
	}
	return true
}

// keepsUplink is keeps for sums of a host that were handed on.
func (k *cork) keepsUplink(up kicker) bool {
	if k.holders.Load() == 0 {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.holders.Load() == 0 {
		return false
	}
	k.up = up
	return true
}

func (k *cork) release() {
	kept, up := k.empty()
	if up != nil {
		up.Kick()
	}
	if len(kept) == 0 {
		return
	}
	for _, c := range kept {
		c.out.Kick()
	}
	clear(kept)
	k.mu.Lock()
	k.spare = kept[:0]
	k.mu.Unlock()
}

// empty gives everything that was kept, also for others who hold the cork.
func (k *cork) empty() (kept []*conn, up kicker) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.holders.Add(-1)
	kept, up, k.up = k.kept, k.up, nil
	if len(kept) > 0 {
		k.kept, k.spare = k.spare, nil
	}
	for _, c := range kept {
		c.corked = false
	}
	return kept, up
}
