package worker

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// superstep is where this rank is under a model with supersteps (adaptive, ElasticBSP), on behalf of all values
// that it steps together: a group, named after its first value. Guarded by Engine.mu.
//
// Invariant: every value of the group has number iterations that were pushed, each ending a superstep.
type superstep struct {
	number uint64
	done   uint64        // iterations in it
	stop   uint64        // the iteration of it, from 1, that is the last; 0: not known yet
	began  time.Time     // the iteration that runs
	took   time.Duration // the one before
	late   *time.Timer   // looks after the rank's patience whether it has come; nil before the first end
	absent bool          // this rank has not come for longer than others are to wait for it
	s, w   uint64        // thresholds by which the decider last decided
}

// Superstep tells where this rank is.
type Superstep struct {
	Value      string `json:"value"`     // the first of those that are stepped together
	Model      string `json:"model"`     // its setting
	Superstep  uint64 `json:"superstep"` // from 0
	Iterations uint64 `json:"iterations"`
	S          uint64 `json:"s"` // thresholds of the adaptive model at the newest barrier; 0 before, and under others
	W          uint64 `json:"w"`
}

// leader finds the first value of a group. Callers hold mu.
func (e *Engine) leader(set uint32, name string) (*declaration, error) {
	if n := e.names[nameID{set, name}]; n != nil {
		for _, d := range n.decls {
			if d.superstep != nil {
				return d, nil
			}
		}
	}
	return nil, fmt.Errorf("%w: %q leads no group of values on rank %d: declare it first, on every rank (again after a join, or after it failed)", ErrInvalid, name, e.cfg.Rank)
}

// EndIteration tells the decider that this rank has ended an iteration with the values of a group, and reports
// whether it was the last of the superstep: then they are pushed by Add and Read, and the rank waits for the
// others; else within the superstep.
func (e *Engine) EndIteration(set uint32, name string) (last bool, err error) {
	busy := e.busy.sample()
	e.mu.Lock()
	if err := e.broken; err != nil {
		e.mu.Unlock()
		return false, err
	}
	d, err := e.leader(set, name)
	if err != nil {
		e.mu.Unlock()
		return false, err
	}
	s := d.superstep
	s.done++
	last = s.stop > 0 && s.done >= s.stop
	h := e.reportOf(d)
	h.Significance = float32(busy)
	if !s.began.IsZero() {
		s.took = time.Since(s.began)
		h.Aux = uint64(s.took)
	}
	if last {
		h.Flags |= wire.FlagLast
		e.next(s)
	}
	e.mu.Unlock()
	e.report(d, d.placed.Servers[0], h)
	return last, nil
}

// BeginIteration says that this rank begins to compute: what went before was waiting.
func (e *Engine) BeginIteration(set uint32, name string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	d, err := e.leader(set, name)
	if err == nil {
		d.superstep.began = time.Now()
	}
	return err
}

// reportOf is what the decider is told. Callers hold mu.
func (e *Engine) reportOf(d *declaration) wire.Header {
	s := d.superstep
	return wire.Header{
		Type: wire.TypeReport, Flags: wire.FlagHome, Epoch: e.epoch().Number, Tensor: d.t.ID, Rank: uint32(e.cfg.Rank),
		Iteration: s.number, Count: uint32(min(s.done, 1<<31)),
	}
}

// next begins the next superstep. Callers hold mu.
func (e *Engine) next(s *superstep) {
	s.number++
	s.done, s.stop, s.absent = 0, 0, false
	s.late.Stop()
	e.stops--
}

// patience is how long this rank may take for an iteration before others at the barrier are not to wait for it
// any more: it may have done all that it was to do, or write a checkpoint.
func (s *superstep) patience() time.Duration { return time.Second + 10*s.took }

// expect looks after the rank's patience whether it has come to the barrier of a superstep. Callers hold mu.
func (e *Engine) expect(s *superstep) {
	number := s.number
	s.late = time.AfterFunc(s.patience()-time.Since(s.began), func() {
		e.mu.Lock()
		if e.broken != nil || s.number != number {
			e.mu.Unlock()
			return
		}
		if time.Since(s.began) < s.patience() { // it has begun another iteration since
			e.expect(s)
			e.mu.Unlock()
			return
		}
		s.absent = true
		e.mu.Unlock()
		e.excuse()
	})
}

// report sends the end of an iteration to a server of the value, and before it, where this rank has not sent the
// value's announcement there, that one: what announces it may still wait for credit.
func (e *Engine) report(d *declaration, server int, h wire.Header) {
	if p := e.peers[server]; p != nil {
		p.report(d, h)
		return
	}
	if err := e.local.report(d, h); err != nil {
		e.cfg.Log.Error(fmt.Sprintf("rank %d's own server does not take the end of an iteration: %v", e.cfg.Rank, err))
	}
}

// Stopped is the decider's word where this rank's superstep ends.
func (e *Engine) Stopped(h wire.Header) {
	e.mu.Lock()
	d := e.leaders[h.Tensor]
	if d == nil || d.superstep.number != h.Iteration || d.superstep.stop > 0 {
		e.mu.Unlock()
		return
	}
	d.superstep.stop = uint64(max(h.Count, 1))
	d.superstep.s, d.superstep.w = wire.Unpacked(h.Aux)
	e.stops++
	if d.superstep.began.IsZero() {
		d.superstep.began = time.Now()
	}
	e.expect(d.superstep)
	e.mu.Unlock()
	e.excuse()
}

// excuse ends this rank's superstep without it where its end is decided and the rank may not come: others wait
// at the barrier, and this rank, in an operation of another kind, perhaps for them; or it is absent. That the rank goes on all the
// same does no harm: it is in the next superstep then.
func (e *Engine) excuse() {
	type sent struct {
		d      *declaration
		server int
		h      wire.Header
	}
	var frames []sent
	e.mu.Lock()
	for _, d := range e.leaders {
		if e.stops == 0 {
			break
		}
		if d.superstep.stop == 0 || d.next < d.superstep.number || !d.superstep.absent && !e.elsewhere(d) {
			continue // or the push that ended the superstep before is still to be submitted, and looks again here
		}
		members := e.members(d)
		if slices.ContainsFunc(members, func(m *declaration) bool { return m.state != declareDone }) {
			continue // the use that declares it looks again here
		}
		h := e.reportOf(d)
		h.Flags = wire.FlagLast | wire.FlagEmpty
		for _, m := range members {
			m.next++
			h.Tensor = m.t.ID
			for server, home := range m.homes(m == d) {
				h.Flags &^= wire.FlagHome
				if home {
					h.Flags |= wire.FlagHome
				}
				frames = append(frames, sent{m, server, h})
			}
		}
		e.next(d.superstep)
	}
	e.mu.Unlock()
	for _, f := range frames {
		e.report(f.d, f.server, f.h)
	}
}

// elsewhere reports whether this rank is in an operation on something else than a group's values. Callers hold mu.
func (e *Engine) elsewhere(leader *declaration) bool {
	for o := range e.inflight {
		if o.d == nil || !o.d.follows(leader) {
			return true
		}
	}
	return false
}

// members are the values of a group. Callers hold mu.
func (e *Engine) members(leader *declaration) (members []*declaration) {
	for _, n := range e.names {
		for _, d := range n.decls {
			if d.follows(leader) {
				members = append(members, d)
			}
		}
	}
	return members
}

// homes are the servers that hold partitions of a value; true marks that of the first one of a group's leader.
func (d *declaration) homes(leads bool) map[int]bool {
	homes := map[int]bool{}
	for part, server := range d.placed.Servers {
		homes[server] = homes[server] || leads && part == 0
	}
	return homes
}

// Supersteps tells where this rank is under each model with supersteps.
func (e *Engine) Supersteps() []Superstep {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := []Superstep{}
	for _, d := range e.leaders {
		s := d.superstep
		list = append(list, Superstep{Value: d.t.Name, Model: d.t.Sync.Model, Superstep: s.number, Iterations: s.done, S: s.s, W: s.w})
	}
	return list
}

// follows reports whether a value is stepped together with a leader.
func (d *declaration) follows(leader *declaration) bool {
	return d.group != "" && d.group == leader.group && d.t.ProcessSet == leader.t.ProcessSet
}

// lead begins the supersteps of a group when its first value is declared. Callers hold mu.
func (e *Engine) lead(d *declaration) {
	if d.group != "" && d.group == d.t.Name {
		d.superstep = &superstep{}
		e.leaders[d.t.ID] = d
	}
}

// occupancyWindow is what a measurement of the occupancy takes at least: the kernel counts in hundredths of a
// second, so that over a short iteration one tick more or less would look like a machine at work or idle.
const occupancyWindow = 500 * time.Millisecond

// occupancy is the share of this machine's processor time that was not idle in the newest window.
type occupancy struct {
	mu        sync.Mutex
	at        time.Time
	busy, all float64
	share     float64
}

func (o *occupancy) sample() float64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.at) < occupancyWindow {
		return o.share
	}
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(data), "\n")
	var all, idle float64
	for i, f := range strings.Fields(line) {
		n, _ := strconv.ParseFloat(f, 64)
		if i >= 1 && i <= 8 { // guests, behind, are counted in user
			all += n
		}
		if i == 4 || i == 5 { // idle, and waiting for devices
			idle += n
		}
	}
	if total := all - o.all; o.all > 0 && total > 0 {
		o.share = (all - idle - o.busy) / total
	}
	o.at, o.busy, o.all = time.Now(), all-idle, all
	return o.share
}
