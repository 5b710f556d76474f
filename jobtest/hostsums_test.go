package jobtest_test

import (
	"bytes"
	"encoding/binary"
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

// TestHalfPrecisionAveragesDoNotOverflowOnTheWay averages numbers whose sum over a host is no float16, with scales, and where
// hosts have different numbers of ranks.
func TestHalfPrecisionAveragesDoNotOverflowOnTheWay(t *testing.T) {
	j := jobtest.Start(t, 3, jobtest.Pairs(1))
	var in []byte
	for range 10000 {
		in = jobtest.AppendElement(in, units.Float16, 60000)
	}
	j.Each(func(rank int) error {
		op := worker.Op{Kind: units.Allreduce, DType: units.Float16, ReduceOp: units.Average, Shape: []int64{10000}, Input: bytes.Clone(in),
			Output: make([]byte, len(in)), Name: "x", Prescale: 0.5, Postscale: 2}
		if _, err := j.Do(rank, op); err != nil {
			return err
		}
		if !bytes.Equal(op.Output, in) {
			t.Errorf("rank %d: the average of equal numbers is %#04x, want %#04x", rank, binary.NativeEndian.Uint16(op.Output), binary.NativeEndian.Uint16(in))
		}
		return nil
	})
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
