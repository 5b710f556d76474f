package jobtest_test

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/core/tuning"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// autotuned has the job search with short trials.
var autotuned = jobtest.With(func(s *settings.Settings) {
	s.Autotune, s.AutotuneWarmup, s.AutotuneSteps = true, 1, 4
})

// slow is a network on which a small credit leaves the link idle: a megabyte is under way in a round trip.
var slow = transporttest.Options{Latency: 5 * time.Millisecond, Bandwidth: 100 << 20, Buffer: 1 << 20}

// gradients are tensors that differ on each rank and in each step, in the order in which backward makes them.
func gradients(rank, step int) (ops []worker.Op) {
	for i, n := range []int{100, 80_000, 1000, 20_000} {
		in := jobtest.NormalFloats(n, uint64(rank), uint64(step*10+i))
		ops = append(ops, worker.Op{
			Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Average, Shape: []int64{int64(n)}, Input: in, Output: make([]byte, len(in)),
			Name: fmt.Sprintf("gradient.%d", i), Priority: i,
		})
	}
	return ops
}

// trainOn does steps on all ranks, and returns rank 0's results of each and how long the last hundred took.
func trainOn(j *jobtest.Job, steps int) (results [][]byte, last time.Duration) {
	j.T.Helper()
	var mu sync.Mutex
	var since time.Time
	j.Each(func(rank int) error {
		for step := range steps {
			if step == steps-100 && rank == 0 {
				since = time.Now()
			}
			ops := gradients(rank, step)
			done, err := j.Submit(rank, ops...)
			if err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
			var all []byte
			for i := range ops {
				if _, err := jobtest.Await(done[i], rank, ops[i].Name); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				all = append(all, ops[i].Output...)
			}
			mu.Lock()
			if rank == 0 {
				results = append(results, all)
			}
			mu.Unlock()
		}
		return nil
	})
	return results, time.Since(since)
}

// tuningOf is how far a rank's search is.
func tuningOf(j *jobtest.Job, rank int) *wire.Tuning { return j.Workers[rank].Engine.Progress().Tuning }

const searchSteps = 450 // more than a search with these trials takes

func TestASearchEndsAtFasterSettings(t *testing.T) {
	log := filepath.Join(t.TempDir(), "trials.csv")
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		small := jobtest.With(func(s *settings.Settings) {
			s.CreditBytes, s.PartitionBytes, s.SumInRankOrder, s.AutotuneLog = 64<<10, 64<<10, true, log
		})
		plain, before := trainOn(jobtest.Start(t, 2, network, jobtest.Dedicated(1), small), searchSteps)
		j := jobtest.Start(t, 2, network, jobtest.Dedicated(1), small, autotuned)
		tuned, after := trainOn(j, searchSteps)
		if float64(after) > 0.8*float64(before) {
			t.Errorf("100 steps take %v after the search, and %v without one", after, before)
		}
		for step := range plain {
			if !bytes.Equal(plain[step], tuned[step]) {
				t.Fatalf("the results of step %d differ from those without a search", step)
			}
		}
		first, second := tuningOf(j, 0), tuningOf(j, 1)
		if first == nil || first.Phase != tuning.Ended || *first != *second || first.Speedup < 1.2 || strings.Contains(first.Settings, "PACELINE_CREDIT_BYTES=65536 ") {
			t.Errorf("ranks end with %+v and %+v", first, second)
		}
		if p := j.Workers[0].Engine.Progress(); p.Iteration != searchSteps {
			t.Errorf("the status shows iteration %d of %d", p.Iteration, searchSteps)
		}
	})
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil || len(rows) < 30 || strings.Join(rows[0], ",")+"\n" != worker.TuningHeader || rows[len(rows)-1][0] != tuning.Ended {
		t.Fatalf("%d rows in the log, %v:\n%s", len(rows), err, text)
	}
	for _, row := range rows[1 : len(rows)-1] {
		if rate, err := strconv.ParseFloat(row[6], 64); err != nil || rate <= 0 {
			t.Errorf("%v has no rate", row)
		}
	}
}

// TestASearchLeavesTheOthersAlone runs beside a search what it must not touch: tensors with a codec and its residual, a process set,
// unnamed operations, a broadcast, held values, and names that are used more often or seldom.
func TestASearchLeavesTheOthersAlone(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.Both(1), autotuned)
		set := j.AddSet([]int{0, 2})
		j.Each(func(rank int) error {
			for step := range 200 {
				big, coded := jobtest.Sum("big", 300_000), jobtest.Float32s(units.Allreduce, "coded", 30_000)
				coded.Codec = "topk:0.01"
				ops := []worker.Op{big, coded, jobtest.Float32s(units.Broadcast, "model", 50_000)}
				if rank != 1 {
					in := jobtest.Sum("of the set", 300_000)
					in.Set = set
					ops = append(ops, in)
				}
				if step%7 == 0 {
					ops = append(ops, jobtest.Sum("seldom", 200_000))
				}
				ops = append(ops, jobtest.Sum("", 70_000))
				done, err := j.Submit(rank, ops...)
				if err != nil {
					return err
				}
				for i := range ops {
					if _, err := jobtest.Await(done[i], rank, ops[i].Name); err != nil {
						return fmt.Errorf("step %d: %w", step, err)
					}
				}
				if big.Output[299_999] != 3 {
					return fmt.Errorf("step %d: the sum is %d", step, big.Output[299_999])
				}
				for range 5 {
					if err := j.Sums(rank, "often", 80_000); err != nil {
						return fmt.Errorf("step %d: %w", step, err)
					}
				}
			}
			return nil
		})
	})
}

// TestAJoinBeginsASearchAnew has ranks with different numbers of batches, in the middle of phases and between them.
func TestAJoinBeginsASearchAnew(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, autotuned)
		for epoch, steps := range [][2]int{{3, 8}, {7, 5}, {100, 60}, {5, 5}, {6, 350}} {
			j.Each(func(rank int) error {
				for step := range steps[rank] {
					op := jobtest.Float32s(units.Allreduce, "gradient", 200_000)
					if _, err := j.Do(rank, op); err != nil {
						return fmt.Errorf("epoch %d, step %d: %w", epoch, step, err)
					}
				}
				_, err := j.Join(rank)
				return err
			})
			if first, second := tuningOf(j, 0), tuningOf(j, 1); *first != *second || first.Phase != tuning.WarmUp {
				t.Fatalf("epoch %d: ranks are at %+v and %+v", epoch, first, second)
			}
		}
	})
}

// TestAnEngineSaysWhetherASearchIsOver: operations may be left for the engine again when it is, until a join begins another.
func TestAnEngineSaysWhetherASearchIsOver(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		j := jobtest.New(t, 2, network, autotuned)
		var mu sync.Mutex
		told := make([][]bool, 2)
		j.Tuned = func(rank int, over bool) {
			mu.Lock()
			defer mu.Unlock()
			told[rank] = append(told[rank], over)
		}
		j.Start()
		for range searchSteps {
			j.Works("gradient", 200_000)
		}
		j.Each(func(rank int) error { _, err := j.Join(rank); return err })
		mu.Lock()
		defer mu.Unlock()
		for rank, told := range told {
			if !slices.Equal(told, []bool{true, false}) {
				t.Errorf("rank %d was told %v", rank, told)
			}
		}
	})
}

// TestAServerThatJoinsAfterASearchIsReachedWithItsSettings: it alone sums in the end, in about the time that the one before took.
func TestAServerThatJoinsAfterASearchIsReachedWithItsSettings(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		small := jobtest.With(func(s *settings.Settings) { s.CreditBytes, s.PartitionBytes = 64<<10, 64<<10 })
		_, untuned := trainOn(jobtest.Start(t, 2, network, jobtest.Dedicated(1), small, jobtest.Elastic), 120)
		j := jobtest.Start(t, 2, network, jobtest.Dedicated(1), small, jobtest.Elastic, autotuned)
		_, before := trainOn(j, searchSteps)
		j.StartServer()
		for len(j.Workers[0].Membership.Now().Servers) < 2 {
			time.Sleep(time.Second) // of virtual time
		}
		j.StopServer(0)
		_, after := trainOn(j, 120)
		if float64(before) > 0.8*float64(untuned) || float64(after) > 1.1*float64(before) {
			t.Errorf("100 steps take %v without a search, %v after it, and %v with the server that has joined", untuned, before, after)
		}
	})
}

func TestAFailedNameDoesNotEndASearch(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, autotuned)
		j.Each(func(rank int) error {
			for step := range searchSteps {
				n := 400_000
				if step%50 == 20 {
					n += rank
				}
				if err := j.Sums(rank, "gradient", n); (err != nil) != (step%50 == 20) {
					return fmt.Errorf("step %d: %w", step, err)
				}
			}
			return nil
		})
		if first, second := tuningOf(j, 0), tuningOf(j, 1); first.Phase != tuning.Ended || *first != *second {
			t.Errorf("ranks are at %+v and %+v", first, second)
		}
	})
}

func TestRanksSearchTogetherOrNotAtAll(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		j := jobtest.New(t, 2, network)
		errs := make(chan error, 2)
		for rank := range 2 {
			mine := j.Settings
			mine.Rank, mine.LocalRank, mine.LocalSize, mine.Autotune = rank, rank, 2, rank == 1
			go func() {
				w, err := node.StartWorker(t.Context(), mine, node.Options{Log: j.Log, Transports: j.Transports()})
				if err == nil {
					w.Shutdown()
				}
				errs <- err
			}()
		}
		for range 2 {
			if err := <-errs; err == nil || !strings.Contains(err.Error(), "PACELINE_AUTOTUNE") {
				t.Errorf("the ranks start with %v", err)
			}
		}
	})
}

// TestARankThatLeavesInASearchHoldsNobody shuts one rank down before its part of the measurements, which the other then waits for.
func TestARankThatLeavesInASearchHoldsNobody(t *testing.T) {
	jobtest.Virtually(t, slow, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, autotuned)
		for range 4 {
			j.Works("gradient", 200_000)
		}
		left := j.Leave(0)
		if _, err := j.Do(1, jobtest.Sum("gradient", 200_000)); err == nil {
			t.Error("rank 1 sums alone")
		}
		j.Leave(1)
		<-left
	})
}

// TestASearchGoesOnWhereHostsSumFirst has two workers on each of two hosts, and the servers elsewhere.
func TestASearchGoesOnWhereHostsSumFirst(t *testing.T) {
	j := jobtest.Start(t, 4, jobtest.Pairs(2), autotuned)
	for range searchSteps {
		j.Works("gradient", 500_000)
	}
	for rank := range 4 {
		if p := tuningOf(j, rank); p.Phase != tuning.Ended || *p != *tuningOf(j, 0) {
			t.Errorf("rank %d is at %+v", rank, p)
		}
	}
}
