package worker

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/tuning"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Tuning asks for a search for the fastest partition size, credit, batch and connections while training runs (core/tuning). All
// ranks search, or none.
type Tuning struct {
	Warmup int        // trials that are not measured, at the beginning
	Steps  int        // of a trial
	Log    io.Writer  // gets a line of comma-separated values for each trial; nil for none
	Over   func(bool) // told when the search has ended, and when a join begins another; or nil. Must not call back
}

// tuningName is the name under which ranks add up what they have measured.
const tuningName = "paceline.autotune"

// settling is how many steps at the beginning of a trial are not measured: what was under way before is
// finished, and what is cut anew is declared.
const settling = 2

// tuner runs the trials of a search on this rank. Its steps are the uses of a name: all ranks count these alike, so that they change
// the partition size of a tensor with the same use. The other settings are a rank's own affair, and change with the steps of
// one name, the pacer, which also gives the time.
//
// When the pacer has passed a phase, the rank adds its measurements to those of the others, by an allreduce, and goes on. What is not
// decided two steps later, the next phase, is waited for. That cannot hang: the tensors of a search are named, and a name's use begins
// when the one before has ended, so that all ranks have begun their part of the allreduce by then.
//
// A join of all ranks begins the search anew, since a rank that had joined may have missed a decision. It has no lock: the
// engine keeps it behind its own.
type tuner struct {
	cfg     tuning.Config
	search  *tuning.Search
	now     tuning.Point // of the pacer's step
	pacer   nameID       // the largest tensor that the warm-up has seen
	largest int          // its bytes
	bytes   int64        // that were submitted

	samples []sample // of the running phase's trials
	trial   int      // that is being measured; -1 for none
	since   time.Time
	before  int64 // bytes when it began

	measured bool          // a trial has had a rate
	asked    bool          // the allreduce has been submitted
	decided  chan struct{} // closed when the running phase has been decided
}

// sample is what was measured of one trial.
type sample struct {
	bytes   int64
	seconds float64
}

// newTuner begins the search that an engine is asked for; nil where it is not.
func newTuner(cfg *Config) *tuner {
	if cfg.Tuning == nil {
		return nil
	}
	return searching(tuning.Config{
		Start:   tuning.Point{Partition: int64(cfg.PartitionBytes), Credit: cfg.Credit, Fusion: int64(cfg.Fusion), Connections: int64(cfg.Conns)},
		KeepCut: cfg.Membership.Now().Elastic, Warmup: cfg.Tuning.Warmup, Steps: cfg.Tuning.Steps,
	})
}

func searching(c tuning.Config) *tuner {
	t := &tuner{cfg: c, search: tuning.New(c), now: c.Start}
	t.begin()
	return t
}

// bounds are how many connections a search needs, and with how little credit it has to work.
func (t *tuner) bounds() (conns int, credit int64) {
	credit, most := tuning.Bounds(t.cfg.Start)
	return int(most), credit
}

// begin makes ready for the phase that begins.
func (t *tuner) begin() {
	t.samples, t.trial, t.asked, t.decided = make([]sample, len(t.search.Trials())), -1, false, make(chan struct{})
}

// tuned reports whether the tensor of an operation takes part: named sums of all ranks, which wait for all. None of what is declared to be plain does, as statistics
// of batches are: one name of those has many uses in a step, and the uses of a name count the steps.
func (o *Op) tuned() bool {
	return o.Codec != "none" && o.Kind == units.Allreduce && o.Name != "" && o.Name != tuningName && o.Set.ID == 0 && o.ReduceOp != units.Adasum && o.Sync == (options.Sync{})
}

// cut is the partition size of an operation with its count; 0 is the job's own. What it asks for is known: pace has waited.
func (b *book) cut(o *Op, count uint64) int {
	if b.tuner == nil || !o.tuned() {
		return 0
	}
	p, _ := b.tuner.search.At(count)
	return int(p.Partition)
}

// cutAlike reports whether a declaration is cut as an operation is to be. What has a codec keeps its partitions, because a residual
// belongs to a partition.
func (b *book) cutAlike(d *declaration, op *Op, cut int) bool {
	if cut == 0 || cut == d.cut || d.coding != nil {
		return true
	}
	parts := b.parts(op, cut)
	if !slices.Equal(parts, d.t.Parts) {
		return false
	}
	d.cut = cut
	return true
}

// pace moves the search on by operations that are about to be submitted, and waits where a phase has not been decided that one of them
// is in.
func (e *Engine) pace(ops []Op) error {
	for {
		e.mu.Lock()
		t := e.tuner
		if t == nil || e.broken != nil {
			e.mu.Unlock()
			return nil
		}
		wait := t.waits(e, ops)
		changed := wait == nil && t.pass(e, ops, time.Now())
		var report *Op
		if t.due(e, ops) || wait != nil && !t.asked {
			t.asked = true
			report = e.measured(t)
		}
		now := t.now
		e.mu.Unlock()
		if changed {
			e.tune(now)
		}
		if report != nil {
			if err := e.Submit([]Op{*report}); err != nil {
				e.mu.Lock()
				t.refused()
				e.mu.Unlock()
				return err
			}
		}
		if wait == nil {
			return nil
		}
		select {
		case <-wait:
		case <-e.ended:
		}
	}
}

// count is how often the name of an operation was used before.
func (b *book) count(o *Op) uint64 {
	if n := b.names[nameID{o.Set.ID, o.Name}]; n != nil {
		return n.Next()
	}
	return 0
}

// waits is what operations have to wait for, nil for nothing. An operation whose name is in flight will be refused.
func (t *tuner) waits(e *Engine, ops []Op) <-chan struct{} {
	for i := range ops {
		if n := e.names[nameID{ops[i].Set.ID, ops[i].Name}]; !ops[i].tuned() || n != nil && n.InFlight() > 0 {
			continue
		}
		if _, known := t.search.At(e.count(&ops[i])); !known {
			return t.decided
		}
	}
	return nil
}

// due reports whether this rank has measured the running phase, or what it has measured is wanted: the operations are beyond it.
func (t *tuner) due(e *Engine, ops []Op) bool {
	if t.asked || t.search.Over() {
		return false
	}
	for i := range ops {
		o := &ops[i]
		if !o.tuned() {
			continue
		}
		count, last := e.count(o), t.search.End()
		if count > last || count == last && (nameID{o.Set.ID, o.Name} == t.pacer) {
			return true
		}
	}
	return false
}

// pass notes operations, and reports whether the pacer's step has another point than the one before.
func (t *tuner) pass(e *Engine, ops []Op, now time.Time) (changed bool) {
	for i := range ops {
		o := &ops[i]
		if !o.tuned() {
			continue
		}
		id, count := nameID{o.Set.ID, o.Name}, e.count(o)
		if t.search.Phase() == tuning.WarmUp && len(o.Input) > t.largest {
			t.pacer, t.largest = id, len(o.Input)
		}
		if id == t.pacer {
			t.measure(count, now)
			if p, known := t.search.At(count); known && p != t.now {
				t.now, changed = p, true
			}
		}
		t.bytes += int64(len(o.Input))
	}
	return changed
}

// measure ends the trial that a step of the pacer is not in, and begins the one that it is in.
func (t *tuner) measure(step uint64, now time.Time) {
	trial, within, in := t.search.Trial(step)
	if !in {
		trial = -1
	}
	if t.trial >= 0 && t.trial != trial {
		t.samples[t.trial] = sample{t.bytes - t.before, now.Sub(t.since).Seconds()}
		t.trial = -1
	}
	if in && within == min(settling, t.cfg.Steps-1) {
		t.trial, t.since, t.before = trial, now, t.bytes
	}
}

// measured is the operation that adds the ranks' measurements: of each trial the bytes and the seconds.
func (e *Engine) measured(t *tuner) *Op {
	in := make([]byte, 0, 16*len(t.samples))
	for _, s := range t.samples {
		in = binary.NativeEndian.AppendUint64(in, math.Float64bits(float64(s.bytes)))
		in = binary.NativeEndian.AppendUint64(in, math.Float64bits(s.seconds))
	}
	out := make([]byte, len(in))
	all := wire.ProcessSet{Ranks: make([]int, len(e.epoch().Workers))}
	for i := range all.Ranks {
		all.Ranks[i] = i
	}
	return &Op{
		Kind: units.Allreduce, DType: units.Float64, ReduceOp: units.Sum, Set: all, Shape: []int64{int64(2 * len(t.samples))}, Input: in, Output: out,
		Prescale: 1, Postscale: 1, Name: tuningName, Declared: options.Declared{Codec: "none"}, AtOnce: true,
		Done: func(_ Output, err error) { e.decide(t, out, err) },
	}
}

// decide begins the next phase of a search with what all ranks have measured in the running one. An error, which all ranks have, is no
// measurement.
func (e *Engine) decide(t *tuner, sums []byte, err error) {
	var rates []float64
	for at := 0; at < len(sums) && err == nil; at += 16 {
		bytes, seconds := math.Float64frombits(binary.NativeEndian.Uint64(sums[at:])), math.Float64frombits(binary.NativeEndian.Uint64(sums[at+8:]))
		rate := 0.0
		if bytes > 0 && seconds > 0 {
			rate = bytes / seconds
		}
		rates = append(rates, rate)
	}
	e.mu.Lock()
	t.measured = t.measured || slices.Max(append(rates, 0)) > 0
	phase, trials := t.search.Phase(), t.search.Trials()
	t.search.Decide(rates)
	decided, over, best, speedup := t.decided, t.search.Over(), t.search.Best(), t.search.Speedup()
	t.begin()
	current := e.tuner == t
	if current && over {
		e.searched(true)
	}
	e.mu.Unlock()
	if current {
		e.logTrials(phase, trials, rates, over, best)
	}
	if over && current && err == nil {
		outcome := "nothing was faster than the job's own settings"
		if !t.measured {
			outcome = "nothing was measured: a named sum is used more often than the greatest, by whose uses steps are counted"
		} else if best != t.cfg.Start {
			outcome = fmt.Sprintf("%.2f times as fast as with the job's own settings", speedup)
		}
		e.cfg.Log.Info(fmt.Sprintf("autotuning has ended, %s: %v", outcome, best))
	}
	close(decided)
}

// searched tells the user that the search is over, or not any more. The caller holds the engine's lock.
func (e *Engine) searched(over bool) {
	if told := e.cfg.Tuning.Over; told != nil {
		told(over)
	}
}

// logTrials writes the trials of a phase to the log, and the choice at the end.
func (e *Engine) logTrials(phase string, trials []tuning.Point, rates []float64, over bool, best tuning.Point) {
	if e.cfg.Tuning.Log == nil {
		return
	}
	write := func(phase, trial string, p tuning.Point, rate string) error {
		_, err := fmt.Fprintf(e.cfg.Tuning.Log, "%s,%s,%d,%d,%d,%d,%s\n", phase, trial, p.Partition, p.Credit, p.Fusion, p.Connections, rate)
		return err
	}
	var err error
	for i := range min(len(trials), len(rates)) {
		if err == nil {
			err = write(phase, fmt.Sprint(i+1), trials[i], fmt.Sprintf("%.0f", rates[i]))
		}
	}
	if over && err == nil {
		err = write(tuning.Ended, "", best, "")
	}
	if err != nil {
		e.cfg.Log.Warn("the log of autotuning cannot be written", zap.Error(err))
	}
}

// TuningHeader is the first line of a log of trials.
const TuningHeader = "phase,trial,partition_bytes,credit_bytes,fusion_bytes,connections,bytes_per_second\n"

// tune has this rank's connections use other settings.
func (e *Engine) tune(now tuning.Point) {
	e.each(func(w way) {
		if p, ok := w.(*peer); ok {
			p.tune(now)
		}
	})
}

// tune changes what the connections to a server may do.
func (p *peer) tune(now tuning.Point) {
	p.mu.Lock()
	p.traffic.credit, p.traffic.active = now.Credit, int(now.Connections)
	links := p.links
	p.mu.Unlock()
	for _, l := range links {
		l.out.Fuse(int(now.Fusion))
	}
	p.kick(false)
}

// point is what the running trial has, or what the search has chosen; ok is false where there is no search.
func (e *Engine) point() (now tuning.Point, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.tuner == nil {
		return now, false
	}
	return e.tuner.now, true
}

// catchUp has the connections to a server that has joined use what those to the others do.
func (p *peer) catchUp() {
	for now, ok := p.e.point(); ok; {
		p.tune(now)
		next, _ := p.e.point()
		ok, now = next != now, next
	}
}

// refused notes that the engine has not taken the rank's report. Who waits for it is to make one.
func (t *tuner) refused() {
	t.asked = false
	close(t.decided)
	t.decided = make(chan struct{})
}

// progress is how far the search is, for people; nil for none.
func (t *tuner) progress() *wire.Tuning {
	if t == nil {
		return nil
	}
	return &wire.Tuning{Phase: t.search.Phase(), Settings: t.search.Best().String(), Speedup: t.search.Speedup()}
}
