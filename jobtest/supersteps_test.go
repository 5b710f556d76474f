package jobtest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// group are values that a rank steps together under a model with supersteps; all of one length.
type group struct {
	j      *job
	rank   int
	values []*held
	steps  int
}

// group declares values of n elements.
func (j *job) group(rank int, name, model string, values, n int) (*group, error) {
	g := &group{j: j, rank: rank}
	ops := make([]worker.Op, values)
	for i := range ops {
		v := &held{j: j, rank: rank, name: fmt.Sprint(name, i), sync: model, now: make([]float32, n)}
		g.values = append(g.values, v)
		ops[i] = v.op(units.Declare, 10)
		ops[i].Group = name + "0"
	}
	err := g.do(ops)
	return g, err
}

// step adds x to every value and reads it, as it is within a superstep, or at its barrier.
func (g *group) step(x float32) error {
	engine, name := g.j.workers[g.rank].Engine, g.values[0].name
	last, err := engine.EndIteration(0, name)
	if err != nil {
		return err
	}
	use := units.Add | units.ReadNow | units.Within
	if last {
		use = units.Add | units.Read
	}
	ops := make([]worker.Op, len(g.values))
	for i, v := range g.values {
		ops[i] = v.op(use, x)
	}
	if err := g.do(ops); err != nil {
		return err
	}
	g.steps++
	return engine.BeginIteration(0, name)
}

func (g *group) do(ops []worker.Op) error {
	done, err := g.j.submit(g.rank, ops...)
	if err != nil {
		return err
	}
	for i := range done {
		if _, err := await(done[i], g.rank, ops[i].Name); err != nil {
			return err
		}
		g.values[i].take(ops[i])
	}
	return nil
}

// Ranks come unequally often and to a sum in between, which those at a barrier have not come to (algorithms.md
// sections 3 and 5: between barriers ranks run as they like).
func TestSupersteps(t *testing.T) {
	const ranks, values, elements, epochs = 3, 3, partition/2 + 3, 3
	for place, option := range map[string]jobOption{"embedded": func(*job) {}, "dedicated": dedicated(2), "both": both(1)} {
		for _, model := range []string{"adaptive:1,1", "adaptive:3,2", "elastic:1", "elastic:5"} {
			t.Run(place+" "+model, func(t *testing.T) {
				virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
					j := startJob(t, ranks, smallPartitions, option, network)
					j.each(func(rank int) error {
						random := rand.New(rand.NewPCG(7, uint64(rank)))
						g, err := j.group(rank, "value", model, values, elements)
						if err != nil {
							return err
						}
						steps := int64(0)
						for epoch := range epochs {
							for range 3 + random.IntN(12) {
								if err := g.step(1); err != nil {
									return err
								}
								steps++
							}
							if err := j.sums(rank, fmt.Sprint("epoch ", epoch), 5); err != nil {
								return err
							}
						}
						all, err := j.total(rank, steps)
						if err != nil {
							return err
						}
						most := steps - 1
						if model == "adaptive:1,1" { // each superstep has an iteration of some rank
							most = all
						}
						if where := j.workers[rank].Engine.Supersteps(); len(where) != 1 || where[0].Superstep == 0 || where[0].Superstep > uint64(most) {
							return fmt.Errorf("rank %d has done %d iterations and is at %+v", rank, steps, where)
						}
						for _, v := range g.values {
							if err := v.use(units.ReadNow, 0); err != nil {
								return err
							}
							if err := v.is(10 + float32(all)); err != nil {
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

// algorithms.md section 3: s = 1 is BSP. A rank whose iteration makes a barrier due stops with that iteration, so that
// there are as many supersteps as iterations, and every rank reads what all have added.
func TestAdaptiveWithThresholdsOfOneIsBSP(t *testing.T) {
	for place, option := range map[string]jobOption{"embedded": func(*job) {}, "dedicated": dedicated(1)} {
		t.Run(place, func(t *testing.T) {
			virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
				const ranks, iterations = 3, 20 // in less than the window in which the machine's occupancy is measured
				j := startJob(t, ranks, smallPartitions, option, network)
				j.each(func(rank int) error {
					g, err := j.group(rank, "value", "adaptive:1,1", 2, partition/2)
					for i := 0; i < iterations && err == nil; i++ {
						time.Sleep(time.Duration(10+rank) * time.Millisecond) // it computes
						if err = g.step(1); err != nil {
							break
						}
						where := j.workers[rank].Engine.Supersteps()[0]
						if where.Superstep != uint64(i+1) || where.Iterations != 0 {
							err = fmt.Errorf("after %d iterations rank %d is at %+v", i+1, rank, where)
						}
						for _, v := range g.values {
							err = errors.Join(err, v.is(10+ranks*float32(i+1)))
						}
					}
					return err
				})
			})
		})
	}
}

// total is the sum of what the ranks bring.
func (j *job) total(rank int, n int64) (int64, error) {
	op := worker.Op{Kind: units.Allreduce, DType: units.Int64, ReduceOp: units.Sum, Shape: []int64{1}, Name: "total", Prescale: 1, Postscale: 1}
	op.Input, op.Output = binary.NativeEndian.AppendUint64(nil, uint64(n)), make([]byte, 8)
	if _, err := j.do(rank, op); err != nil {
		return 0, err
	}
	return int64(binary.NativeEndian.Uint64(op.Output)), nil
}

// algorithms.md section 3: thresholds follow the ranks while training runs, so that one long iteration does not put
// the next barrier off for as long as the ranks would need if all were.
func TestAPauseOfOneRankRaisesThresholdsForThatIterationAlone(t *testing.T) {
	virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
		const pause, after = time.Second, 100
		j := startJob(t, 3, network, smallPartitions)
		j.each(func(rank int) error {
			g, err := j.group(rank, "value", "adaptive:2,2", 1, 5)
			if err != nil {
				return err
			}
			before := uint64(0)
			for i := range 10 + after {
				if i == 10 {
					before = j.workers[rank].Engine.Supersteps()[0].Superstep
					if rank == 1 {
						time.Sleep(pause) // as a checkpoint takes it
					}
				}
				time.Sleep(3 * time.Millisecond) // it computes
				if err := g.step(1); err != nil {
					return err
				}
			}
			if where := j.workers[rank].Engine.Supersteps()[0]; where.Superstep < before+3 {
				return fmt.Errorf("rank %d was in superstep %d before a pause, and %d iterations later it is at %+v", rank, before, after, where)
			}
			j.leave(rank)
			return nil
		})
	})
}

func TestARankThatLeavesHoldsNobodyAtABarrier(t *testing.T) {
	virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
		for _, model := range []string{"adaptive:1,1", "elastic:2"} {
			j := startJob(t, 3, network, smallPartitions, dedicated(1))
			j.each(func(rank int) error {
				g, err := j.group(rank, "value", model, 2, 5)
				if err != nil {
					return err
				}
				for i := range 40 {
					if rank == 2 && i == 10 {
						break
					}
					if err := g.step(1); err != nil {
						return err
					}
				}
				j.leave(rank)
				return nil
			})
		}
	})
}

// A rank that has done all its iterations, and neither leaves nor comes to anything else, is not waited for long.
func TestARankThatHasEndedHoldsNobodyAtABarrier(t *testing.T) {
	virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
		for _, model := range []string{"adaptive:1,1", "elastic:2"} {
			j := startJob(t, 3, network, smallPartitions)
			j.each(func(rank int) error {
				g, err := j.group(rank, "value", model, 2, 5)
				if err != nil {
					return err
				}
				for range 10 + 30*rank {
					if err := g.step(1); err != nil {
						return err
					}
				}
				return nil
			})
		}
	})
}
