package handover

import (
	"fmt"
	"slices"
	"strings"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/rankset"
)

// host is a server.
type host struct {
	index int
	rank  int // in whose process it is, or membership.Dedicated
	dead  bool
	shut  bool // drained: it answers nobody any more
	view  *membership.View
	keys  map[keyName]*sums
	held  map[keyName]*held
}

// sums is a server's side of a key.
type sums struct {
	machine *condition.Machine
	slots   map[uint64]*slot
	handed  Key
}

type slot struct {
	pushes []string // one for each push that was added
	by     []int    // their ranks
	came   rankset.Set
	result string // "" until it is closed
	waits  []int

	supplied bool // by a rank
	supplier int
}

// heardBy has a server follow the scheduler: it waits no more for ranks that are lost.
func (j *elasticJob) heardBy(s *host, e *membership.Epoch) error {
	if s.dead {
		return nil
	}
	if _, err := s.view.Follow(e); err != nil {
		return err
	}
	live := s.view.Now().Live()
	for k, n := range s.keys {
		if s.view.Now().Elsewhere(j.key(k), s.index) {
			for iteration, at := range n.slots {
				for _, rank := range at.waits {
					j.elsewhere(s, k, rank, iteration, false)
				}
				if at.supplied {
					j.elsewhere(s, k, at.supplier, iteration, true)
				}
			}
			delete(s.keys, k)
			continue
		}
		if err := j.live(s, k, live); err != nil {
			return err
		}
	}
	return j.liveValues(s, live)
}

func (j *elasticJob) live(s *host, k keyName, live rankset.Set) error {
	n := s.keys[k]
	if err := j.carryOut(s, k, n.machine.Step(condition.Live(live), nil)); err != nil {
		return err
	}
	for _, iteration := range n.handed.Live(live) {
		j.sum(s, k, iteration)
	}
	return nil
}

// takes reports whether a server reads what a rank sends.
func (s *host) takes(rank int) bool {
	return !s.dead && !s.shut && s.view.Now().Live().Has(rank)
}

// of is a server's side of a key, which has reached an iteration.
func (s *host) of(k keyName, iteration uint64) (*sums, error) {
	n := s.keys[k]
	if n != nil && iteration <= n.machine.V() {
		return n, nil
	}
	m, err := condition.New(condition.Config{Start: iteration, Live: s.view.Now().Live(), Model: condition.BSP(), Dataflow: condition.Aggregate})
	if err != nil {
		return nil, err
	}
	if n == nil {
		n = &sums{slots: map[uint64]*slot{}}
		s.keys[k] = n
	}
	n.machine = m
	for i, slot := range n.slots {
		if i < iteration && slot.result == "" {
			n.handed.Reached(i, slot.came)
		}
	}
	return n, nil
}

func (n *sums) slot(iteration uint64) *slot {
	at := n.slots[iteration]
	if at == nil {
		at = &slot{}
		n.slots[iteration] = at
	}
	return at
}

// pushed is iterations.open and arrived of package server/sums.
func (j *elasticJob) pushed(s *host, k keyName, rank int, iteration uint64) error {
	if !s.takes(rank) {
		return nil
	}
	if s.view.Now().Elsewhere(j.key(k), s.index) {
		j.elsewhere(s, k, rank, iteration, false)
		return nil
	}
	n, err := s.of(k, iteration)
	if err != nil {
		return err
	}
	at := n.slot(iteration)
	if at.result != "" {
		j.answer(s, k, iteration, at.result, rank)
		return nil
	}
	at.pushes, at.by = append(at.pushes, fmt.Sprintf("%d/%d", rank, iteration)), append(at.by, rank)
	at.waits = append(at.waits, rank)
	if iteration < n.machine.V() {
		if n.handed.Pushed(rank, iteration, n.machine.Live()) {
			j.sum(s, k, iteration)
		}
		return nil
	}
	at.came.Add(rank)
	out := n.machine.Step(condition.Pull(rank, iteration), nil)
	out = append(out, n.machine.Step(condition.Push(rank, iteration, 0), nil)...)
	return j.carryOut(s, k, out)
}

func (j *elasticJob) carryOut(s *host, k keyName, out []condition.Output) error {
	for _, o := range out {
		switch o.Kind {
		case condition.Advance:
			j.close(s, k, o.Progress, o.Contributors)
		case condition.Refuse:
			return fmt.Errorf("server %d: %v", s.index, o)
		}
	}
	return nil
}

// sum closes an iteration that every live rank lacks.
func (j *elasticJob) sum(s *host, k keyName, iteration uint64) {
	n := s.keys[k]
	by := n.handed.By(iteration).Clone()
	n.handed.Found(iteration)
	j.close(s, k, iteration, by)
}

// close makes the sum of what some ranks pushed the result, in their order.
func (j *elasticJob) close(s *host, k keyName, iteration uint64, by rankset.Set) {
	at := s.keys[k].slots[iteration]
	var sum []string
	for i, p := range at.pushes {
		if by.Has(at.by[i]) {
			sum = append(sum, p)
		}
	}
	slices.Sort(sum)
	j.found(s, k, iteration, strings.Join(sum, " "))
}

// found answers all who wait for a result.
func (j *elasticJob) found(s *host, k keyName, iteration uint64, result string) {
	at := s.keys[k].slots[iteration]
	at.result = result
	for _, rank := range at.waits {
		j.answer(s, k, iteration, result, rank)
	}
	at.waits = nil
}

func (j *elasticJob) answer(s *host, k keyName, iteration uint64, result string, rank int) {
	if s.view.Now().Live().Has(rank) {
		w := j.workers[rank]
		j.post(letter{link: link{rank, s.index}, do: func() error { return j.answered(w, k, s.index, iteration, result) }})
	}
}

// supplied is iterations.supplied of package server/sums.
func (j *elasticJob) supplied(s *host, k keyName, rank int, iteration uint64, result string) error {
	if !s.takes(rank) {
		return nil
	}
	if s.view.Now().Elsewhere(j.key(k), s.index) {
		j.elsewhere(s, k, rank, iteration, true)
		return nil
	}
	n, err := s.of(k, iteration+1)
	if err != nil {
		return err
	}
	at := n.slot(iteration)
	if at.result != "" {
		return nil
	}
	at.supplied, at.supplier = true, rank
	n.handed.Found(iteration)
	j.found(s, k, iteration, result)
	return nil
}

// elsewhere tells a rank to bring its push, or what it supplies, to the server that the key has been moved to.
func (j *elasticJob) elsewhere(s *host, k keyName, rank int, iteration uint64, supply bool) {
	if s.view.Now().Live().Has(rank) {
		w := j.workers[rank]
		j.post(letter{link: link{rank, s.index}, do: func() error { return j.moved(w, k, s.index, iteration, supply) }})
	}
}
