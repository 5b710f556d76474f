package jobtest_test

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

// Scenes in which operations fail, on all ranks alike, and endings in which a rank goes.

// disagreement has a rank bring another shape under a name. All get an error, and use the name's next generation at once.
func (a *act) disagreement() error {
	name := []string{"x", ""}[a.shared.IntN(2)]
	for range 1 + a.shared.IntN(3) {
		odd := a.shared.IntN(len(a.Workers))
		op := jobtest.Sum(name, 3*jobtest.Partition)
		if a.rank == odd {
			op = jobtest.Float32s(units.Allreduce, name, 3)
		}
		if _, err := a.Do(a.rank, op); !errors.Is(err, worker.ErrMismatch) {
			return fmt.Errorf("rank %d brings another shape: %w, want a mismatch", odd, err)
		}
		a.pause()
	}
	return a.Sums(a.rank, name, 3*jobtest.Partition)
}

// undeclared has a rank bring what the scheduler refuses. Where what it does afterwards is faster than its word of that, the others hear only that it has an error.
func (a *act) undeclared() error {
	name := []string{"x", ""}[a.shared.IntN(2)]
	odd := a.shared.IntN(len(a.Workers))
	for range 1 + a.shared.IntN(3) {
		op := jobtest.Sum(name, 2*jobtest.Partition+1) // which no other scene declares
		if a.rank == odd {
			op.Set = a.All()
			op.Set.Ranks = append(op.Set.Ranks, len(op.Set.Ranks))
		}
		_, err := a.Do(a.rank, op)
		if err == nil || !says(err.Error(), "could not be declared on rank "+fmt.Sprint(odd), "process set 0 has ranks") &&
			(a.rank == odd || !says(err.Error(), fmt.Sprintf("has failed on rank %d before", odd))) {
			return fmt.Errorf("rank %d brings what is refused: %w, want its error", odd, err)
		}
		a.pause()
	}
	return a.Sums(a.rank, name, 3*jobtest.Partition)
}

// noMemory has a rank give up an operation that the others would do.
func (a *act) noMemory() error {
	short := a.shared.IntN(len(a.Workers))
	want, text := worker.ErrUnsupported, fmt.Sprintf(`"gathered" was given up by rank %d`, short)
	if a.rank == short {
		want, text = worker.ErrMemory, "no memory for"
		a.starve(true)
	}
	_, err := a.Do(a.rank, jobtest.Float32s(units.Allgather, "gathered", 5000))
	if !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("rank %d has no memory: %w, want %q", short, err, text)
	}
	a.starve(false)
	for range 3 { // what it begins before it hears of the failure belongs to the generation that failed, on all ranks
		a.pause()
		if err = a.gather(); !errors.Is(err, worker.ErrUnsupported) {
			break
		}
	}
	return err
}

func (a *act) gather() error {
	op := jobtest.Float32s(units.Allgather, "gathered", 5000)
	out, err := a.Do(a.rank, op)
	if err == nil && !bytes.Equal(out.Data, bytes.Repeat(op.Input, len(a.Workers))) {
		err = fmt.Errorf("%d bytes gathered that are not the inputs", len(out.Data))
	}
	return err
}

// slowRank has others wait so long for a rank that they are told of it.
func (a *act) slowRank() error {
	if a.rank == a.shared.IntN(len(a.Workers)) {
		time.Sleep(2 * warnsAfter)
	}
	return a.sums()
}

// stalledRank has others wait so long for a rank that their operation ends. The late one gets the same error.
func (a *act) stalledRank() error {
	if slow := a.shared.IntN(len(a.Workers)); a.rank == slow {
		time.Sleep(stallsAfter + 3*warnsAfter)
	}
	if _, err := a.Do(a.rank, jobtest.Sum("x", 2*jobtest.Partition)); !errors.Is(err, worker.ErrStall) {
		return fmt.Errorf("a rank is late: %w, want a stall", err)
	}
	return a.Sums(a.rank, "x", 3*jobtest.Partition)
}

// oneLeaves has a rank say goodbye while others wait for it.
func (a *act) oneLeaves() error {
	leaver := a.shared.IntN(len(a.Workers))
	if err := a.Sums(a.rank, "all are here", 3); err != nil || a.rank == leaver {
		return err
	}
	for range 2 { // another of the others may have left before
		if _, err := a.Do(a.rank, jobtest.Sum("x", 3*jobtest.Partition)); !errors.Is(err, worker.ErrUnsupported) || !hasLeft(err) {
			return fmt.Errorf("rank %d has left: %w, want an error that says so", leaver, err)
		}
		a.pause()
	}
	return nil
}

// hasLeft reports whether an error is of a rank that shut down, or of what came before under the same name.
func hasLeft(err error) bool {
	return strings.Contains(err.Error(), "shut down") || strings.Contains(err.Error(), "an operation of that name has failed")
}

// oneIsKilled ends a rank's connections in the midst of what others do with it.
func (a *act) oneIsKilled() error {
	victim := a.shared.IntN(len(a.Workers))
	for again := false; ; again = true {
		if again && a.rank == victim { // all have come to the sums before
			a.watch.Kill(nodeName(victim)) // until its next init
		}
		err := a.sums()
		if err == nil {
			continue
		}
		if !errors.Is(err, worker.ErrPeerLost) {
			return fmt.Errorf("rank %d was killed: %w", victim, err)
		}
		return nil
	}
}

// serverLeaves has a dedicated server leave in the midst of what it does for the ranks.
func (a *act) serverLeaves() error {
	for again := false; ; again = true {
		if again && a.rank == 0 {
			a.StopServer(0)
		}
		err := a.sums()
		if err == nil {
			continue
		}
		if !regexp.MustCompile(`server [0-9]+ .*(was stopped|has shut down)`).MatchString(err.Error()) {
			return fmt.Errorf("a server has left: %w, want an error that says so", err)
		}
		return nil
	}
}
