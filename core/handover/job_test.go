package handover

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomJobs plays whole elastic jobs: the scheduler, workers with servers in them or without, dedicated servers, and every message between
// them, which comes late, in any order, and from the scheduler also twice. Processes are killed, servers join and are drained, links between two
// processes are cut, at any moment, several at once. What the players decide is decided by membership.Epoch and View, condition.Machine, Key and task.State;
// the job around those does what their shells do. Of every key and iteration
//
//   - every survivor gets the same result, which has the push of every survivor, and no push twice, nor one of another iteration;
//   - every exchange ends once, and nobody waits in the end.
//
// Some tensors are held values (value_job_test.go).
func TestRandomJobs(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 5_000, func(seed uint64) error {
		j := &elasticJob{Rand: rand.New(rand.NewPCG(seed, 3)), leads: map[uint32]uint64{}, models: map[uint32]condition.Model{}, accusers: map[int]*rankset.Set{}, cut: map[link]bool{}, ways: map[inOrder][]func() error{}}
		return j.run()
	})
}

// elasticJob is the job, and the scheduler, which is never lost here.
type elasticJob struct {
	*rand.Rand
	now      *membership.Epoch
	tensors  []*membership.Tensor // as they were declared
	leads    map[uint32]uint64    // of the tensors that are held values: how far a rank may be ahead
	models   map[uint32]condition.Model
	workers  []*member
	servers  []*host
	flying   []letter
	accusers map[int]*rankset.Set // by server: who has lost it, until it is judged
	cut      map[link]bool
	ways     map[inOrder][]func() error
	leaving  *host // the server that was drained last
	ended    bool  // nobody is left to train or to serve
	time     time.Duration
}

type keyName struct {
	tensor uint32
	part   int
}

// key is a key as epochs know it.
func (j *elasticJob) key(k keyName) membership.Key {
	return membership.Key{Name: j.tensors[k.tensor-1].Name, Number: k.tensor, Part: k.part}
}

type link struct{ rank, server int }

// letter is a message.
type letter struct {
	link      // its ends; server -1: from the scheduler to the rank, rank -1: to or from the scheduler
	up   bool // to the server
	do   func() error
}

const length = 4 // iterations of a key

func (j *elasticJob) run() error {
	if err := j.begin(); err != nil {
		return err
	}
	trouble := 1 + j.IntN(9)
	for steps := 0; len(j.flying) > 0 && !j.ended; steps++ {
		if trouble > 0 && j.IntN(8) == 0 {
			trouble--
			if err := j.trouble(); err != nil {
				return err
			}
			continue
		}
		i := j.IntN(len(j.flying))
		l := j.flying[i]
		j.flying = slices.Delete(j.flying, i, i+1)
		if err := l.do(); err != nil {
			return fmt.Errorf("step %d: %w", steps, err)
		}
	}
	if j.ended {
		return nil
	}
	return j.check()
}

func (j *elasticJob) begin() error {
	embedded := j.IntN(3) // none, some or all workers hold servers
	node := func(n int, serves bool) membership.Node {
		m := membership.Node{Incarnation: uint64(n)}
		if serves {
			m.Addresses = address.List{{Kind: "tcp", At: fmt.Sprint("h:", n)}}
		}
		return m
	}
	var workers, dedicated []membership.Node
	for i := range 2 + j.IntN(4) {
		workers = append(workers, node(i+1, embedded == 2 || embedded == 1 && j.IntN(2) == 0))
	}
	for i := range j.IntN(3) + (2-embedded)/2 {
		dedicated = append(dedicated, node(100+i, true))
	}
	first, err := membership.Found(1, "round-robin", workers, dedicated)
	if err != nil { // no server by chance
		j.ended = true
		return nil
	}
	first.Elastic = true
	j.now = first
	for rank := range workers {
		j.workers = append(j.workers, &member{rank: rank, view: j.viewOf(first), handed: map[int]bool{}, keys: map[keyName]*exchange{}, values: map[keyName]*use{}})
	}
	for i := range first.Servers {
		j.serve(i)
	}
	for range 1 + j.IntN(2) {
		if err := j.declare(); err != nil {
			return err
		}
	}
	return nil
}

// viewOf is a node's own view of an epoch, in which nothing is declared.
func (j *elasticJob) viewOf(e *membership.Epoch) *membership.View {
	own := *e
	own.Keys = membership.Keys{}
	return membership.NewView(&own)
}

func (j *elasticJob) serve(index int) {
	j.servers = append(j.servers, &host{index: index, rank: j.now.Servers[index].Rank, view: j.viewOf(j.now), keys: map[keyName]*sums{}, held: map[keyName]*held{}})
}

// trouble has something happen to a process or a link.
func (j *elasticJob) trouble() error {
	w, s := j.workers[j.IntN(len(j.workers))], j.servers[j.IntN(len(j.servers))]
	switch j.IntN(8) {
	case 0, 1:
		j.kill(w, j.embedded(w.rank))
	case 2:
		j.kill(j.workerOf(s), s)
	case 3:
		if at := (link{w.rank, s.index}); s.rank != w.rank && !w.dead && !s.dead && !j.cut[at] {
			j.cut[at] = true
			j.flying = slices.DeleteFunc(j.flying, func(l letter) bool { return l.link == at })
			j.report(at)
		}
	case 4:
		return j.join()
	case 5:
		return j.declare()
	case 6:
		return j.drain(s)
	case 7:
		return j.remap(membership.Change{Remap: true})
	}
	return nil
}

// kill ends a process: a worker, a server or both. The scheduler's line to it breaks.
func (j *elasticJob) kill(w *member, s *host) {
	if w != nil {
		w.dead = true
		j.flying = slices.DeleteFunc(j.flying, func(l letter) bool { return l.up && l.rank == w.rank && j.IntN(2) == 0 }) // the rest has left
	}
	if s != nil {
		s.dead = true
		j.flying = slices.DeleteFunc(j.flying, func(l letter) bool { return !l.up && l.server == s.index && l.rank >= 0 && j.IntN(2) == 0 })
	}
	j.post(letter{link: link{-1, -1}, do: func() error {
		if w != nil {
			return j.lose(membership.Loss{Member: membership.Member{Role: membership.WorkerRole, Number: w.rank}, Why: "killed"})
		}
		return j.lose(membership.Loss{Member: membership.Member{Role: membership.ServerRole, Number: s.index}, Why: "killed"})
	}})
}

func (j *elasticJob) embedded(rank int) *host {
	for _, s := range j.servers {
		if s.rank == rank {
			return s
		}
	}
	return nil
}

func (j *elasticJob) workerOf(s *host) *member {
	if s.rank == membership.Dedicated {
		return nil
	}
	return j.workers[s.rank]
}

// post sends a message. A link that is cut takes none; what concerns the scheduler may come twice.
func (j *elasticJob) post(l letter) {
	if j.cut[l.link] {
		return
	}
	j.flying = append(j.flying, l)
	if (l.rank < 0 || l.server < 0) && j.IntN(8) == 0 {
		j.flying = append(j.flying, l)
	}
}

// report has a worker tell the scheduler that it has lost a server.
func (j *elasticJob) report(at link) {
	j.post(letter{link: link{-1, -1}, do: func() error { return j.accused(at) }})
}

func (j *elasticJob) accused(at link) error {
	s := j.servers[at.server]
	switch {
	case j.now.Servers[at.server].State == membership.Gone || j.workers[at.rank].dead:
		return nil
	case s.dead:
		return j.lose(membership.Loss{Member: membership.Member{Role: membership.ServerRole, Number: at.server}, Why: "killed"})
	}
	by := j.accusers[at.server]
	if by == nil {
		by = new(rankset.Set)
		j.accusers[at.server] = by
		j.flying = append(j.flying, letter{link: link{-1, -1}, do: func() error { return j.judge(at.server) }})
	}
	by.Add(at.rank)
	return nil
}

// judge loses a server that more than half of the workers have lost, or else those workers.
func (j *elasticJob) judge(server int) error {
	by := j.accusers[server].Overlap(j.now.Live())
	delete(j.accusers, server)
	if 2*by.Len() > j.now.Live().Len() {
		return j.lose(membership.Loss{Member: membership.Member{Role: membership.ServerRole, Number: server}, Why: "cut off"})
	}
	if j.now.Servers[server].State == membership.Gone {
		return nil
	}
	for _, rank := range by.Ranks() {
		if err := j.lose(membership.Loss{Member: membership.Member{Role: membership.WorkerRole, Number: rank}, Why: "cut off"}); err != nil {
			return err
		}
	}
	return nil
}

// lose begins the epoch without a member. A report of one that has gone changes nothing.
func (j *elasticJob) lose(l membership.Loss) error {
	if j.ended || !j.now.Has(l.Member) {
		return nil
	}
	next, err := j.now.Next(membership.Change{Lose: []membership.Loss{l}})
	if err != nil { // nobody is left
		j.ended = true
		return nil
	}
	j.enter(next)
	return nil
}

// enter tells all of a new epoch. They hear of it late, not in its order, or only of a later one.
func (j *elasticJob) enter(next *membership.Epoch) {
	j.now = next
	for _, w := range j.workers {
		j.post(letter{link: link{w.rank, -1}, do: func() error { return j.heard(w, next) }})
	}
	for _, s := range j.servers {
		j.post(letter{link: link{-1, s.index}, do: func() error { return j.heardBy(s, next) }})
	}
}

func (j *elasticJob) join() error {
	index := len(j.now.Servers)
	node := membership.Node{Incarnation: uint64(1000 + index), Addresses: address.List{{Kind: "tcp", At: fmt.Sprint("h:", 1000+index)}}}
	if err := j.remap(membership.Change{Servers: []membership.Node{node}, Remap: j.IntN(4) > 0}); err != nil {
		return err
	}
	j.serve(index)
	return nil
}

// remap begins an epoch in which keys move from servers that stay.
func (j *elasticJob) remap(c membership.Change) error {
	next, err := j.now.Next(c)
	if err == nil {
		j.enter(next)
	}
	return err
}

// drain has a dedicated server leave, when the workers have left the one before.
func (j *elasticJob) drain(s *host) error {
	before := j.leaving
	if s.dead || s.rank != membership.Dedicated || !j.now.Has(membership.Member{Role: membership.ServerRole, Number: s.index}) {
		return nil
	}
	if before != nil && slices.ContainsFunc(j.workers, func(w *member) bool { return !w.dead && !w.handed[before.index] }) {
		return nil
	}
	if live := slices.DeleteFunc(slices.Clone(j.now.Servers), func(s membership.Server) bool { return s.State == membership.Gone }); len(live) == 1 {
		return nil
	}
	s.shut, j.leaving = true, s
	return j.lose(membership.Loss{Member: membership.Member{Role: membership.ServerRole, Number: s.index}, Drained: true, Why: "drained"})
}

// declare places a tensor, which every worker begins to exchange when it hears of it, with the epoch in which it was placed.
func (j *elasticJob) declare() error {
	dealer, err := membership.NewDealer(j.now)
	if err != nil {
		return err
	}
	n := uint32(len(j.tensors) + 1)
	t := &membership.Tensor{Number: n, Name: membership.Name{Name: fmt.Sprint("t", n)}, Parts: make([]uint32, 1+j.IntN(3))}
	if j.IntN(2) == 0 {
		if err := j.synchronise(t); err != nil {
			return err
		}
	}
	dealer.Place([]*membership.Tensor{t})
	declared := *t
	declared.Servers = slices.Clone(t.Servers)
	j.tensors = append(j.tensors, &declared)
	at := j.now
	for _, w := range j.workers {
		j.flying = append(j.flying, letter{link: link{w.rank, -1}, do: func() error {
			if err := j.heard(w, at); err != nil || w.dead {
				return err
			}
			for part := range declared.Parts {
				k := keyName{n, part}
				if _, held := j.leads[n]; held {
					if err := j.declareValue(w, k); err != nil {
						return err
					}
					continue
				}
				w.keys[k] = &exchange{}
				if err := j.push(w, k); err != nil {
					return err
				}
			}
			return nil
		}})
	}
	return nil
}

// check looks at what the survivors have in the end.
func (j *elasticJob) check() error {
	var left []*member
	for _, rank := range j.now.Live().Ranks() {
		if w := j.workers[rank]; !w.dead {
			left = append(left, w)
		}
	}
	for i, t := range j.tensors {
		for part := range t.Parts {
			k := keyName{uint32(i + 1), part}
			for _, w := range left {
				has := w.has
				if _, held := j.leads[k.tensor]; held {
					has = func(k keyName, left []*member) error { return j.checkValue(w, k, left) }
				}
				if err := has(k, left); err != nil {
					return fmt.Errorf("epoch %d, rank %d, %v: %w", j.now.Number, w.rank, k, err)
				}
			}
		}
	}
	return nil
}
