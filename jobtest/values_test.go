package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

var valueSizes = []int{0, 1, 7, jobtest.Partition / 4, jobtest.Partition/4 + 1, 3*jobtest.Partition/4 - 1}

func TestAHeldValueIsTheRootsAndAllThatRanksHaveAdded(t *testing.T) {
	const ranks, iterations = 3, 6
	models := []string{"", "asp", "ssp:2", "dsps:1,5", "pssp:1,0.5", "dynamic-pssp:1,0.9", "drop-stragglers:3", "expression:lead < 4"}
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "both": jobtest.Both(1)} {
		t.Run(place, func(t *testing.T) {
			j := jobtest.Start(t, ranks, jobtest.SmallPartitions, option)
			for _, model := range models {
				for _, n := range valueSizes {
					name := fmt.Sprintf("%s of %d", model, n)
					j.Each(func(rank int) error { return addUp(j, rank, name, model, n, iterations) })
				}
			}
		})
	}
}

// addUp has a rank add its number plus one to a value several times. In the end the value must have all of it.
func addUp(j *jobtest.Job, rank int, name, model string, n, iterations int) error {
	v, err := j.Declare(rank, name, model, n)
	if err != nil {
		return err
	}
	ranks := float32(len(j.Workers))
	each := ranks * (ranks + 1) / 2
	for i := range iterations {
		if err := v.Use(units.Add|units.Read, float32(rank+1)); err != nil {
			return err
		}
		if model == "" { // BSP: everybody's difference of this iteration, and of no later one
			if err := v.Is(10 + float32(i+1)*each); err != nil {
				return err
			}
		}
	}
	if err := j.Sums(rank, name+" end", 1); err != nil { // everybody has added all
		return err
	}
	if err := v.Use(units.ReadNow, 0); err != nil {
		return err
	}
	return v.Is(10 + float32(iterations)*each)
}

// A delayed pull waits until its own iteration is closed under lazy parking, and for the next advance in the
// soft-barrier order (FluentPS section III-C).
func TestARankLeadsByNoMoreThanTheThreshold(t *testing.T) {
	for name, c := range map[string]struct {
		soft   bool
		pushes int
	}{"lazy": {false, 4}, "soft barrier": {true, 1}} {
		t.Run(name, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				leads(jobtest.Start(t, 2, network, jobtest.SmallPartitions), c.soft, c.pushes)
			})
		})
	}
}

// leads has one rank run ahead until it must wait, and the other push until that goes on.
func leads(j *jobtest.Job, soft bool, pushes int) {
	const s = 3
	values := make([]*jobtest.Held, 2)
	j.Each(func(rank int) (err error) {
		values[rank] = j.Held(rank, "w", fmt.Sprintf("ssp:%d", s), 2*jobtest.Partition/4)
		values[rank].Soft = soft
		return values[rank].Use(units.Declare, 0)
	})
	for range s {
		if err := values[0].Use(units.Add|units.Read, 1); err != nil { // FluentPS section III-B: i < V + s
			j.T.Fatal(err)
		}
	}
	waits, err := j.Submit(0, values[0].Op(units.Add|units.Read, 1))
	if err != nil {
		j.T.Fatal(err)
	}
	if err := values[1].Use(units.ReadNow, 0); err != nil {
		j.T.Fatal(err)
	}
	for range pushes {
		synctest.Wait()
		select {
		case r := <-waits[0]:
			j.T.Fatalf("rank 0 leads by %d: %v", s+1, r.Err)
		default:
		}
		if err := values[1].Use(units.Add, 1); err != nil {
			j.T.Fatal(err)
		}
	}
	if _, err := jobtest.Await(waits[0], 0, "w"); err != nil {
		j.T.Fatal(err)
	}
}

func TestWhoLeavesHoldsNobodyUpAndItsServerStays(t *testing.T) {
	j := jobtest.Start(t, 3, jobtest.SmallPartitions)
	values := make([]*jobtest.Held, 3)
	j.Each(func(rank int) (err error) {
		values[rank], err = j.Declare(rank, "w", "ssp:1", 3*jobtest.Partition/4)
		return err
	})
	j.Each(func(rank int) error { return values[rank].Use(units.Add|units.Read, 1) })
	j.Leave(2)
	for range 5 {
		j.Each(func(rank int) error { return values[rank].Use(units.Add|units.Read, 1) })
	}
}

func TestUsesOfAHeldValueThatAreRefused(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, jobtest.With(func(s *settings.Settings) { s.StallShutdown = time.Second; s.StallWarning = 300 * time.Millisecond }))
		expect := func(errs []error, text string) {
			t.Helper()
			for rank, err := range errs {
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("rank %d: %v, want an error with %q", rank, err, text)
				}
			}
		}
		expect(j.Outcomes(func(rank int) error {
			return (j.Held(rank, "early", "", 1)).Use(units.Add, 1)
		}), "declare it first")
		expect(j.Outcomes(func(rank int) error {
			_, err := j.Declare(rank, "w", "", 1)
			if err == nil {
				_, err = j.Declare(rank, "w", "", 1)
			}
			return err
		}), "has a value already")
		expect(j.Outcomes(func(rank int) error {
			_, err := j.Declare(rank, "two shapes", "", 1+rank)
			return err
		}), "ranks disagree")
		expect(j.Outcomes(func(rank int) error {
			_, err := j.Declare(rank, "two models", []string{"asp", "ssp:1"}[rank], 1)
			return err
		}), "under ssp:1")
		expect(j.Outcomes(func(rank int) error {
			v := j.Held(rank, "x", "", 1)
			return v.Use(units.Declare|units.Read, 1)
		}), "unknown use")
		alone := func(rank int) error {
			v, err := j.Declare(rank, "alone", "", 1)
			if err == nil && rank == 0 {
				err = v.Use(units.Add|units.Read, 1)
			}
			return err
		}
		expect(j.Outcomes(alone)[:1], "rank 1 did not come within 1s")
		j.Works("after all", 10)
	})
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
		j := jobtest.New(t, 2, jobtest.With(func(s *settings.Settings) { s.Sync = sync }))
		_, err := node.StartWorker(t.Context(), j.Settings, node.Options{Log: j.Log})
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "PACELINE_SYNC: ") || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want it to say %q", err, text)
		}
	}
}

func checkSync(sync string, soft, accumulate bool) error {
	return node.CheckSync(sync, soft, accumulate, 4)
}
