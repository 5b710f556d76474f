package scheduler_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// TestRandomRestarts has workers declare tensors and make process sets in random order, over several rounds, while the
// scheduler is killed and restarted at random times. All ranks must get the same answers, and no number is used twice.
func TestRandomRestarts(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				inTwin(t, func(t *testing.T, s *site) { chaos(t, s, rand.New(rand.NewPCG(seed, 1))) })
			})
		})
	}
}

func chaos(t *testing.T, s *site, random *rand.Rand) {
	const workers, rounds = 3, 5
	stop := make(chan struct{})
	pause := rand.New(rand.NewPCG(random.Uint64(), 3))
	var killer sync.WaitGroup
	killer.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(pause.IntN(2000)) * time.Millisecond):
				s.kill()
				s.start()
			}
		}
	})
	defer killer.Wait()
	defer close(stop)
	for range rounds {
		told := make([]map[string]string, workers)
		for rank := range told {
			told[rank] = map[string]string{}
		}
		clients := make([]*control.Client, workers)
		seeds := []uint64{random.Uint64(), random.Uint64(), random.Uint64()}
		together(workers, func(rank int) {
			var losses chan wire.Lost
			clients[rank], losses = s.dial(wire.RoleWorker, rank, nil)
			if err := useJob(t, clients[rank], rank, workers, rand.New(rand.NewPCG(seeds[rank], 2)), told[rank]); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
			if len(losses) > 0 {
				t.Errorf("rank %d heard that %+v", rank, <-losses)
			}
		})
		together(workers, func(rank int) { clients[rank].Close() })
		for rank := 1; rank < workers; rank++ {
			if fmt.Sprint(told[rank]) != fmt.Sprint(told[0]) {
				t.Fatalf("rank %d was told %v,\nrank 0 %v", rank, told[rank], told[0])
			}
		}
		numbers := map[string]bool{}
		for _, what := range told[0] {
			if numbers[what] {
				t.Fatalf("%s was given twice: %v", what, told[0])
			}
			numbers[what] = true
		}
	}
}

// useJob takes part in a round and records the answers.
func useJob(t *testing.T, c *control.Client, rank, workers int, random *rand.Rand, told map[string]string) error {
	roster, err := c.Register(timeout(t), registerWorker(rank, workers))
	if err != nil {
		return err
	}
	told["round"] = fmt.Sprintf("round %#x", roster.Round)
	var all []wire.Tensor
	for i := range 20 {
		all = append(all, tensorOf(workers, fmt.Sprint("tensor", i), uint32(4+i), 4))
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	set := 0
	for batch := range slices.Chunk(all, 3) {
		placed, err := c.Declare(timeout(t), batch)
		if err != nil {
			return err
		}
		for i, p := range placed {
			told[batch[i].Name] = fmt.Sprintf("tensor %d on %v", p.ID, p.Servers)
		}
		if set < 3 {
			ranks := [][]int{{0, 1}, {2}, {1, 2}}[set]
			got, err := c.AddSet(timeout(t), ranks)
			if err != nil {
				return err
			}
			told[fmt.Sprint("set ", ranks)] = fmt.Sprintf("set %d", got.ID)
			set++
		}
		time.Sleep(time.Duration(random.IntN(400)) * time.Millisecond) // virtual: kills fall at any time
	}
	return nil
}
