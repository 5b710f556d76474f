package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/core/superstep"
)

// The events of an iteration, in order.
type eventKind uint8

const (
	computed eventKind = iota // a worker has computed
	ended                     // the decider learns that a worker has ended an iteration
	stop                      // a worker learns the end of its superstep, or that it continues
	head                      // the first byte of a push is at its server's link
	whole                     // a push is complete, and its pull has arrived
	handled                   // its server's processor is done with it
	reported                  // global barrier: the scheduler learns that all pushes of a worker are complete
	granted                   // global barrier: a pull that the scheduler allowed is at its server
	answered                  // the first byte of an answer is at its worker's link
	complete                  // a worker has all its answers
	tuned                     // the servers get a new pull condition
)

// forever bounds every time that a run adds, and the time at which it stops, so that no event's time overflows.
const forever = time.Duration(1 << 60)

// run is a running scenario.
type run struct {
	Scenario
	now     time.Duration
	queue   queue
	workers []worker
	servers []server
	gates   []*gate // by key, or the scheduler's alone
	decider *decider
	size    []int64              // of each key
	timed   []placement.Exchange // of each rank and key, where they are observed
	result  Result
	finish  int  // workers that have done their iterations
	over    bool // no iteration begins any more and time has stopped
}

// server is the two directions of a server's link, and its processor.
type server struct{ in, out, processor link }

type worker struct {
	rng       *rand.Rand
	own       float64
	in        link   // out needs none: a worker's pushes follow each other
	iteration uint64 // that it is in
	superstep uint64
	last      bool               // the iteration ends the superstep
	steps     *superstep.Worker  // nil without supersteps
	reports   []superstep.Report // in flight to the decider
	words     []superstep.Stop   // in flight from it

	pushed   time.Duration // when it began to push
	arrived  time.Duration // when its last push so far was whole
	decided  time.Duration // when its last answer so far was
	ready    time.Duration // when its last answer so far is whole
	coming   int           // pushes that are not whole yet
	missing  int           // keys that are not answered yet
	interval time.Duration // of the iteration, without waits
	exchange time.Duration // of the iteration before, without waits
}

// Run runs a scenario to its end.
func Run(s Scenario) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	r, err := newRun(s)
	if err != nil {
		return Result{}, err
	}
	for rank := range r.workers {
		r.begin(rank)
	}
	for !r.over {
		if r.queue.len() == 0 {
			return Result{}, r.broken(fmt.Errorf("no event is left, and %d workers of %d are done", r.finish, s.Workers))
		}
		e := r.queue.next()
		if e.at >= forever {
			return Result{}, fmt.Errorf("%s, seed %d: the run takes more than %.0f years of virtual time: give it fewer iterations or bytes, shorter times or more bandwidth", s.Model.Name, s.Seed, forever.Hours()/24/365)
		}
		r.now = e.at
		r.result.Events++
		if err := r.handle(e); err != nil {
			return Result{}, r.broken(err)
		}
	}
	idle := s.Until == All && s.Model.Supersteps == nil
	for _, g := range r.gates {
		if err := g.end(idle); err != nil {
			return Result{}, r.broken(err)
		}
	}
	return r.summary(), nil
}

func (r *run) broken(err error) error {
	return fmt.Errorf("%s, seed %d, after %v: %w; this is a bug, please report it with the settings of the run", r.Model.Name, r.Seed, r.now, err)
}

func newRun(s Scenario) (*run, error) {
	r := &run{Scenario: s, workers: make([]worker, s.Workers), servers: make([]server, s.Servers), decider: newDecider(s)}
	for rank := range r.workers {
		rng := rand.New(rand.NewPCG(s.Seed, uint64(rank)))
		r.workers[rank] = worker{rng: rng, own: rng.Float64()}
		if s.Model.Supersteps != nil {
			r.workers[rank].steps = superstep.NewWorker(s.Model.Supersteps, rank)
		}
	}
	gates := s.keys()
	if s.Barrier == Global {
		gates = 1
	}
	for range gates {
		g, err := newGate(s)
		if err != nil {
			return nil, err
		}
		r.gates = append(r.gates, g)
	}
	for key := range s.keys() {
		r.size = append(r.size, s.bytes(key))
	}
	if s.Observe != nil {
		r.timed = make([]placement.Exchange, s.Workers*s.keys())
	}
	return r, nil
}

func (r *run) handle(e event) error {
	rank, key := int(e.rank), int(e.key)
	switch e.kind {
	case computed:
		r.endIteration(rank)
	case ended:
		r.hear(rank)
	case stop:
		r.stop(rank)
	case head:
		r.arrive(rank, key)
	case whole:
		return r.process(rank, key)
	case handled:
		return r.received(rank, key)
	case reported:
		return r.exchange(0, rank)
	case granted:
		r.answer(rank, key)
	case answered:
		r.receive(rank, key)
	case complete:
		r.complete(rank)
	case tuned:
		return r.retune()
	}
	return nil
}

// begin begins a worker's next iteration.
func (r *run) begin(rank int) {
	w := &r.workers[rank]
	if w.steps != nil {
		w.steps.Begin(r.now)
	}
	w.interval = r.Compute.draw(draw{w.rng, rank, w.own, w.iteration})
	r.queue.add(r.now+w.interval, computed, rank, 0)
}

// endIteration pushes a worker's iteration. Where that can make a barrier due, the worker asks the decider first.
func (r *run) endIteration(rank int) {
	w := &r.workers[rank]
	w.pushed, w.ready = r.now, 0
	w.coming, w.missing = len(r.size), len(r.size)
	r.result.compute += w.interval.Seconds()
	w.interval += w.exchange
	verdict := superstep.GoesOn
	if w.steps != nil {
		var report superstep.Report
		report, verdict = w.steps.End(r.now)
		report.Interval = w.interval
		w.reports = append(w.reports, report)
		r.queue.add(r.now+r.Latency, ended, rank, 0)
	}
	if verdict != superstep.Asked {
		r.push(rank, verdict)
	}
}

// hear delivers a worker's report to the decider.
func (r *run) hear(rank int) {
	w := &r.workers[rank]
	report := w.reports[0]
	w.reports = append(w.reports[:0], w.reports[1:]...)
	for _, s := range r.decider.supersteps.Hear(report, r.now).Stops {
		to := &r.workers[s.Rank]
		to.words = append(to.words, s)
		r.queue.add(r.now+r.Latency, stop, s.Rank, 0)
	}
}

// stop delivers the decider's answer to a worker.
func (r *run) stop(rank int) {
	w := &r.workers[rank]
	word := w.words[0]
	w.words = append(w.words[:0], w.words[1:]...)
	if verdict := w.steps.Stop(word, r.now); verdict != superstep.None {
		r.push(rank, verdict)
	}
}

// push sends a worker's keys, one event at a time; otherwise the queue would hold all messages of all workers.
func (r *run) push(rank int, verdict superstep.Verdict) {
	r.workers[rank].last = verdict == superstep.WasLast
	r.queue.add(r.now+r.Latency, head, rank, 0)
}

func (r *run) arrive(rank, key int) {
	tail := r.now + r.Bandwidth.hold(r.size[key]) // the last byte has come over the worker's link
	server := r.server(key)
	through := r.servers[server].in.occupy(r.now, r.link(server).hold(r.size[key]))
	if e := r.observed(rank, key); e != nil {
		*e = placement.Exchange{Bytes: uint64(r.size[key]), Begun: r.now}
	}
	r.queue.add(max(tail, through), whole, rank, key)
	if key+1 < len(r.size) {
		r.queue.add(tail, head, rank, key+1)
	}
}

// process has a server's processor handle a complete push.
func (r *run) process(rank, key int) error {
	cost := r.cost(r.server(key), r.size[key])
	if cost == 0 {
		return r.received(rank, key)
	}
	r.queue.add(r.servers[r.server(key)].processor.occupy(r.now, cost), handled, rank, key)
	return nil
}

// received notes a complete push that its server has handled.
func (r *run) received(rank, key int) error {
	w := &r.workers[rank]
	w.arrived = r.now
	w.coming--
	if e := r.observed(rank, key); e != nil {
		e.Wait = -r.now
	}
	if r.Barrier == Overlap {
		return r.exchange(key, rank)
	}
	if w.coming == 0 { // an acknowledgement, then the report
		r.queue.add(r.now+2*r.Latency, reported, rank, 0)
	}
	return nil
}

// exchange delivers a worker's push and pull to a gate, and sends the answers.
func (r *run) exchange(k, rank int) error {
	w, g := &r.workers[rank], r.gates[k]
	if k == 0 {
		r.note(rank)
	}
	progress := w.iteration
	if r.Model.Supersteps != nil {
		progress = w.superstep
		if !w.last { // it bypasses the machine: the worker is free within its superstep
			r.release(k, rank)
			return nil
		}
	}
	v := g.v
	if err := g.exchange(rank, progress); err != nil {
		return err
	}
	if k == 0 && g.v > v && r.decider.tuning != nil {
		if _, changed := r.decider.tuning.Tune(); changed {
			r.queue.add(r.now+r.Latency, tuned, 0, 0)
		}
	}
	r.release(k, g.answers...)
	return nil
}

// note enters a push to the first key for the decider.
func (r *run) note(rank int) {
	w := &r.workers[rank]
	if w.steps != nil {
		r.decider.pushed(rank, w.last)
	}
	if r.decider.tuning != nil {
		r.decider.tuning.Pushed(rank, w.iteration, r.now)
	}
}

// retune sets the tuner's newest pull condition on all gates.
func (r *run) retune() error {
	for k, g := range r.gates {
		if err := g.setPull(r.decider.tuning.Pull()); err != nil {
			return err
		}
		r.release(k, g.answers...)
	}
	return nil
}

// release sends the answers of gate k.
func (r *run) release(k int, ranks ...int) {
	if k == 0 && r.decider.tuning != nil {
		for _, q := range ranks {
			r.decider.tuning.Freed(q, r.now)
		}
	}
	if r.Barrier == Overlap {
		for _, q := range ranks {
			r.workers[q].decided = r.now
			r.answer(q, k)
		}
		return
	}
	for _, q := range ranks {
		r.workers[q].decided = r.now
	}
	// To the workers, and their pulls to the servers: of one key after the other, as they push.
	for key := range r.size {
		for _, q := range ranks {
			r.queue.add(r.now+2*r.Latency, granted, q, key)
		}
	}
}

// answer sends a key to a worker.
func (r *run) answer(rank, key int) {
	server := &r.servers[r.server(key)]
	out := &server.out
	start := max(server.processor.occupy(r.now, r.cost(r.server(key), r.size[key])), out.free)
	out.occupy(start, r.link(r.server(key)).hold(r.size[key]))
	if e := r.observed(rank, key); e != nil {
		e.Wait += r.now
	}
	r.queue.add(start+r.Latency, answered, rank, key)
}

// receive moves an answer over the worker's link.
func (r *run) receive(rank, key int) {
	w := &r.workers[rank]
	tail := max(r.now+r.link(r.server(key)).hold(r.size[key]), w.in.occupy(r.now, r.Bandwidth.hold(r.size[key])))
	w.ready = max(w.ready, tail)
	if e := r.observed(rank, key); e != nil {
		e.Ended = tail
		r.Observe(rank, key, *e)
	}
	if w.missing--; w.missing == 0 {
		r.queue.add(w.ready, complete, rank, 0)
	}
}

// observed is the exchange of a rank's key so far; nil where nobody observes.
func (r *run) observed(rank, key int) *placement.Exchange {
	if r.timed == nil {
		return nil
	}
	return &r.timed[rank*len(r.size)+key]
}

// complete ends an iteration, and begins the next if there is one.
func (r *run) complete(rank int) {
	w := &r.workers[rank]
	wait := max(0, w.decided-w.arrived)
	if r.Barrier == Global {
		wait = max(0, wait-2*r.Latency) // the report's transfer is not waiting
	}
	w.exchange = r.now - w.pushed - wait
	r.result.wait += wait.Seconds()
	r.result.exchange += w.exchange.Seconds()
	r.result.Done++
	if w.last {
		w.superstep, w.last = w.superstep+1, false
	}
	w.iteration++
	if w.iteration == uint64(r.Iterations) {
		r.finish++
	}
	switch {
	case r.Until == Total:
		r.over = r.result.Done == uint64(r.Iterations)*uint64(r.Workers)
	case r.finish == r.Workers:
		r.over = true
	case w.iteration >= uint64(r.Iterations) && r.Model.Supersteps == nil:
		return
	}
	if !r.over {
		r.begin(rank)
	}
}
