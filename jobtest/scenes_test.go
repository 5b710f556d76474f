package jobtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// scene is what all ranks do for a while in a job whose frames come late. An ending is the last one of a round.
type scene struct {
	name string
	play func(*act) error
}

var scenes = []scene{
	{"sums", (*act).sums}, {"collectives", (*act).collectives}, {"values", (*act).values}, {"supersteps", (*act).supersteps},
	{"disagreement", (*act).disagreement}, {"undeclared", (*act).undeclared}, {"no memory", (*act).noMemory}, {"state", (*act).state}, {"join", (*act).join},
	{"join in a superstep", (*act).joinInASuperstep}, {"absent rank", (*act).absentRank},
	{"process set", (*act).processSet}, {"condition", (*act).condition}, {"scheduler restarts", (*act).schedulerRestarts},
	{"slow rank", (*act).slowRank}, {"stalled rank", (*act).stalledRank}, {"messages", (*act).messages},
}

const killing = "one is killed"

var endings = []scene{
	{"all leave", func(*act) error { return nil }}, {"one leaves", (*act).oneLeaves}, {killing, (*act).oneIsKilled},
}

// serverLeaves is the end of a story, as no server comes in its place.
var serverLeaves = scene{"a server leaves", (*act).serverLeaves}

// act is one rank's part in a scene.
type act struct {
	*disorder
	rank   int
	id     string     // of the scene in the story
	shared *rand.Rand // draws alike on all ranks
	own    *rand.Rand
}

// pause lets the others get ahead, or not.
func (a *act) pause() {
	if a.own.IntN(3) == 0 {
		time.Sleep(time.Duration(a.own.Int64N(int64([]time.Duration{10 * time.Microsecond, time.Millisecond, 2 * latest}[a.own.IntN(3)]))))
	}
}

// sums has several sums in flight, with and without names, that all scenes of the round share.
func (a *act) sums() error {
	type sum struct {
		op   worker.Op
		done chan jobtest.Result
	}
	var all []sum
	for i := range 2 + a.shared.IntN(5) {
		name := fmt.Sprint("sum ", i)
		if a.shared.IntN(3) == 0 {
			name = ""
		}
		op := jobtest.Sum(name, []int{1, 3000, 5*jobtest.Partition + 7}[i%3])
		op.Priority = a.own.IntN(3)
		done, err := a.Submit(a.rank, op)
		if err != nil {
			return err
		}
		all = append(all, sum{op, done[0]})
		a.pause()
	}
	for _, s := range all {
		if _, err := jobtest.Await(s.done, a.rank, s.op.Name); err != nil {
			return err
		}
		if err := counts(s.op, len(a.Workers)); err != nil {
			return err
		}
	}
	return nil
}

// counts checks a sum of ones.
func counts(op worker.Op, want int) error {
	for i, v := range op.Output {
		if int(v) != want {
			return fmt.Errorf("element %d of %q is %d, want %d", i, op.Name, v, want)
		}
	}
	return nil
}

func (a *act) collectives() error {
	all := grid(a.All(), []int64{1, 37, 20000}[a.shared.IntN(3)])
	a.shared.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	return playOn(a.Job, a.rank, a.own.Uint64(), singles(all[:8], a.shared))
}

// messages has each rank send to the others, short and long ones, some of another length than is received, and some that it gives
// up before anybody receives them.
func (a *act) messages() error {
	type end struct {
		op   worker.Op
		want []byte // of a receive
		err  error
		done chan jobtest.Result
	}
	var ends []*end
	count := 1 + a.shared.IntN(6)
	for from := range a.Workers {
		for to := range a.Workers {
			for range count {
				n := []int{0, 7, limits.MaxEager, limits.MaxEager + 1, 5*jobtest.Partition + 3}[a.shared.IntN(5)]
				seed, odd, tag := a.shared.Uint64(), a.shared.IntN(8) == 0, a.shared.Uint64N(2)
				var err error
				room := n
				if odd {
					room, err = n+1, worker.ErrMismatch
				}
				if from == a.rank {
					ends = append(ends, &end{op: send(to, tag, pattern(n, seed)), err: err})
				}
				if to == a.rank {
					ends = append(ends, &end{op: receive(from, tag, make([]byte, room)), want: pattern(n, seed), err: err})
				}
			}
		}
	}
	lost := send(a.own.IntN(len(a.Workers)), 99, pattern([]int{9, 3 * jobtest.Partition}[a.own.IntN(2)], 1))
	lost.Timeout = time.Duration(1 + a.own.Int64N(int64(latest)))
	if _, err := a.Do(a.rank, lost); !errors.Is(err, worker.ErrStall) {
		return fmt.Errorf("a message that nobody receives: %w, want a stall", err)
	}
	for _, e := range ends {
		done, err := a.Submit(a.rank, e.op)
		if err != nil {
			return err
		}
		e.done = done[0]
		a.pause()
	}
	for _, e := range ends {
		_, err := jobtest.Await(e.done, a.rank, fmt.Sprint(e.op.Kind, " ", e.op.Root))
		if !errors.Is(err, e.err) {
			return fmt.Errorf("%v with rank %d of %d bytes, tag %d: %w, want %s", e.op.Kind, e.op.Root, len(e.op.Input)+len(e.op.Output), e.op.Tag, err, fmt.Sprint(e.err))
		}
		if err == nil && e.op.Kind == units.Receive && !bytes.Equal(e.op.Output, e.want) {
			return fmt.Errorf("other bytes than rank %d sent", e.op.Root)
		}
	}
	return nil
}

// values has the servers hold one under a model that lets ranks run ahead.
func (a *act) values() error {
	model := []string{"", "asp", "ssp:1", "ssp:3", "dsps:1,3"}[a.shared.IntN(5)]
	steps := 1 + a.shared.IntN(6)
	v, err := a.Declare(a.rank, "value "+a.id, model, 3+a.shared.IntN(2)*2*jobtest.Partition/4)
	if err != nil {
		return err
	}
	for k := range steps {
		a.pause()
		if a.own.IntN(3) == 0 {
			if err := v.Use(units.ReadNow, 0); err != nil {
				return err
			}
		}
		use := units.Add | units.Read
		if k < steps-1 && a.own.IntN(2) == 0 { // after the last one, which is answered, all are in the value
			use = units.Add
		}
		if err := v.Use(use, 1); err != nil {
			return err
		}
	}
	return a.holds(v, steps)
}

// holds checks what a value is when every rank has added so many ones.
func (a *act) holds(v *jobtest.Held, steps int) error {
	if err := a.Sums(a.rank, "all have added to "+v.Name, 1); err != nil {
		return err
	}
	if err := v.Use(units.ReadNow, 0); err != nil {
		return err
	}
	return v.Is(10 + float32(steps*len(a.Workers)))
}

// group begins supersteps with two values.
func (a *act) group() (*jobtest.Group, error) {
	models := []string{"adaptive:1,1", "adaptive:3,2", "elastic:1", "elastic:5"}
	return a.Group(a.rank, "group "+a.id+" ", models[a.shared.IntN(len(models))], 2, []int{5, jobtest.Partition/2 + 3}[a.shared.IntN(2)])
}

// supersteps has ranks that come unequally often meet at a sum in between, where their supersteps end without them.
func (a *act) supersteps() error {
	beside, err := a.Submit(a.rank, jobtest.Sum("beside", a.shared.IntN(2)*20*jobtest.Partition+1)) // it may use up the credit
	if err != nil {
		return err
	}
	g, err := a.group()
	if err != nil {
		return err
	}
	for k := range 2 {
		for range 1 + a.own.IntN(6) {
			a.pause()
			if err := g.Step(1); err != nil {
				return err
			}
		}
		if err := a.Sums(a.rank, fmt.Sprint("epoch ", k, " of ", a.id), 5); err != nil {
			return err
		}
	}
	_, err = jobtest.Await(beside[0], a.rank, "beside")
	return err
}

// state sets a state of coded sums back, from which they repeat themselves.
func (a *act) state() error {
	const n, name, setting = 2*jobtest.Partition/4 + 9, "coded", "topk:0.1"
	average := func(k int) ([]byte, error) {
		op := gradient(name, setting, units.Float32, jobtest.Normal(n, uint64(k), uint64(a.rank)))
		_, err := a.Do(a.rank, op)
		return op.Output, err
	}
	if _, err := average(0); err != nil {
		return err
	}
	engine := a.Workers[a.rank].Engine
	size, err := engine.State(nil)
	if err != nil {
		return err
	}
	state := make([]byte, size)
	if _, err := engine.State(state); err != nil {
		return err
	}
	want, err := average(1)
	if err != nil {
		return err
	}
	if err := engine.SetState(state); err != nil {
		return err
	}
	a.pause()
	got, err := average(1)
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("after its state was set back, %q gives something else", name)
	}
	return err
}

// join has every rank bring another number of sums, then join. All names begin anew.
func (a *act) join() error {
	extra := a.shared.Perm(len(a.Workers))
	steps := func(rank int) int { return 1 + 2*extra[rank] }
	for step := range steps(a.rank) {
		a.pause()
		if err := sumOfUnjoined(a.Job, a.rank, step, steps); err != nil {
			return err
		}
	}
	a.pause()
	return a.joins()
}

// joins joins this rank. Who is the last depends on whose frame comes last, which need not be the last that left.
func (a *act) joins() error {
	last, err := a.Join(a.rank)
	if err == nil && (last < 0 || last >= len(a.Workers)) {
		err = fmt.Errorf("rank %d joined last, of %d", last, len(a.Workers))
	}
	return err
}

// joinInASuperstep has ranks join when others wait at a barrier for them, or have just heard of one.
func (a *act) joinInASuperstep() error {
	g, err := a.group()
	if err != nil {
		return err
	}
	for range 1 + a.own.IntN(8) {
		if err := g.Step(1); err != nil {
			return err
		}
		a.pause()
	}
	return a.joins()
}

// absentRank has a rank join that knows the end of its superstep, and the others join when its patience with itself ends:
// what it reports then comes behind the join of all, of which it has not heard.
func (a *act) absentRank() error {
	g, err := a.group()
	if err != nil {
		return err
	}
	absent := a.shared.IntN(len(a.Workers))
	a.holdAll(wire.TypeJoined, latest)
	defer a.holdAll(wire.TypeJoined, 0)
	steps := 1 + a.shared.IntN(3)
	for range steps {
		if err := g.Step(1); err != nil {
			return err
		}
	}
	if a.rank == absent {
		time.Sleep(3 * latest)
		return a.joins()
	}
	begin := time.Now()
	for range 3 {
		if err := g.Step(1); err != nil {
			return err
		}
	}
	time.Sleep(time.Until(begin.Add(time.Second + time.Duration(a.own.Int64N(int64(latest))) - latest/2)))
	return a.joins()
}

// processSet has some ranks sum among themselves. The set is removed as soon as the first of them has its sum.
func (a *act) processSet() error {
	ranks := a.shared.Perm(len(a.Workers))[:1+a.shared.IntN(len(a.Workers))]
	slices.Sort(ranks)
	ctx, cancel := context.WithTimeout(a.T.Context(), jobtest.Hang)
	defer cancel()
	control := a.Workers[a.rank].Control
	set, err := control.AddSet(ctx, ranks)
	if err != nil {
		return err
	}
	a.pause()
	if slices.Contains(ranks, a.rank) {
		op := jobtest.Sum("of a set", 3*jobtest.Partition)
		op.Set = set
		if _, err := a.Do(a.rank, op); err != nil {
			return err
		}
		if err := counts(op, len(ranks)); err != nil {
			return err
		}
	}
	if len(ranks) == len(a.Workers) {
		return nil // it may be the set of all
	}
	return control.RemoveSet(ctx, set.ID)
}

// condition changes a model while ranks use its value.
func (a *act) condition() error {
	v, err := a.Declare(a.rank, "changing "+a.id, "ssp:1", 3*jobtest.Partition/4)
	if err != nil {
		return err
	}
	steps := 2 + a.shared.IntN(6)
	for k := range steps {
		if a.rank == 0 && k == 1 {
			w := wire.Condition{Names: []string{v.Name}, Pull: []string{"asp", "ssp:3", "dsps:1,3"}[a.shared.IntN(3)]}
			if _, err := a.Workers[0].Engine.SetCondition(a.T.Context(), nil, w); err != nil {
				return err
			}
		}
		a.pause()
		if err := v.Use(units.Add|units.Read, 1); err != nil {
			return err
		}
	}
	return a.holds(v, steps)
}

// schedulerRestarts has another scheduler take the place of the one that all know, while names are declared.
func (a *act) schedulerRestarts() error {
	if err := a.Sums(a.rank, "before "+a.id, 3); err != nil {
		return err
	}
	if a.rank == a.shared.IntN(len(a.Workers)) {
		a.Scheduler.Close()
		a.pause()
		a.StartScheduler(a.Settings.Scheduler)
	}
	return a.Sums(a.rank, "after "+a.id, 3)
}
