package handover

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/rankset"
)

// Held values in the jobs of TestRandomJobs: each rank declares a value, adds to it, and reads it between. Of every value
//
//   - what survivors read has every push once, and all their own; of two values that were read one has all of the other;
//   - nobody reads it before those whom the synchronisation model has it wait for have pushed, or under supersteps come to the barrier;
//   - every use ends.
//
// Values move too: the old server gives what it has to the ranks, which bring it to the new one.

// use is a worker's side of a held value.
type use struct {
	next   request   // or the present one
	at     int       // the server that has it
	reads  []reading // the newest is kept
	from   int       // the server of that one
	task   task.State
	adding int // pushes that are left; under supersteps these

	steps  *superstep.Worker // nil without supersteps
	home   int               // the server that its reports go to
	within int               // pushes within supersteps
}

// request is a use on its way. The first declares the value, whose root is rank 0.
type request struct {
	rank                   int
	operation, iteration   uint64
	declares, adds, atOnce bool
	within                 bool // a superstep
}

// name is that of a push.
func (r request) name() string {
	if r.within {
		return fmt.Sprintf("%d/w%d", r.rank, r.operation)
	}
	return fmt.Sprintf("%d/%d", r.rank, r.iteration)
}

// reading is a value that was read.
type reading struct {
	request
	cover  Cover
	pushes []string // that are in it
}

// held is a server's side of a value.
type held struct {
	handed   Value
	open     bool
	known    bool        // the root has come
	declared rankset.Set // who has come to declare it
	waiting  []request   // while it is not open, all that come

	suppliers rankset.Set // who has supplied a value

	machine *condition.Machine
	reading // as it is now
	decider *superstep.Decider
}

// synchronise gives a value a model. One with supersteps has one partition, beside which its decider is.
func (j *elasticJob) synchronise(t *membership.Tensor) (err error) {
	if j.IntN(3) == 0 {
		j.leads[t.Number], t.Parts = 0, t.Parts[:1]
		j.models[t.Number], err = condition.Parse([]string{"adaptive:1,1", "adaptive:2,3", "elastic:2"}[j.IntN(3)])
		return err
	}
	j.leads[t.Number] = uint64(j.IntN(3))
	j.models[t.Number] = condition.SSP(j.leads[t.Number])
	return nil
}

// inOrder is a way on which messages keep their order; what is lost of them is lost from the end.
type inOrder struct {
	link
	up bool
	k  keyName
}

func (j *elasticJob) postInOrder(way inOrder, do func() error) {
	if j.cut[way.link] {
		return
	}
	j.ways[way] = append(j.ways[way], do)
	j.post(letter{link: way.link, up: way.up, do: func() error {
		do := j.ways[way][0]
		j.ways[way] = j.ways[way][1:]
		return do()
	}})
}

// declareValue has a worker begin with a value.
func (j *elasticJob) declareValue(w *member, k keyName) error {
	x := &use{adding: length, next: request{rank: w.rank, declares: true}}
	if m := j.models[k.tensor]; m.Supersteps != nil {
		x.steps = superstep.NewWorker(m.Supersteps, w.rank)
	}
	w.values[k] = x
	return j.beginUse(w, k, x)
}

func (j *elasticJob) beginUse(w *member, k keyName, x *use) error {
	if len(x.reads) == 0 || w.handed[x.at] { // else where the last one was answered, until that server says that the value is elsewhere
		x.at = j.heir(w, k, j.tensors[k.tensor-1].Servers[k.part])
	}
	x.home = x.at
	x.task = task.New(task.Answered | task.Retained)
	return j.sendUse(w, k, x)
}

func (x *use) step(e task.Event) error {
	next, out := x.task.Step(e)
	if out&task.Refused != 0 {
		return fmt.Errorf("%v is refused to a use that is %v", e, x.task)
	}
	x.task = next
	return nil
}

func (j *elasticJob) sendUse(w *member, k keyName, x *use) error {
	for _, e := range []task.Event{task.Queue, task.Move, task.Sent} {
		if err := x.step(e); err != nil {
			return err
		}
	}
	r, s := x.next, j.servers[x.at]
	j.postInOrder(inOrder{link{w.rank, s.index}, true, k}, func() error { return j.used(s, k, r) })
	return nil
}

// succeedValues gives the heirs of a server's values what a worker has of them, and then what it waits for.
func (j *elasticJob) succeedValues(w *member, server int) error {
	for _, k := range j.keyNames() {
		x := w.values[k]
		if x == nil {
			continue
		}
		if len(x.reads) > 0 && x.from == server {
			j.supplyValue(w, k, x)
		}
		if x.at != server || x.task.Settled() {
			continue
		}
		if err := j.useElsewhere(w, k, x); err != nil {
			return err
		}
	}
	return nil
}

// supplyValue brings the newest value that a worker has to where the value is.
func (j *elasticJob) supplyValue(w *member, k keyName, x *use) {
	x.from = j.heir(w, k, x.from)
	s, newest := j.servers[x.from], x.reads[len(x.reads)-1]
	j.postInOrder(inOrder{link{w.rank, s.index}, true, k}, func() error { return j.suppliedValue(s, k, w.rank, newest) })
	if x.home = x.from; x.steps != nil {
		j.reportSteps(w, k, x, x.steps.Again())
	}
}

// reportSteps tells the server of a value where the worker is in its supersteps.
func (j *elasticJob) reportSteps(w *member, k keyName, x *use, r superstep.Report) {
	if w.handed[x.home] {
		x.home = j.heir(w, k, x.home)
	}
	s := j.servers[x.home]
	j.postInOrder(inOrder{link{w.rank, s.index}, true, k}, func() error {
		if !s.takes(w.rank) || s.view.Now().Elsewhere(j.key(k), s.index) {
			return nil
		}
		h := s.heldOf(k)
		if h.decider == nil {
			h.decider = superstep.NewDecider(j.models[k.tensor].Supersteps, s.view.Now().Live())
		}
		j.stops(s, k, h.decider.Hear(r, j.clock()))
		return nil
	})
}

// clock is a time later than the one before.
func (j *elasticJob) clock() time.Duration {
	j.time += time.Millisecond
	return j.time
}

// stops are a decider's words on their way.
func (j *elasticJob) stops(s *host, k keyName, out superstep.Outputs) {
	for _, stop := range out.Stops {
		w := j.workers[stop.Rank]
		j.post(letter{link: link{w.rank, s.index}, do: func() error {
			x := w.values[k]
			if w.dead || w.handed[s.index] {
				return nil
			}
			return j.proceed(w, k, x, x.steps.Stop(stop, j.clock()))
		}})
	}
}

// proceed has a worker do what a verdict says: it adds within its superstep, or comes to the barrier.
func (j *elasticJob) proceed(w *member, k keyName, x *use, verdict superstep.Verdict) error {
	next := request{rank: w.rank, operation: x.next.operation + 1, iteration: x.steps.Superstep(), adds: true}
	switch verdict {
	case superstep.GoesOn:
		next.within, next.atOnce = true, true
		x.within++
	case superstep.WasLast:
		next.iteration--
		x.adding--
	default:
		return nil
	}
	x.next = next
	return j.beginUse(w, k, x)
}

// useElsewhere begins a use again.
func (j *elasticJob) useElsewhere(w *member, k keyName, x *use) error {
	if err := x.step(task.Again); err != nil {
		return fmt.Errorf("rank %d, value %v: %w", w.rank, k, err)
	}
	x.at = j.heir(w, k, x.at)
	x.home = x.at
	return j.sendUse(w, k, x)
}

// given is what a server gives a worker of a value that has been moved from it.
func (j *elasticJob) given(w *member, k keyName, server int, r reading) error {
	x := w.values[k]
	if w.dead || w.handed[server] {
		return nil
	}
	if x.from != server || len(x.reads) == 0 {
		return fmt.Errorf("server %d gives rank %d value %v, of which it has %d from server %d", server, w.rank, k, len(x.reads), x.from)
	}
	x.reads = append(x.reads, r)
	j.supplyValue(w, k, x)
	return nil
}

// movedValue is the word of a server that a value is elsewhere, for a use or for what was supplied.
func (j *elasticJob) movedValue(w *member, k keyName, server int, r request, supply bool) error {
	x := w.values[k]
	switch {
	case w.dead || w.handed[server]:
	case supply && x.from != server:
		return fmt.Errorf("server %d sends back what rank %d has supplied of value %v to server %d", server, w.rank, k, x.from)
	case supply:
		j.supplyValue(w, k, x)
	case r != x.next || x.at != server || x.task.Settled():
		return fmt.Errorf("server %d sends %+v of value %v away; the rank waits for %+v from server %d", server, r, k, x.next, x.at)
	default:
		return j.useElsewhere(w, k, x)
	}
	return nil
}

// read gives a worker a value.
func (j *elasticJob) read(w *member, k keyName, server int, r reading) error {
	x := w.values[k]
	if w.dead || w.handed[server] {
		return nil
	}
	if r.request != x.next || x.at != server || x.task.Settled() {
		return fmt.Errorf("server %d answers %+v of value %v; the rank waits for %+v from server %d", server, r.request, k, x.next, x.at)
	}
	for _, e := range []task.Event{task.Arrive, task.Answer, task.Confirm} {
		if err := x.step(e); err != nil {
			return err
		}
	}
	x.reads, x.from = append(x.reads, r), server
	if x.adding == 0 {
		return nil
	}
	if x.steps != nil {
		x.steps.Begin(j.clock())
		report, verdict := x.steps.End(j.clock())
		j.reportSteps(w, k, x, report)
		return j.proceed(w, k, x, verdict)
	}
	pushed := uint64(length - x.adding)
	next := request{rank: w.rank, operation: x.next.operation + 1, iteration: pushed, adds: j.IntN(3) > 0}
	switch {
	case next.adds:
		x.adding--
		next.atOnce = j.IntN(4) == 0
	case pushed == 0:
		next.atOnce = true
	default:
		next.iteration--
	}
	x.next = next
	return j.beginUse(w, k, x)
}

func (j *elasticJob) keyNames() (all []keyName) {
	for i, t := range j.tensors {
		for part := range t.Parts {
			all = append(all, keyName{uint32(i + 1), part})
		}
	}
	return all
}

func (s *host) heldOf(k keyName) *held {
	h := s.held[k]
	if h == nil {
		h = &held{}
		s.held[k] = h
	}
	return h
}

// used is readers.use of package server/held.
func (j *elasticJob) used(s *host, k keyName, r request) error {
	if !s.takes(r.rank) {
		return nil
	}
	if s.view.Now().Elsewhere(j.key(k), s.index) {
		j.sendBack(s, k, r, false)
		return nil
	}
	h := s.heldOf(k)
	if r.declares {
		h.handed.Came(r.rank)
		h.declared.Add(r.rank)
		h.known = h.known || r.rank == 0
	}
	if !h.open {
		h.waiting = append(h.waiting, r)
		return j.openValue(s, k)
	}
	return j.serveUse(s, k, r)
}

func (j *elasticJob) suppliedValue(s *host, k keyName, rank int, r reading) error {
	if !s.takes(rank) {
		return nil
	}
	if s.view.Now().Elsewhere(j.key(k), s.index) {
		j.sendBack(s, k, request{rank: rank}, true)
		return nil
	}
	h := s.heldOf(k)
	if h.open {
		return nil
	}
	h.suppliers.Add(rank)
	if h.handed.Supplied(rank, r.cover) {
		h.pushes = slices.Clone(r.pushes)
	}
	return j.openValue(s, k)
}

// openValue has a value begin, or go on, when all have come that it waits for.
func (j *elasticJob) openValue(s *host, k keyName) (err error) {
	h, live := s.held[k], s.view.Now().Live()
	newest, supplied := h.handed.Newest()
	switch {
	case supplied:
		if h.handed.Missing(rankset.Range(len(j.workers)).Minus(live)).Len() > 0 {
			return nil
		}
		h.cover = newest.Clone()
	case !h.known || !h.declared.Covers(live):
		return nil
	default:
		for _, rank := range h.declared.Ranks() {
			h.cover.Declare(rank)
		}
	}
	h.machine, err = h.cover.Resume(condition.Config{Live: live, Model: j.models[k.tensor], Dataflow: condition.Accumulate})
	if err != nil {
		return err
	}
	h.open = true
	waited := h.waiting
	h.waiting = nil
	for _, r := range waited {
		if live.Has(r.rank) {
			if err := j.serveUse(s, k, r); err != nil {
				return err
			}
		}
	}
	return nil
}

func (j *elasticJob) serveUse(s *host, k keyName, r request) error {
	h := s.held[k]
	switch {
	case !r.adds || h.cover.Has(r.rank, r.operation):
	case r.within:
		h.cover.Push(r.rank, r.operation, r.iteration, true)
		h.pushes = append(h.pushes, r.name())
	default:
		h.cover.Push(r.rank, r.operation, r.iteration, false)
		for _, o := range h.machine.Step(condition.Push(r.rank, r.iteration, 0), nil) {
			if o.Kind == condition.Admit {
				h.pushes = append(h.pushes, r.name())
			} else if err := j.decided(s, k, o); err != nil {
				return err
			}
		}
	}
	if r.declares || r.atOnce {
		j.answerUse(s, k, r)
		return nil
	}
	h.waiting = append(h.waiting, r)
	for _, o := range h.machine.Step(condition.Pull(r.rank, r.iteration), nil) {
		if err := j.decided(s, k, o); err != nil {
			return err
		}
	}
	return nil
}

func (j *elasticJob) decided(s *host, k keyName, o condition.Output) error {
	h := s.held[k]
	switch o.Kind {
	case condition.Refuse, condition.Duplicate, condition.Drop:
		return fmt.Errorf("server %d, value %v: %v", s.index, k, o)
	case condition.Answer:
		h.waiting = slices.DeleteFunc(h.waiting, func(r request) bool {
			due := r.rank == o.Rank && r.iteration == o.Progress
			if due {
				j.answerUse(s, k, r)
			}
			return due
		})
	}
	return nil
}

func (j *elasticJob) answerUse(s *host, k keyName, r request) {
	h := s.held[k]
	h.cover.Closed = h.machine.V()
	now := reading{request: r, cover: h.cover.Clone(), pushes: slices.Clone(h.pushes)}
	if s.view.Now().Live().Has(r.rank) {
		w := j.workers[r.rank]
		j.postInOrder(inOrder{link{r.rank, s.index}, false, k}, func() error { return j.read(w, k, s.index, now) })
	}
}

// leaveValue gives a value away that has been moved to another server: what it is now to every rank that had it, or where it has not begun here what ranks have supplied.
func (j *elasticJob) leaveValue(s *host, k keyName, live rankset.Set) {
	h := s.held[k]
	delete(s.held, k)
	if h.open {
		h.cover.Closed = h.machine.V()
		now := reading{request: request{declares: true}, cover: h.cover.Clone(), pushes: slices.Clone(h.pushes)}
		for _, r := range h.cover.Ranks {
			if w := j.workers[r.Rank]; live.Has(r.Rank) {
				j.postInOrder(inOrder{link{w.rank, s.index}, false, k}, func() error { return j.given(w, k, s.index, now) })
			}
		}
	} else {
		for _, rank := range h.suppliers.Ranks() {
			j.sendBack(s, k, request{rank: rank}, true)
		}
	}
	for _, r := range h.waiting {
		j.sendBack(s, k, r, false)
	}
}

func (j *elasticJob) sendBack(s *host, k keyName, r request, supply bool) {
	w := j.workers[r.rank]
	j.postInOrder(inOrder{link{r.rank, s.index}, false, k}, func() error { return j.movedValue(w, k, s.index, r, supply) })
}

func (j *elasticJob) liveValues(s *host, live rankset.Set) error {
	for _, k := range j.keyNames() {
		switch h := s.held[k]; {
		case h == nil:
		case s.view.Now().Elsewhere(j.key(k), s.index):
			j.leaveValue(s, k, live)
		case !h.open:
			if err := j.openValue(s, k); err != nil {
				return err
			}
		default:
			for _, o := range h.machine.Step(condition.Live(live), nil) {
				if err := j.decided(s, k, o); err != nil {
					return err
				}
			}
		}
		if h := s.held[k]; h != nil && h.decider != nil {
			j.stops(s, k, h.decider.Live(live))
		}
	}
	return nil
}

// checkValue checks what a worker has read of a value.
func (j *elasticJob) checkValue(w *member, k keyName, left []*member) error {
	x := w.values[k]
	if !slices.ContainsFunc(left, func(o *member) bool { return len(o.values[k].reads) > 0 }) && j.workers[0].dead {
		return nil // its root has gone before anybody had it
	}
	if x.adding > 0 || !x.task.Settled() {
		return fmt.Errorf("it waits for %+v from server %d, %v", x.next, x.at, x.task)
	}
	last := x.reads[len(x.reads)-1].pushes
	if n := len(slices.DeleteFunc(slices.Clone(last), func(p string) bool { return !strings.HasPrefix(p, fmt.Sprint(w.rank, "/w")) })); n != x.within {
		return fmt.Errorf("the last value has %d of %d pushes within supersteps", n, x.within)
	}
	for i, r := range x.reads {
		has := map[string]bool{}
		for _, p := range r.pushes {
			if has[p] {
				return fmt.Errorf("read %d is %q: a push counts twice", i, r.pushes)
			}
			has[p] = true
		}
		for _, o := range left {
			var due uint64 // pushes of the other one
			switch {
			case o == w && r.within:
				due = r.iteration
			case o == w && !r.declares && (r.adds || !r.atOnce):
				due = r.iteration + 1
			case !r.declares && !r.atOnce && r.iteration+1 > j.leads[k.tensor]:
				due = r.iteration + 1 - j.leads[k.tensor]
			}
			for p := range due {
				if !has[fmt.Sprintf("%d/%d", o.rank, p)] {
					return fmt.Errorf("read %d, %+v, is %q, without push %d of rank %d, where ranks lead by %d", i, r.request, r.pushes, p, o.rank, j.leads[k.tensor])
				}
			}
			for _, other := range o.values[k].reads {
				if len(other.pushes) <= len(r.pushes) && slices.ContainsFunc(other.pushes, func(p string) bool { return !has[p] }) {
					return fmt.Errorf("read %d is %q, and rank %d has read %q: neither has all of the other", i, r.pushes, o.rank, other.pushes)
				}
			}
		}
	}
	return nil
}
