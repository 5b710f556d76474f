package jobtest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// Ranks do unequal numbers of iterations, with a sum in between to which ranks at a barrier have not come: under adaptive
// and ElasticBSP ranks run freely between barriers.
func TestSupersteps(t *testing.T) {
	const ranks, values, elements, epochs = 3, 3, jobtest.Partition/2 + 3, 3
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "both": jobtest.Both(1)} {
		for _, model := range []string{"adaptive:1,1", "adaptive:3,2", "elastic:1", "elastic:5"} {
			t.Run(place+" "+model, func(t *testing.T) {
				jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
					j := jobtest.Start(t, ranks, jobtest.SmallPartitions, option, network)
					j.Each(func(rank int) error {
						random := rand.New(rand.NewPCG(7, uint64(rank)))
						g, err := j.Group(rank, "value", model, values, elements)
						if err != nil {
							return err
						}
						steps := int64(0)
						for epoch := range epochs {
							for range 3 + random.IntN(12) {
								if err := g.Step(1); err != nil {
									return err
								}
								steps++
							}
							if err := j.Sums(rank, fmt.Sprint("epoch ", epoch), 5); err != nil {
								return err
							}
						}
						all, err := total(j, rank, steps)
						if err != nil {
							return err
						}
						most := steps - 1
						if model == "adaptive:1,1" { // each superstep has an iteration of some rank
							most = all
						}
						if where := j.Workers[rank].Engine.Supersteps(); len(where) != 1 || where[0].Superstep == 0 || where[0].Superstep > uint64(most) {
							return fmt.Errorf("rank %d has done %d iterations and is at %+v", rank, steps, where)
						}
						for _, v := range g.Values {
							if err := v.Use(units.ReadNow, 0); err != nil {
								return err
							}
							if err := v.Is(10 + float32(all)); err != nil {
								return err
							}
						}
						return nil
					})
				})
			})
		}
	}
}

// The adaptive paper, section III: s = 1 is BSP. A rank whose iteration makes a barrier due stops with that iteration, so that
// there are as many supersteps as iterations, and every rank reads what all have added.
func TestAdaptiveWithThresholdsOfOneIsBSP(t *testing.T) {
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
		t.Run(place, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				const ranks, iterations = 3, 20 // in less than the window in which the machine's occupancy is measured
				j := jobtest.Start(t, ranks, jobtest.SmallPartitions, option, network)
				j.Each(func(rank int) error {
					g, err := j.Group(rank, "value", "adaptive:1,1", 2, jobtest.Partition/2)
					for i := 0; i < iterations && err == nil; i++ {
						time.Sleep(time.Duration(10+rank) * time.Millisecond) // it computes
						if err = g.Step(1); err != nil {
							break
						}
						where := j.Workers[rank].Engine.Supersteps()[0]
						if where.Superstep != uint64(i+1) || where.Iterations != 0 {
							err = fmt.Errorf("after %d iterations rank %d is at %+v", i+1, rank, where)
						}
						for _, v := range g.Values {
							err = errors.Join(err, v.Is(10+ranks*float32(i+1)))
						}
					}
					return err
				})
			})
		})
	}
}

// total is the sum of the inputs.
func total(j *jobtest.Job, rank int, n int64) (int64, error) {
	op := worker.Op{Kind: units.Allreduce, DType: units.Int64, ReduceOp: units.Sum, Shape: []int64{1}, Name: "total", Prescale: 1, Postscale: 1}
	op.Input, op.Output = binary.NativeEndian.AppendUint64(nil, uint64(n)), make([]byte, 8)
	if _, err := j.Do(rank, op); err != nil {
		return 0, err
	}
	return int64(binary.NativeEndian.Uint64(op.Output)), nil
}

// The adaptive paper, section III: thresholds follow the ranks while training runs, so that one long iteration does not
// delay the next barrier as if all were long.
func TestAPauseOfOneRankRaisesThresholdsForThatIterationAlone(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		const pause, after = time.Second, 100
		j := jobtest.Start(t, 3, network, jobtest.SmallPartitions)
		j.Each(func(rank int) error {
			g, err := j.Group(rank, "value", "adaptive:2,2", 1, 5)
			if err != nil {
				return err
			}
			before := uint64(0)
			for i := range 10 + after {
				if i == 10 {
					before = j.Workers[rank].Engine.Supersteps()[0].Superstep
					if rank == 1 {
						time.Sleep(pause) // as a checkpoint takes it
					}
				}
				time.Sleep(3 * time.Millisecond) // it computes
				if err := g.Step(1); err != nil {
					return err
				}
			}
			if where := j.Workers[rank].Engine.Supersteps()[0]; where.Superstep < before+3 {
				return fmt.Errorf("rank %d was in superstep %d before a pause, and %d iterations later it is at %+v", rank, before, after, where)
			}
			j.Leave(rank)
			return nil
		})
	})
}

// The adaptive paper, section III, with our rule: a rank that takes three times as long raises both thresholds to three times.
func TestASlowRankRaisesThresholds(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.SmallPartitions)
		j.Each(func(rank int) error {
			g, err := j.Group(rank, "value", "adaptive:2,3", 2, 5)
			for where := (worker.Superstep{}); where.Superstep < 8 && err == nil; {
				computing := 100 * time.Millisecond
				if rank == 1 {
					computing *= 3
				}
				time.Sleep(computing)
				err = g.Step(1)
				where = j.Workers[rank].Engine.Supersteps()[0]
				if where.Superstep > 2 && (where.S != 6 || where.W != 9) { // before, the slow rank has not been measured
					return fmt.Errorf("rank %d is at %+v, and one rank of its job is three times as slow: want s of 6 and w of 9", rank, where)
				}
			}
			j.Leave(rank)
			return err
		})
	})
}

func TestARankThatLeavesHoldsNobodyAtABarrier(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, model := range []string{"adaptive:1,1", "elastic:2"} {
			j := jobtest.Start(t, 3, network, jobtest.SmallPartitions, jobtest.Dedicated(1))
			j.Each(func(rank int) error {
				g, err := j.Group(rank, "value", model, 2, 5)
				if err != nil {
					return err
				}
				for i := range 40 {
					if rank == 2 && i == 10 {
						break
					}
					if err := g.Step(1); err != nil {
						return err
					}
				}
				j.Leave(rank)
				return nil
			})
		}
	})
}

// Others do not wait long for a rank that has done its iterations and neither leaves nor does anything else.
func TestARankThatHasEndedHoldsNobodyAtABarrier(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, model := range []string{"adaptive:1,1", "elastic:2"} {
			j := jobtest.Start(t, 3, network, jobtest.SmallPartitions)
			j.Each(func(rank int) error {
				g, err := j.Group(rank, "value", model, 2, 5)
				if err != nil {
					return err
				}
				for range 10 + 30*rank {
					if err := g.Step(1); err != nil {
						return err
					}
				}
				return nil
			})
		}
	})
}
