package jobtest_test

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

var (
	elasticValues    = flag.Int("elasticvalues", seeds(12), "how many seeds the tests of held values under random losses run")
	elasticValueSeed = flag.Uint64("elasticvalue", 0, "the first of them: a seed that failed")
)

// TestHeldValuesGoOnUnderRandomLosses plays jobs whose ranks add to held values and read them, while ranks and servers die, break off, fall silent and
// leave at any time, and servers join, to which values move. Every survivor finds all that it has added itself, once, in whatever it reads, and in the end what all have added.
func TestHeldValuesGoOnUnderRandomLosses(t *testing.T) {
	playManyValues(t, []string{"bsp", "asp", "ssp:2", "dsps:1,5", "pssp:1,0.5", "dynamic-pssp:1,0.9", "expression:lead < 4"})
}

// TestSuperstepsGoOnUnderRandomLosses: likewise where a server decides when ranks meet.
func TestSuperstepsGoOnUnderRandomLosses(t *testing.T) {
	playManyValues(t, []string{"adaptive:1,1", "adaptive:3,2", "elastic:1", "elastic:5"})
}

func playManyValues(t *testing.T, models []string) {
	for seed := *elasticValueSeed; seed < *elasticValueSeed+uint64(*elasticValues); seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { playValues(t, seed, models) })
			if t.Failed() {
				test, _, _ := strings.Cut(t.Name(), "/")
				t.Logf("again: go test -tags invariants ./jobtest -run %s -elasticvalue %d -elasticvalues 1", test, seed)
			}
		})
	}
}

// stepped reports whether a model has supersteps.
func stepped(model string) bool {
	m, err := condition.Parse(model)
	return err == nil && m.Supersteps != nil
}

func playValues(t *testing.T, seed uint64, models []string) {
	random := rand.New(rand.NewPCG(seed, 16))
	ranks, dedicated, servers, where, embedded := places(random)
	m := jobtest.NewMeans(random, ranks, 1+random.IntN(50000), 60, servers)
	m.Lost = m.Lost[:random.IntN(len(m.Lost)+1)]
	order := random.Perm(dedicated)
	gone := order[:random.IntN(max(dedicated, 1))]
	var drained []int
	if stay := dedicated - len(gone); stay > 1 {
		drained = order[len(gone) : len(gone)+random.IntN(stay)]
	}
	model := models[random.IntN(len(models))]
	j, network := apartOn(t, ranks, where)
	j.Settings.Connections = 1 + random.IntN(2)
	revived(t, network, dedicated)
	j.Start()
	script := losses(random, m, dedicated, embedded)
	for _, i := range gone {
		at := time.Duration(random.IntN(1000)) * time.Millisecond
		switch random.IntN(3) {
		case 0, 1:
			script += cutOff(ranks, i, at, []string{"cut", "reset"}[random.IntN(2)])
		case 2: // in the middle of a frame
			script += fmt.Sprintf("after %d server%d->worker%d stop\n", random.IntN(10*4*m.Elements), i, random.IntN(ranks))
		}
	}
	if err := network.Script(script); err != nil {
		t.Fatal(err)
	}
	var leaving sync.WaitGroup
	for _, i := range drained {
		at := time.Duration(random.IntN(800)) * time.Millisecond
		leaving.Go(func() {
			time.Sleep(at) // virtual
			j.StopServer(i)
		})
	}
	more := random.IntN(3)
	for range more {
		at := time.Duration(random.IntN(800)) * time.Millisecond
		leaving.Go(func() {
			time.Sleep(at) // virtual
			j.StartServer()
		})
	}
	what := fmt.Sprintf("%s, %d ranks without %v, %d servers without %v and, drained, %v, embedded ones: %v; %d servers join", model, ranks, m.Lost, dedicated, gone, drained, embedded, more)
	ended := make([]*jobtest.Shares, ranks)
	for rank, err := range j.Outcomes(func(rank int) (err error) {
		ended[rank], err = addShares(j, rank, model, m.Elements, rand.New(rand.NewPCG(seed, uint64(rank))))
		return err
	}) {
		switch lost := slices.Contains(m.Lost, rank); {
		case lost:
			ended[rank] = nil
			if err != nil && !errors.Is(err, worker.ErrPeerLost) && !errors.Is(err, worker.ErrStall) && !errors.Is(err, worker.ErrUnsupported) && !rootLost(m, err) {
				t.Errorf("%s: rank %d, which is lost, ends with %v", what, rank, err)
			}
		case rootLost(m, err):
			ended[rank] = nil
		case err != nil:
			t.Errorf("%s: rank %d: %v", what, rank, err)
		}
	}
	leaving.Wait()
	for rank, s := range ended {
		for other := range ended {
			if s != nil && ended[other] != nil && !t.Failed() {
				if err := s.Has(other, sharesAdded); err != nil {
					t.Errorf("%s: in the end of rank %d: %v", what, rank, err)
				}
			}
		}
	}
}

// rootLost reports whether an error is that the root was lost before it gave the value.
func rootLost(m *jobtest.Means, err error) bool {
	return err != nil && slices.Contains(m.Lost, 0) && strings.Contains(err.Error(), "its root, rank 0, has gone")
}

// sharesAdded is how often each rank adds.
const sharesAdded = 40

// addShares has a rank add its part to a value, and read it now and then.
func addShares(j *jobtest.Job, rank int, model string, n int, random *rand.Rand) (*jobtest.Shares, error) {
	s := j.Shares(rank, "v", model, n)
	if stepped(model) {
		s.Group = s.Name
	}
	if err := s.Use(units.Declare, 10); err != nil {
		return nil, err
	}
	for another := false; s.Added < sharesAdded; {
		if s.Added == sharesAdded/2 && !another {
			another = true
			if err := addToAnother(j, rank, model, n); err != nil {
				return nil, err
			}
		}
		use := units.Use(units.Add | units.Read)
		switch random.IntN(6) {
		case 0:
			use = units.Add
		case 1:
			use = units.Read
		case 2:
			use = units.ReadNow
		}
		time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond) // virtual: a step
		var err error
		if s.Group != "" {
			err = s.Step()
		} else {
			err = s.Play(use)
		}
		if err != nil {
			return nil, err
		}
	}
	barrier := jobtest.Float32s(units.Barrier, "all have added")
	barrier.Input = nil
	if _, err := j.Do(rank, barrier); err != nil {
		return nil, err
	}
	err := s.Play(units.ReadNow)
	return s, err
}

// addToAnother has a rank declare another value, while servers are lost, and use it.
func addToAnother(j *jobtest.Job, rank int, model string, n int) error {
	if stepped(model) {
		model = "bsp"
	}
	v := j.Held(rank, "another", model, n)
	err := v.Use(units.Declare, 10)
	if err == nil {
		err = v.Use(units.Add|units.ReadNow, 1)
	}
	switch {
	case err != nil && strings.Contains(err.Error(), "its root, rank 0, has gone"): // before it gave the value
		return nil
	case err == nil && (v.Now[0] < 11 || v.Now[0] > float32(10+len(j.Workers))):
		err = fmt.Errorf("%q is %g, when it has added 1 to 10", v.Name, v.Now[0])
	}
	return err
}

// TestCodedValuesGoOnWithoutALostServer: all ranks have the same bits, and come to the value. A codec that leaves nothing out loses nothing.
func TestCodedValuesGoOnWithoutALostServer(t *testing.T) {
	served(t, 3, 2, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
		const iterations, n = 6, 3001
		ones := slices.Repeat([]float64{1}, n)
		for k := range iterations {
			for i, setting := range codecs {
				var seen [3][]float64
				j.Each(func(rank int) (err error) {
					v := &codedValue{j: j, rank: rank, name: setting, codec: jobtest.CodedBy(setting), dtype: floats[i%4], op: units.Sum, n: n}
					if k == 0 {
						if _, err := v.use(units.Declare, ones); err != nil {
							return err
						}
					}
					if k == iterations/2 && i == len(codecs)/2 && rank == 2 { // the others wait for it
						time.Sleep(10 * time.Millisecond)
						kill(0)
					}
					if seen[rank], err = v.use(units.Add|units.Read, ones); err != nil {
						return err
					}
					want, err := v.use(units.ReadNow|units.Exact, nil)
					if k < iterations-1 || err != nil {
						return err
					}
					got := want
					for range 40 {
						if got, err = v.use(units.ReadNow, nil); err != nil {
							return err
						}
					}
					if off := norm(got, want) / math.Sqrt(float64(n)); off > 0.05 {
						return fmt.Errorf("%s: off by %g", setting, off)
					}
					if exact := []string{"none+s2", "fp16", "bf16+zstd"}; slices.Contains(exact, setting) && got[n-1] != 1+3*iterations {
						return fmt.Errorf("%s: %g, want %d", setting, got[n-1], 1+3*iterations)
					}
					return nil
				})
				for rank := 1; rank < 3; rank++ {
					if !slices.Equal(seen[rank], seen[0]) {
						t.Errorf("%s, iteration %d: ranks 0 and %d are %g apart", setting, k, rank, norm(seen[0], seen[rank]))
					}
				}
			}
		}
	})
}
