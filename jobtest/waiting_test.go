package jobtest_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// stalls sets the times after which a rank that does not come is reported and the operation ended.
func stalls(warning, shutdown time.Duration) jobOption {
	return with(func(s *settings.Settings) { s.StallWarning, s.StallShutdown = warning, shutdown })
}

// warnings gives each warning that the workers log.
func warnings(into chan<- string) jobOption {
	return func(j *job) {
		j.log = zap.New(zapcore.NewNopCore(), zap.WrapCore(func(zapcore.Core) zapcore.Core {
			return zapcore.RegisterHooks(onlyWarnings{}, func(e zapcore.Entry) error {
				select {
				case into <- e.Message:
				default: // the test has heard enough
				}
				return nil
			})
		}))
	}
}

// onlyWarnings is a core that keeps nothing.
type onlyWarnings struct{}

func (onlyWarnings) Enabled(l zapcore.Level) bool               { return l == zapcore.WarnLevel }
func (c onlyWarnings) With([]zapcore.Field) zapcore.Core        { return c }
func (onlyWarnings) Write(zapcore.Entry, []zapcore.Field) error { return nil }
func (onlyWarnings) Sync() error                                { return nil }
func (c onlyWarnings) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

func TestRanksThatDoNotComeAreNamedInAWarning(t *testing.T) {
	heard := make(chan string, 10)
	j := startJob(t, 4, stalls(50*time.Millisecond, 0), warnings(heard))
	for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Allgather, units.Barrier} {
		var waiting []chan result
		for _, rank := range []int{0, 2} {
			op := float32s(kind, kind.String()+" x", 30000)
			if kind == units.Barrier {
				op.Shape, op.Input = nil, nil
			}
			w, err := j.submit(rank, op)
			if err != nil {
				t.Fatal(err)
			}
			waiting = append(waiting, w...)
		}
		j.hears(heard, fmt.Sprintf("%q has waited", kind.String()+" x"), "for ranks [1 3], which have not submitted it")
		for _, rank := range []int{1, 3} { // it was only slow: all is well
			op := float32s(kind, kind.String()+" x", 30000)
			if kind == units.Barrier {
				op.Shape, op.Input = nil, nil
			}
			w, err := j.submit(rank, op)
			if err != nil {
				t.Fatal(err)
			}
			waiting = append(waiting, w...)
		}
		for i, w := range waiting {
			if _, err := await(w, i, kind.String()); err != nil {
				t.Fatal(err)
			}
		}
		for len(heard) > 0 {
			<-heard
		}
	}
}

// hears waits for a warning that has all of the texts.
func (j *job) hears(heard <-chan string, texts ...string) {
	j.t.Helper()
	timeout := time.After(hang)
	for {
		select {
		case line := <-heard:
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
				return
			}
		case <-timeout:
			j.t.Fatalf("no warning with %q", texts)
		}
	}
}

func TestAfterTheStallTimeEveryRankGetsAnErrorTheLateOneToo(t *testing.T) {
	for _, place := range []jobOption{func(*job) {}, dedicated(2)} {
		j := startJob(t, 3, stalls(20*time.Millisecond, 200*time.Millisecond), smallPartitions, place)
		for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Alltoall, units.Reducescatter} {
			for late := range 3 {
				j.stall(kind, late)
				j.works("x", 200000)
			}
		}
	}
}

// stall has one rank come only when the others have been given an error.
func (j *job) stall(kind units.Kind, late int) {
	j.t.Helper()
	given := make(chan struct{}, len(j.workers))
	errs := j.outcomes(func(rank int) error {
		op := float32s(kind, "x", 30000)
		if kind == units.Reducescatter {
			op.Output = make([]byte, 4*10000)
		}
		if rank == late {
			for range len(j.workers) - 1 {
				<-given
			}
		}
		_, err := j.do(rank, op)
		given <- struct{}{}
		return err
	})
	want := fmt.Sprintf(`"x" stalled: rank %d did not come within 200ms, while ranks`, late)
	for rank, err := range errs {
		if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), want) {
			j.t.Errorf("%v, rank %d: %v, want %q", kind, rank, err, want)
		}
	}
}

// join joins a rank and gives the last one that did.
func (j *job) join(rank int) (int, error) {
	done := make(chan result, 1)
	if err := j.workers[rank].Engine.Join(func(out worker.Output, err error) { done <- result{out, err} }); err != nil {
		return 0, err
	}
	out, err := await(done, rank, "join")
	return out.Value, err
}

// TestJoinWithUnevenData has every rank bring another number of tensors, then join; the sums go on
// with those that are left, and all agree who was last. Several times in one job.
func TestJoinWithUnevenData(t *testing.T) {
	for _, place := range []jobOption{func(*job) {}, dedicated(2)} {
		j := startJob(t, 4, smallPartitions, place)
		for round := range 4 {
			steps := func(rank int) int { return 2 + (rank+round)%4*3 }
			last := make([]int, 4)
			j.each(func(rank int) (err error) {
				for step := range steps(rank) {
					if err := j.sumOfUnjoined(rank, step, steps); err != nil {
						return err
					}
				}
				last[rank], err = j.join(rank)
				return err
			})
			if slices.Max(last) != slices.Min(last) || steps(last[0]) != 11 {
				t.Fatalf("round %d: the ranks say that %v came last, want the one with most data", round, last)
			}
			j.works("x", 100000)
		}
	}
}

// sumOfUnjoined sums ones: the result counts the ranks that still have data in this step.
func (j *job) sumOfUnjoined(rank, step int, steps func(rank int) int) error {
	want := 0
	for r := range j.workers {
		want += b2i(steps(r) > step)
	}
	for _, name := range []string{"x", ""} {
		op := sum(name, 100000)
		if _, err := j.do(rank, op); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		for i, v := range op.Output {
			if int(v) != want {
				return fmt.Errorf("step %d: element %d is %d, want %d", step, i, v, want)
			}
		}
	}
	return nil
}

func TestOperationsThatNeedAJoinedRankAreErrors(t *testing.T) {
	j := startJob(t, 3)
	for _, c := range []struct {
		kind units.Kind
		text string
	}{
		{units.Broadcast, `"x" cannot be done: its root, rank 2, has joined`},
		{units.Alltoall, `"x" cannot be done: alltoall needs every rank, and rank 2 has joined`},
	} {
		errs := j.outcomes(func(rank int) error {
			if rank == 2 {
				_, err := j.join(rank)
				return err
			}
			op := float32s(c.kind, "x", 30000)
			if c.kind == units.Broadcast {
				op.Root = 2
			}
			_, failure := j.do(rank, op)
			if _, err := j.join(rank); err != nil {
				return fmt.Errorf("join: %w", err)
			}
			return failure
		})
		if errs[2] != nil {
			t.Errorf("%v: the joined rank: %v", c.kind, errs[2])
		}
		for rank, err := range errs[:2] {
			if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v: rank %d: %v, want %q", c.kind, rank, err, c.text)
			}
		}
		j.works("x", 1000)
	}
}

func TestAJoinedRankSubmitsNothing(t *testing.T) {
	j := startJob(t, 2)
	done := make(chan result, 1)
	if err := j.workers[0].Engine.Join(func(out worker.Output, err error) { done <- result{out, err} }); err != nil {
		t.Fatal(err)
	}
	if _, err := j.submit(0, sum("x", 1)); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "this rank has joined") {
		t.Errorf("an operation of a joined rank: %v", err)
	}
	if _, err := j.join(0); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "joined already") {
		t.Errorf("a second join: %v", err)
	}
	if _, err := j.join(1); err != nil {
		t.Fatal(err)
	}
	if _, err := await(done, 0, "join"); err != nil {
		t.Fatal(err)
	}
	j.works("x", 1)
}
