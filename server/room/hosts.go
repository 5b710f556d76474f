package room

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Uplink is how a server that sums for the workers of its host reaches the servers of the job: through the worker in its
// process. A room calls it without holding a lock, but for Open and what that gives.
type Uplink interface {
	// Open gives what makes climbs of a tensor's sums. It takes no lock.
	Open(t *wire.Tensor) Climbs
	// Kick has what was pushed leave.
	Kick()
}

// Climbs makes a climb, which takes sums to the key's server and back, one after the other. push sends one, in memory that the answer
// replaces; back is called exactly once for it, from any goroutine, and only then may the memory be used again. abandon asks for that to be
// soon, and is the climb's end: what is pushed behind it comes back at once.
type Climbs = func(back func(answer wire.Header, err error)) (push func(h wire.Header, sum []byte), abandon func())

// Hosts is what a round knows of sums of hosts.
type Hosts struct {
	Sums   membership.HostSums // all of the job
	Here   rankset.Set         // a server that sums for its host: the ranks there
	Uplink Uplink              // of such a server; else nil
	Kick   func()              // of the uplink, when what is being served has been
}

// Live are those who push the partition where the tensor's live ranks take part.
func (p *Part) Live() rankset.Set {
	live := p.Tensor.Live()
	if p.Confirms() {
		live = live.Minus(p.Shell.Left())
	}
	return p.Hosts.Pushing(live, p.ID, p.Number)
}

// Behind is whom these pushes are of, in memory that is lent.
func (p *Part) Behind(pushed rankset.Set, lent *rankset.Set) rankset.Set {
	if len(p.Hosts) == 0 {
		return pushed
	}
	lent.Copy(pushed)
	p.Hosts.AddBehind(lent, p.ID, p.Number)
	return *lent
}

// Up reports whether the partition's sums are those of one host, and go on to its server.
func (t *Tensor) Up() bool { return t.Climbs != nil }

// Completed is the rank that a push waited for: of the sum of a host the one that came last there.
func (t *Tensor) Completed(q *Request) int {
	if slices.Contains(t.Hosts.Of(q.From()), int(q.Source)) {
		return int(q.Source)
	}
	return q.From()
}

// Scale is what the push of a rank is multiplied by: one that is the sum of a host has been scaled there, and where elements are narrower
// than their sums also spread.
func (t *Tensor) Scale(rank int) float64 {
	if len(t.Hosts) == 0 {
		return t.Prescale
	}
	ranks := t.Hosts.Of(rank)
	switch {
	case ranks == nil:
		return t.Prescale
	case t.spreads():
		return spread(len(ranks))
	}
	return 1
}

// Rescale is what a sum is multiplied by and divided by, where it is of so many ranks.
func (t *Tensor) Rescale(divisor uint32) (mul, div float64) {
	switch {
	case !t.Up() && t.Reduce == units.Average:
		return t.Postscale, float64(divisor)
	case !t.Up():
		return t.Postscale, 1
	case t.spreads():
		return 1, spread(t.Members.Len())
	}
	return 1, 1
}

// spreads reports whether the sum of a host leaves it divided by spread. What an average loses by that at the lower end of the type its own divisor hides;
// another sum would lose it.
func (t *Tensor) spreads() bool { return t.Reduce == units.Average && reduce.AccType(t.Type) != t.Type }

// spread is the least power of two that is not less than the ranks of a host. Their sum, divided by it, overflows no more than they do, and above the least
// normal number keeps its digits.
func spread(ranks int) float64 { return float64(uint64(1) << bits.Len(uint(ranks-1))) }

// checkServers finds a server that sums of this host cannot be handed on to: there is none of that number.
func (t *Tensor) checkServers() error {
	servers := len(t.Round.Membership.Now().Servers)
	if t.Round.Hosts.Uplink != nil && slices.ContainsFunc(t.Servers, func(s int) bool { return s >= servers }) {
		return fmt.Errorf("its partitions are on servers %v, where the job has %d", t.Servers, servers)
	}
	return nil
}

// setHosts finds how sums of hosts concern the tensor.
func (t *Tensor) setHosts() {
	hosts := &t.Round.Hosts
	if !t.SumsOnHosts() {
		return
	}
	if hosts.Uplink == nil {
		t.Hosts = hosts.Sums.Among(t.Members, t.Bytes())
		return
	}
	t.Members = t.Members.Overlap(hosts.Here)
	if len(t.Servers) > 0 && membership.SumFirst(t.Members.Len(), t.Bytes()) {
		t.Climbs = hosts.Uplink.Open(&t.Tensor)
	}
}
