package jobtest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// held is a float32 value that the servers hold, as one rank sees it.
type held struct {
	j    *job
	rank int
	name string
	sync string
	soft bool
	now  []float32 // what was read last
}

// use does something with the value; every element of the input is x.
func (v *held) use(use units.Use, x float32) error {
	op := v.op(use, x)
	if _, err := v.j.do(v.rank, op); err != nil {
		return err
	}
	v.take(op)
	return nil
}

// take notes what an operation has read.
func (v *held) take(op worker.Op) {
	for i := range len(op.Output) / 4 {
		v.now[i] = math.Float32frombits(binary.NativeEndian.Uint32(op.Output[4*i:]))
	}
}

func (v *held) op(use units.Use, x float32) worker.Op {
	op := worker.Op{
		Kind: units.Accumulate, DType: units.Float32, ReduceOp: units.Sum, Shape: []int64{int64(len(v.now))}, Name: v.name,
		Declared: options.Declared{Sync: options.Sync{Model: v.sync, SoftPark: v.soft}}, Held: worker.Held{Use: use},
	}
	if use&units.Add != 0 || use == units.Declare && v.rank == op.Root {
		for range v.now {
			op.Input = binary.NativeEndian.AppendUint32(op.Input, math.Float32bits(x))
		}
	}
	if use != units.Add {
		op.Output = make([]byte, 4*len(v.now))
	}
	return op
}

// is reports whether all elements of what was read last are x.
func (v *held) is(x float32) error {
	for i, y := range v.now {
		if x != y {
			return fmt.Errorf("element %d of %q under %q on rank %d is %g, want %g", i, v.name, v.sync, v.rank, y, x)
		}
	}
	return nil
}

// value declares a value of n elements on a rank: all tens.
func (j *job) value(rank int, name, sync string, n int) (*held, error) {
	v := &held{j: j, rank: rank, name: name, sync: sync, now: make([]float32, n)}
	err := v.use(units.Declare, 10)
	if err == nil {
		err = v.is(10)
	}
	return v, err
}

var valueSizes = []int{0, 1, 7, partition / 4, partition/4 + 1, 3*partition/4 - 1}

func TestAHeldValueIsTheRootsAndAllThatRanksHaveAdded(t *testing.T) {
	const ranks, iterations = 3, 6
	models := []string{"", "asp", "ssp:2", "dsps:1,5", "pssp:1,0.5", "dynamic-pssp:1,0.9", "drop-stragglers:3", "expression:lead < 4"}
	for place, option := range map[string]jobOption{"embedded": func(*job) {}, "dedicated": dedicated(2), "both": both(1)} {
		t.Run(place, func(t *testing.T) {
			j := startJob(t, ranks, smallPartitions, option)
			for _, model := range models {
				for _, n := range valueSizes {
					name := fmt.Sprintf("%s of %d", model, n)
					j.each(func(rank int) error { return j.addUp(rank, name, model, n, iterations) })
				}
			}
		})
	}
}

// addUp has a rank add its number plus one to a value time and again; in the end it must hold all of that.
func (j *job) addUp(rank int, name, model string, n, iterations int) error {
	v, err := j.value(rank, name, model, n)
	if err != nil {
		return err
	}
	ranks := float32(len(j.workers))
	each := ranks * (ranks + 1) / 2
	for i := range iterations {
		if err := v.use(units.Add|units.Read, float32(rank+1)); err != nil {
			return err
		}
		if model == "" { // BSP: everybody's difference of this iteration, and of no later one
			if err := v.is(10 + float32(i+1)*each); err != nil {
				return err
			}
		}
	}
	if err := j.sums(rank, name+" end", 1); err != nil { // everybody has added all
		return err
	}
	if err := v.use(units.ReadNow, 0); err != nil {
		return err
	}
	return v.is(10 + float32(iterations)*each)
}

// A delayed pull waits until its own iteration is closed under lazy parking, and for the next advance in the
// soft-barrier order (FluentPS section III-C).
func TestARankLeadsByNoMoreThanTheThreshold(t *testing.T) {
	t.Run("lazy", func(t *testing.T) { leads(t, false, 4) })
	t.Run("soft barrier", func(t *testing.T) { leads(t, true, 1) })
}

// leads has one rank run ahead until it must wait, and the other push as often as that takes.
func leads(t *testing.T, soft bool, pushes int) {
	const s = 3
	j := startJob(t, 2, smallPartitions)
	values := make([]*held, 2)
	j.each(func(rank int) (err error) {
		values[rank] = &held{j: j, rank: rank, name: "w", sync: fmt.Sprintf("ssp:%d", s), soft: soft, now: make([]float32, 2*partition/4)}
		return values[rank].use(units.Declare, 0)
	})
	for range s {
		if err := values[0].use(units.Add|units.Read, 1); err != nil { // FluentPS section III-B: i < V + s
			t.Fatal(err)
		}
	}
	waits, err := j.submit(0, values[0].op(units.Add|units.Read, 1))
	if err != nil {
		t.Fatal(err)
	}
	if err := values[1].use(units.ReadNow, 0); err != nil {
		t.Fatal(err)
	}
	for range pushes {
		select {
		case r := <-waits[0]:
			t.Fatalf("rank 0 leads by %d: %v", s+1, r.err)
		default:
		}
		if err := values[1].use(units.Add, 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := await(waits[0], 0, "w"); err != nil {
		t.Fatal(err)
	}
}

func TestWhoLeavesHoldsNobodyUpAndItsServerStays(t *testing.T) {
	j := startJob(t, 3, smallPartitions)
	values := make([]*held, 3)
	j.each(func(rank int) (err error) {
		values[rank], err = j.value(rank, "w", "ssp:1", 3*partition/4)
		return err
	})
	j.each(func(rank int) error { return values[rank].use(units.Add|units.Read, 1) })
	j.leave(2)
	for range 5 {
		j.each(func(rank int) error { return values[rank].use(units.Add|units.Read, 1) })
	}
}

func TestUsesOfAHeldValueThatAreRefused(t *testing.T) {
	j := startJob(t, 2, with(func(s *settings.Settings) { s.StallShutdown = time.Second; s.StallWarning = 300 * time.Millisecond }))
	expect := func(errs []error, text string) {
		t.Helper()
		for rank, err := range errs {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("rank %d: %v, want an error with %q", rank, err, text)
			}
		}
	}
	expect(j.outcomes(func(rank int) error {
		return (&held{j: j, rank: rank, name: "early", now: make([]float32, 1)}).use(units.Add, 1)
	}), "declare it first")
	expect(j.outcomes(func(rank int) error {
		_, err := j.value(rank, "w", "", 1)
		if err == nil {
			_, err = j.value(rank, "w", "", 1)
		}
		return err
	}), "has a value already")
	expect(j.outcomes(func(rank int) error {
		_, err := j.value(rank, "two shapes", "", 1+rank)
		return err
	}), "ranks disagree")
	expect(j.outcomes(func(rank int) error {
		_, err := j.value(rank, "two models", []string{"asp", "ssp:1"}[rank], 1)
		return err
	}), "under ssp:1")
	expect(j.outcomes(func(rank int) error {
		v := &held{j: j, rank: rank, name: "x", now: make([]float32, 1)}
		return v.use(units.Declare|units.Read, 1)
	}), "unknown use")
	alone := func(rank int) error {
		v, err := j.value(rank, "alone", "", 1)
		if err == nil && rank == 0 {
			err = v.use(units.Add|units.Read, 1)
		}
		return err
	}
	expect(j.outcomes(alone)[:1], "rank 1 did not come within 1s")
	j.works("after all", 10)
}

func TestCheckSyncNamesWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		sync             string
		soft, accumulate bool
		text             string
	}{
		{"ssp:-1", false, true, "ssp:-1"},
		{"pssp:1,1.5", false, true, "1.5"},
		{"ssp:2", false, false, "accumulate"},
		{"drop-stragglers:5", false, true, "5"},
		{"nonsense", false, true, "nonsense"},
		{"expression:1/0 > lead", false, true, "divi"},
		{"", true, false, "lazy"},
	} {
		if err := checkSync(c.sync, c.soft, c.accumulate); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := checkSync("ssp:2", true, true); err != nil {
		t.Error(err)
	}
}

func TestAWrongSettingIsFoundBeforeTheJobStarts(t *testing.T) {
	for sync, text := range map[string]string{"ssp:-1": "ssp:S", "drop-stragglers:3": "allowed is from 1 to 2", "nonsense": "known are"} {
		j := newJob(t, 2, with(func(s *settings.Settings) { s.Sync = sync }))
		_, err := node.StartWorker(t.Context(), j.settings, node.Options{Log: j.log})
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "PACELINE_SYNC: ") || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want it to say %q", err, text)
		}
	}
}

func checkSync(sync string, soft, accumulate bool) error {
	return node.CheckSync(sync, soft, accumulate, 4)
}
