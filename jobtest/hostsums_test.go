package jobtest_test

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// The tests in this file are of workers that share a host and sum among themselves before anything leaves it. Others run the same
// jobs among their places (jobtest.Pairs).

// TestTheSumOfAHostCrossesItsLinkOnce counts what the servers get and send, which is what crosses the links of the workers'
// hosts: a tensor for each host, and without the setting one for each worker.
func TestTheSumOfAHostCrossesItsLinkOnce(t *testing.T) {
	const bytes = 4 << 20
	for _, c := range []struct {
		what    string
		ranks   int
		options []jobtest.Option
		kind    units.Kind
		op      func(*worker.Op)
		want    float64 // tensors, in each direction
	}{
		{"two hosts of two", 4, nil, units.Allreduce, nil, 2},
		{"one host has one", 3, nil, units.Allreduce, nil, 2},
		{"it is switched off", 4, []jobtest.Option{jobtest.With(func(s *settings.Settings) { s.HostSums = false })}, units.Allreduce, nil, 4},
		{"the servers are on the host", 4, []jobtest.Option{jobtest.OnHosts(func(int) string { return hostname(t) })}, units.Allreduce, nil, 4},
		{"maximum", 4, nil, units.Allreduce, func(o *worker.Op) { o.ReduceOp = units.Max }, 2},
		{"a model that is named", 4, nil, units.Allreduce, func(o *worker.Op) { o.Sync.Model = "bsp" }, 4},
		{"Adasum", 4, nil, units.Allreduce, func(o *worker.Op) { o.ReduceOp = units.Adasum }, 4},
	} {
		network := transporttest.NewNetwork(transporttest.Options{})
		t.Cleanup(network.Close)
		node := network.Node("127.0.0.1", []byte(jobtest.Secret))
		servers := &link{Transport: node}
		over := jobtest.Transports(func(rank int) *transport.Set {
			if rank < 0 {
				return transport.NewSet(nil, servers)
			}
			return transport.NewSet(nil, node)
		})
		j := jobtest.Start(t, c.ranks, append([]jobtest.Option{jobtest.Pairs(2), jobtest.SmallPartitions, over}, c.options...)...)
		j.Works("all are there", 1)
		in, out := servers.in.Load(), servers.out.Load()
		j.Each(func(rank int) error {
			op := jobtest.Float32s(c.kind, "x", bytes/4)
			if c.op != nil {
				c.op(&op)
			}
			_, err := j.Do(rank, op)
			return err
		})
		j.Works("all have ended", 1)
		got, sent := float64(servers.in.Load()-in)/bytes, float64(servers.out.Load()-out)/bytes
		if math.Abs(got-c.want) > 0.03*c.want || math.Abs(sent-c.want) > 0.03*c.want {
			t.Errorf("%s: the servers get %.3f and send %.3f tensors, want %.0f", c.what, got, sent, c.want)
		}
		j.Shutdown()
	}
}

func hostname(t *testing.T) string {
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_JOB_SECRET": jobtest.Secret})
	if err == nil {
		err = s.Complete()
	}
	if err != nil {
		t.Fatal(err)
	}
	return s.Host
}

// TestHalfPrecisionDoesNotOverflowOnTheWay reduces numbers whose sum or product over a host is no float16, with scales, and where
// hosts have different numbers of ranks..
func TestHalfPrecisionDoesNotOverflowOnTheWay(t *testing.T) {
	const n = 10000
	j := jobtest.Start(t, 5, jobtest.Dedicated(1), jobtest.OnHosts(func(rank int) string { return fmt.Sprint("host-", rank/3) })) // of three, and of two
	for _, c := range []struct {
		op                  units.ReduceOp
		prescale, postscale float64
		in                  []float64
		want                float64
	}{
		{units.Average, 0.5, 2, []float64{60000, 60000, 60000, 60000, 60000}, 60000},
		{units.Average, 1, 1, []float64{1, 2, 2, 0, 0}, 1},
		{units.Sum, 1, 0.25, []float64{49152, 49152, 49152, 24576, 24576}, 49152},
		{units.Sum, 1, 1, []float64{0x3p-24, 0, 0, 0x1p-24, 0}, 0x4p-24},
		{units.Sum, 1, 1, []float64{1, 1, 2, 3, 6}, 13},
		{units.Product, 1, 1, []float64{400, 400, 1, 0.25, 0.25}, 10000},
	} {
		j.Each(func(rank int) error {
			in := slices.Repeat(jobtest.Elements(units.Float16, c.in[rank:rank+1]), n)
			op := worker.Op{Kind: units.Allreduce, DType: units.Float16, ReduceOp: c.op, Shape: []int64{n}, Input: in, Output: in,
				Name: fmt.Sprint(c), Prescale: c.prescale, Postscale: c.postscale}
			if _, err := j.Do(rank, op); err != nil {
				return err
			}
			if got := slices.Compact(jobtest.Numbers(units.Float16, in)); !slices.Equal(got, []float64{c.want}) {
				return fmt.Errorf("%v of %v, scaled by %v and %v: %v, want %v", c.op, c.in, c.prescale, c.postscale, got, c.want)
			}
			return nil
		})
	}
}

// TestSumsOfHostsInRankOrderRepeatBitForBit is of one arrangement: sums of hosts are added in another order than ranks one by one.
func TestSumsOfHostsInRankOrderRepeatBitForBit(t *testing.T) {
	inOrder := jobtest.With(func(s *settings.Settings) { s.SumInRankOrder = true })
	var first []byte
	for range 2 {
		j := jobtest.Start(t, 5, jobtest.SmallPartitions, inOrder, jobtest.Pairs(2))
		for range 5 {
			for _, r := range sumOfRandoms(j, "x", 50000) {
				if first == nil {
					first = r
				}
				if !bytes.Equal(r, first) {
					t.Fatal("two sums of the same tensors differ")
				}
			}
		}
	}
}

func TestConditionsOfSumsOfHostsStay(t *testing.T) {
	j := jobtest.Start(t, 4, jobtest.Pairs(1))
	j.Works("x", 20000)
	_, err := j.Workers[0].Engine.SetCondition(t.Context(), nil, wire.Condition{Names: []string{"x"}, Push: "drop-stragglers:3"})
	if err == nil || !strings.Contains(err.Error(), "PACELINE_HOST_SUMS=0") {
		t.Errorf("%v, want an error that says what to set", err)
	}
	j.Works("x", 20000)
}

// lastRanks notes for which rank the exchanges of an engine's sums waited.
type lastRanks struct {
	mu   sync.Mutex
	last []int
}

// Ended implements worker.Observer.
func (w *lastRanks) Ended(_ worker.Observed, exchanges []worker.Exchange, _ error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range exchanges {
		if x.Type == wire.TypePush {
			w.last = append(w.last, x.Last)
		}
	}
}

// TestObserversHearWhichRankASumWaitedForBehindItsHost has each rank come last in turn: on its own host and on the other one the
// exchanges are said to have waited for that rank, not for the one that pushes the sum of its host.
func TestObserversHearWhichRankASumWaitedForBehindItsHost(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 4, network, jobtest.Pairs(1), jobtest.SmallPartitions)
		const partitions = 4
		j.Works("x", partitions*jobtest.Partition)
		for late := range 4 {
			var seen [4]lastRanks
			for rank, w := range j.Workers {
				w.Engine.Observe(&seen[rank])
			}
			j.Each(func(rank int) error {
				if rank == late {
					time.Sleep(time.Second)
				}
				return j.Sums(rank, "x", partitions*jobtest.Partition)
			})
			for rank, w := range j.Workers {
				w.Engine.Unobserve(&seen[rank])
				if want := slices.Repeat([]int{late}, partitions); !slices.Equal(seen[rank].last, want) {
					t.Errorf("rank %d is late: rank %d hears that its exchanges waited for %v, want %v", late, rank, seen[rank].last, want)
				}
			}
		}
	})
}
