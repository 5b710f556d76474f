package superstep

import (
	"time"

	"github.com/paceline/paceline/core/condition"
)

// Worker is where one rank is in the supersteps of one group of values. It is not safe for concurrent use.
//
// A rank begins and ends iterations. At the end of one the verdict says whether the superstep goes on; where it is
// Asked, the verdict comes with a Stop, and the rank begins no iteration before. Where the end of the superstep is
// decided and the rank does not come to it, it is excused: others do not wait for it at the barrier, and it is in
// the next superstep, whatever it does.
type Worker struct {
	rank   int
	model  condition.Supersteps
	number uint64
	done   uint64 // iterations of the superstep
	stop   uint64 // the last of them; 0: not known yet
	asking bool
	early  Stop // of a later superstep than that which the rank is in

	began  time.Duration // the iteration that runs
	runs   bool          // an iteration has begun
	took   time.Duration // the one before
	absent bool          // the rank has not come for longer than others are to wait for it
	by     condition.Thresholds
}

// Verdict is what follows from the end of an iteration, or from the Stop that the rank asked for.
type Verdict uint8

// Verdicts.
const (
	None    Verdict = iota // nothing that the rank waits for
	GoesOn                 // the superstep goes on
	WasLast                // it has ended with that iteration: the rank goes to the barrier
	Asked                  // the rank waits for the decider's Stop
)

var verdictNames = [...]string{"nothing", "goes on", "was last", "asks"}

func (v Verdict) String() string { return verdictNames[v] }

// NewWorker makes a rank's half.
func NewWorker(model condition.Supersteps, rank int) *Worker {
	return &Worker{model: model, rank: rank}
}

// Superstep is the number of supersteps that the rank has ended.
func (w *Worker) Superstep() uint64 { return w.number }

// Iterations are those of the superstep that the rank has ended.
func (w *Worker) Iterations() uint64 { return w.done }

// Thresholds are those by which the end of a superstep was decided last; zeros where there are none.
func (w *Worker) Thresholds() condition.Thresholds { return w.by }

// Stopping reports whether the rank knows where its superstep ends, and is not there yet.
func (w *Worker) Stopping() bool { return w.stop > 0 }

// Asking reports whether the rank waits for an answer.
func (w *Worker) Asking() bool { return w.asking }

// Absent reports whether the rank has been late for the end of its superstep.
func (w *Worker) Absent() bool { return w.absent }

// Begin says that the rank begins to compute: what went before was waiting.
func (w *Worker) Begin(at time.Duration) { w.began, w.runs = at, true }

// End ends an iteration. The report is for the decider.
func (w *Worker) End(at time.Duration) (Report, Verdict) {
	w.done++
	r := w.report()
	if w.runs {
		w.took = at - w.began
		r.Interval = w.took
	}
	switch {
	case w.stop > 0 && w.done >= w.stop:
		r.Last = true
		w.next()
		return r, WasLast
	case w.stop == 0 && w.model.Asks(w.done):
		r.Asks, w.asking = true, true
		return r, Asked
	}
	return r, GoesOn
}

// Stop notes the decider's message. The verdict is that of the iteration which asked for one.
func (w *Worker) Stop(s Stop, at time.Duration) Verdict {
	switch {
	case s.Superstep > w.number:
		if s.Iteration > 0 { // it has overtaken the Stop of this one
			w.early = s
		}
		return None
	case s.Superstep < w.number || s.Iteration == 0 && s.Asked != w.done: // or the answer to an earlier question, which another decider has answered too
		return None
	case s.Iteration > 0 && w.stop == 0:
		w.stop, w.by = s.Iteration, s.Thresholds
		if !w.runs { // it has patience from now on, and has measured nothing
			w.began = at
		}
	}
	if !w.asking {
		return None
	}
	w.asking = false
	if w.stop > 0 && w.done >= w.stop {
		w.next()
		return WasLast
	}
	return GoesOn
}

// Excuse ends the superstep without the rank, which must know its end and does not come to it. The report is for
// the decider, and counts as a push of every value of the group.
func (w *Worker) Excuse() Report {
	r := w.report()
	r.Last, r.Empty = true, true
	w.next()
	return r
}

// Again says where the rank is to a decider that takes the place of another, which is lost. It stands for all that the rank has reported, and repeats its
// question.
func (w *Worker) Again() Report {
	r := w.report()
	r.Interval, r.Asks = w.took, w.asking
	return r
}

// Late reports whether the rank takes longer for an iteration than others at the barrier are to wait, while its
// superstep's end is known: it may have done all that it was to do, or write a checkpoint. If not, again is after
// how long to ask once more.
func (w *Worker) Late(at time.Duration) (again time.Duration, late bool) {
	patience := time.Second + 10*w.took
	w.absent = at-w.began >= patience
	return patience - (at - w.began), w.absent
}

func (w *Worker) report() Report {
	return Report{Rank: w.rank, Superstep: w.number, Iteration: w.done}
}

// next begins the next superstep.
func (w *Worker) next() {
	w.number++
	w.done, w.stop, w.absent, w.asking = 0, 0, false, false
	if w.early.Superstep == w.number {
		w.stop, w.by = w.early.Iteration, w.early.Thresholds
	}
}
