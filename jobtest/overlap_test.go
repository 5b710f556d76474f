package jobtest_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/sim/shapes"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// layer is some tensors of a model, by their elements, and how much of its computing is theirs.
type layer struct {
	elements []int
	share    float64
}

// resnet50 is its convolutions, each with its batch norm, and the last layer. Multiplications are in proportion to the output's
// area.
func resnet50() (layers []layer) {
	shape, _ := shapes.Named("resnet50")
	area := slices.Concat([]int{112}, slices.Repeat([]int{56}, 10), slices.Repeat([]int{28}, 13), slices.Repeat([]int{14}, 19), slices.Repeat([]int{7}, 10), []int{1})
	all := 0.0
	for i, side := range area {
		elements := shape.Elements[3*i : min(3*i+3, len(shape.Elements))]
		layers = append(layers, layer{elements, float64(elements[0] * side * side)})
		all += layers[i].share
	}
	for i := range layers {
		layers[i].share /= all
	}
	return layers
}

// trainer is a rank that computes elsewhere, and waits layer by layer for the gradients of the step before.
type trainer struct {
	j         *jobtest.Job
	rank      int
	layers    []layer
	computing time.Duration // of a step
	memory    [][]byte      // of the gradients, by tensor
	pending   [][]chan jobtest.Result
}

func (r *trainer) step() error {
	for i, l := range r.layers {
		if err := r.wait(i); err != nil {
			return err
		}
		time.Sleep(time.Duration(l.share * float64(r.computing) / 3))
	}
	for i, l := range slices.Backward(r.layers) {
		time.Sleep(time.Duration(l.share * float64(r.computing) * 2 / 3))
		var ops []worker.Op
		for k, n := range l.elements {
			number := 3*i + k
			ops = append(ops, worker.Op{
				Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Shape: []int64{int64(n)}, Input: r.memory[number], Output: r.memory[number],
				Name: fmt.Sprintf("gradient.%d", number), Priority: -number,
			})
		}
		var err error
		if r.pending[i], err = r.j.Submit(r.rank, ops...); err != nil {
			return err
		}
	}
	return nil
}

func (r *trainer) wait(i int) error {
	r.j.Workers[r.rank].Engine.Flush(true)
	for k, done := range r.pending[i] {
		if _, err := jobtest.Await(done, r.rank, fmt.Sprintf("gradient.%d", 3*i+k)); err != nil {
			return err
		}
	}
	return nil
}

// TestAStepTakesLittleMoreThanTheLongerOfComputingAndExchange where both take as long, on links of 1 Gbit/s between hosts, with the
// settings that a job has by itself. Then each wait for a gradient that is late shows.
func TestAStepTakesLittleMoreThanTheLongerOfComputingAndExchange(t *testing.T) {
	const (
		ranks, steps, settled = 2, 5, 2
		link                  = 120_000_000
		buffer                = 256 << 10 // as PACELINE_SEND_BUFFER
	)
	if race {
		t.Skip("a hundred megabytes in each step take the detector too long")
	}
	layers, bytes := resnet50(), 0
	for _, l := range layers {
		for _, n := range l.elements {
			bytes += 4 * n
		}
	}
	bound := time.Duration(float64(bytes) / link * float64(time.Second)) // half of it as a worker, half as a server
	var ends []time.Time
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{Latency: 100 * time.Microsecond, Bandwidth: link, Buffer: buffer, Integrity: "control"})
		t.Cleanup(network.Close)
		byItself := jobtest.With(func(s *settings.Settings) { s.PartitionBytes = 0 })
		j := jobtest.Start(t, ranks, byItself, jobtest.OnHosts(nodeName), eachOn(network))
		j.Each(func(rank int) error {
			r := trainer{j: j, rank: rank, layers: layers, computing: bound, pending: make([][]chan jobtest.Result, len(layers))}
			for _, l := range layers {
				for _, n := range l.elements {
					r.memory = append(r.memory, make([]byte, 4*n))
				}
			}
			for range steps {
				if err := r.step(); err != nil {
					return err
				}
				if rank == 0 {
					ends = append(ends, time.Now())
				}
			}
			for i := range layers {
				if err := r.wait(i); err != nil {
					return err
				}
			}
			return nil
		})
	})
	took := ends[steps-1].Sub(ends[settled-1]) / (steps - settled)
	t.Logf("a step takes %v, %.3f times the %v of the exchange", took, float64(took)/float64(bound), bound)
	if took > bound*105/100 {
		t.Errorf("a step takes %v, where computing and the exchange take %v each", took, bound)
	}
}
