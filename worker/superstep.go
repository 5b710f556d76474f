package worker

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// steps is where this rank is under a model with supersteps (adaptive, ElasticBSP), on behalf of all values
// that it steps together: a group, named after its first value. It lies in the book.
//
// Invariant: every value of the group has as many iterations that were pushed as the rank has ended supersteps.
type steps struct {
	*superstep.Worker
	answer chan bool   // whether the iteration that asked was the last of its superstep; closed when all ranks have joined
	late   *time.Timer // looks after the rank's patience whether it has come
	until  uint64      // the superstep that late is for
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

// leader finds the first value of a group.
func (b *book) leader(set uint32, name string) (*declaration, error) {
	if n := b.names[nameID{set, name}]; n != nil {
		for _, d := range n.decls {
			if d.superstep != nil {
				return d, nil
			}
		}
	}
	return nil, fmt.Errorf("%w: %q leads no group of values on rank %d: declare it first, on every rank (again after a join, or after it failed)", ErrInvalid, name, b.cfg.Rank)
}

// EndIteration tells the decider that this rank has ended an iteration with the values of a group, and reports
// whether it was the last of the superstep: then they are pushed by Add and Read, and the rank waits for the
// others; else within the superstep. Where that iteration can make a barrier due it waits for the decider's answer.
func (e *Engine) EndIteration(set uint32, name string) (last bool, err error) {
	busy := e.busy.sample()
	e.mu.Lock()
	err = e.broken
	var d *declaration
	if err == nil {
		d, err = e.leader(set, name)
	}
	if err == nil && d.superstep.Asking() {
		err = fmt.Errorf("%w: rank %d ends an iteration with %q twice at a time", ErrInvalid, e.cfg.Rank, name)
	}
	if err != nil {
		e.mu.Unlock()
		return false, err
	}
	s := d.superstep
	r, verdict := s.End(time.Since(e.origin))
	r.Occupancy = busy
	h := e.headerOf(r, wire.FlagHome, d)
	s.expect(time.Since(e.origin), e.late)
	e.mu.Unlock()
	e.report(d, d.server(0), h, wire.Report{Iteration: r.Iteration, Interval: r.Interval, Occupancy: r.Occupancy})
	if verdict != superstep.Asked {
		return verdict == superstep.WasLast, nil
	}
	select {
	case last, ok := <-s.answer:
		if !ok {
			return false, fmt.Errorf("%w: all ranks have joined while rank %d ended an iteration with %q", ErrInvalid, e.cfg.Rank, name)
		}
		return last, nil
	case <-e.ended:
		return false, e.Err()
	}
}

// BeginIteration says that this rank begins to compute: what went before was waiting.
func (e *Engine) BeginIteration(set uint32, name string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	d, err := e.leader(set, name)
	if err == nil {
		d.superstep.Begin(time.Since(e.origin))
	}
	return err
}

// headerOf is the frame of a report on a value.
func (b *book) headerOf(r superstep.Report, flags wire.Flags, d *declaration) wire.Header {
	if r.Last {
		flags |= wire.FlagLast
	}
	if r.Empty {
		flags |= wire.FlagEmpty
	}
	if r.Asks {
		flags |= wire.FlagAsk
	}
	return wire.Header{
		Type: wire.TypeReport, Flags: flags, Epoch: b.epoch().Joins, Tensor: d.t.ID, Rank: uint16(r.Rank), Iteration: r.Superstep,
	}
}

// stopOf is what a frame of type stop says.
func (b *book) stopOf(h *wire.Header, at wire.Stop) superstep.Stop {
	return superstep.Stop{
		Rank: b.cfg.Rank, Superstep: h.Iteration, Iteration: at.Last, Asked: at.Asked, Thresholds: condition.Thresholds{S: at.S, W: at.W},
	}
}

// expect has the rank looked for after its patience, where the end of its superstep is known.
func (s *steps) expect(now time.Duration, late func(s *steps, number uint64)) {
	if s.late != nil {
		if s.Stopping() && s.until == s.Superstep() {
			return
		}
		s.late.Stop()
		s.late = nil
	}
	if !s.Stopping() {
		return
	}
	again, _ := s.Late(now)
	number := s.Superstep()
	s.until = number
	s.late = time.AfterFunc(again, func() { late(s, number) })
}

// late excuses this rank from a superstep, if it has not come to its end.
func (e *Engine) late(s *steps, number uint64) {
	if e.absent(s, number) {
		e.excuse()
	}
}

// absent reports whether this rank has not come to the end of a superstep within its patience. If it has begun another
// iteration since, it is looked for again.
func (e *Engine) absent(s *steps, number uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken != nil || !s.Stopping() || s.Superstep() != number {
		return false
	}
	s.late = nil
	now := time.Since(e.origin)
	_, absent := s.Late(now)
	if !absent {
		s.expect(now, e.late)
	}
	return absent
}

// report sends the end of an iteration to a server of the value, and before it, where this rank has not sent the
// value's announcement there, that one: what announces it may still wait for credit.
func (e *Engine) report(d *declaration, server int, h wire.Header, iteration wire.Report) {
	if err := e.wayTo(server).report(d, h, iteration); err != nil {
		e.cfg.Log.Error(fmt.Sprintf("rank %d's own server does not take the end of an iteration: %v", e.cfg.Rank, err))
	}
}

// Stopped is the decider's word where this rank's superstep ends, or that it goes on.
func (e *Engine) Stopped(h wire.Header, at wire.Stop) {
	e.mu.Lock()
	d := e.leaders[h.Tensor]
	if d == nil {
		e.mu.Unlock()
		return
	}
	s := d.superstep
	if verdict := s.Stop(e.stopOf(&h, at), time.Since(e.origin)); verdict != superstep.None {
		s.answer <- verdict == superstep.WasLast
	}
	s.expect(time.Since(e.origin), e.late)
	stopping := s.Stopping()
	e.mu.Unlock()
	if stopping {
		e.excuse()
	}
}

// stopping reports whether the end of some group's superstep is known.
func (b *book) stopping() bool {
	for _, d := range b.leaders {
		if d.superstep.Stopping() {
			return true
		}
	}
	return false
}

// excuse ends this rank's superstep without it where its end is decided and the rank may not come: others wait
// at the barrier, and this rank, in an operation of another kind, perhaps for them; or it is absent. That the rank goes on all the
// same does no harm: it is in the next superstep then.
func (e *Engine) excuse() {
	var frames []sent
	e.mu.Lock()
	for _, d := range e.leaders {
		s := d.superstep
		if !s.Stopping() || d.next < s.Superstep() || !s.Absent() && !e.elsewhere(d) {
			continue // or the push that ended the superstep before is still to be submitted, and looks again here
		}
		members := e.members(d)
		if slices.ContainsFunc(members, func(m *declaration) bool { return m.state != declareDone }) {
			continue // the use that declares it looks again here
		}
		r := s.Excuse()
		for _, m := range members {
			m.next++
			for part := range m.placed.Servers {
				frames = append(frames, sent{m, e.excuseOf(r, m, uint32(part), m == d)})
			}
		}
		s.expect(time.Since(e.origin), e.late)
	}
	e.mu.Unlock()
	for _, f := range frames {
		e.report(f.d, f.d.server(int(f.h.Part)), f.h, wire.Report{})
	}
}

// sent is a report on its way.
type sent struct {
	d *declaration
	h wire.Header
}

// excuseOf says of one partition that this rank has ended a superstep without it; of the first one of a group's leader to the decider too.
func (b *book) excuseOf(r superstep.Report, d *declaration, part uint32, leads bool) wire.Header {
	var flags wire.Flags
	if leads && part == 0 {
		flags = wire.FlagHome
	}
	h := b.headerOf(r, flags, d)
	h.Part = part
	return h
}

// again says at the heirs of a lost server, or where a value has been moved from a server, what that one may have been told without an answer: which supersteps this
// rank has ended without its values, and to the decider where the rank is. What is reported from now on goes there too.
func (e *Engine) again(results []*result) {
	busy := e.busy.sample()
	for _, r := range results {
		part := r.h.Part
		pushed := e.kept.pushed(keyOf{r.h.Tensor, part}, e.cfg.Rank) // before it is looked what is under way: that may end meanwhile
		e.mu.Lock()
		next, open := r.d.next, e.opened(r.d)
		if !e.stepped(r.d) {
			next = 0
		}
		var where *superstep.Report
		if part == 0 && r.d.superstep != nil && e.leaders[r.d.t.ID] == r.d {
			again := r.d.superstep.Again()
			where = &again
		}
		e.mu.Unlock()
		for i := pushed; i < next; i++ {
			if i != open {
				excuse := superstep.Report{Rank: e.cfg.Rank, Superstep: i, Last: true, Empty: true}
				e.report(r.d, r.server, e.excuseOf(excuse, r.d, part, false), wire.Report{})
			}
		}
		if where != nil {
			e.report(r.d, r.server, e.headerOf(*where, wire.FlagHome, r.d), wire.Report{Iteration: where.Iteration, Interval: where.Interval, Occupancy: busy})
		}
	}
}

// stepped reports whether a value has supersteps.
func (b *book) stepped(d *declaration) bool {
	for _, leader := range b.leaders {
		if d.follows(leader) {
			return true
		}
	}
	return false
}

// opened is the superstep that a push under way ends; none where there is no such push.
func (b *book) opened(d *declaration) (superstep uint64) {
	for o := range b.inflight {
		if o.d == d && o.Use&units.Add != 0 && o.Use&units.Within == 0 {
			return o.iteration
		}
	}
	return math.MaxUint64
}

// elsewhere reports whether this rank is in an operation on something else than a group's values.
func (b *book) elsewhere(leader *declaration) bool {
	for o := range b.inflight {
		if o.d == nil || !o.d.follows(leader) {
			return true
		}
	}
	return false
}

// members are the values of a group.
func (b *book) members(leader *declaration) (members []*declaration) {
	for _, n := range b.names {
		for _, d := range n.decls {
			if d.follows(leader) {
				members = append(members, d)
			}
		}
	}
	return members
}

// Supersteps tells where this rank is under each model with supersteps.
func (e *Engine) Supersteps() []Superstep {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := []Superstep{}
	for _, d := range e.leaders {
		s := d.superstep
		list = append(list, Superstep{Value: d.t.Name, Model: d.t.Sync.Model, Superstep: s.Superstep(), Iterations: s.Iterations(), S: s.Thresholds().S, W: s.Thresholds().W})
	}
	return list
}

// follows reports whether a value is stepped together with a leader.
func (d *declaration) follows(leader *declaration) bool {
	return d.group != "" && d.group == leader.group && d.t.ProcessSet == leader.t.ProcessSet
}

// lead begins the supersteps of a group when its first value is declared.
func (b *book) lead(d *declaration) {
	if d.group == "" || d.group != d.t.Name {
		return
	}
	if m, err := condition.Parse(d.t.Sync.Model); err == nil && m.Supersteps != nil {
		d.superstep = &steps{Worker: superstep.NewWorker(m.Supersteps, b.cfg.Rank), answer: make(chan bool, 1)}
		b.leaders[d.t.ID] = d
	}
}

// disband forgets all groups, when all ranks have joined.
func (b *book) disband() {
	for _, d := range b.leaders {
		close(d.superstep.answer)
	}
	b.leaders = map[uint32]*declaration{}
}

// occupancyWindow is what a measurement of the occupancy takes at least: the kernel counts in hundredths of a
// second, so that over a short iteration one tick more or less would look like a machine at work or idle.
const occupancyWindow = 500 * time.Millisecond

// occupancy is the share of this machine's processor time that was not idle in the newest window.
type occupancy struct {
	mu        lockorder.Mutex
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
		o.share = min(max((all-idle-o.busy)/total, 0), 1) // the kernel may take idle time back
	}
	o.at, o.busy, o.all = time.Now(), all-idle, all
	return o.share
}
