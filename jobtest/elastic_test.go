package jobtest_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// elastically plays an elastic job of three ranks with dedicated servers, of which the test is the last.
func elastically(t *testing.T, servers int, play func(t *testing.T, j *jobtest.Job, r *jobtest.Raw)) {
	t.Helper()
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.New(t, 3, network, jobtest.Dedicated(servers), jobtest.Elastic, jobtest.SmallPartitions)
		r := j.StartBeside()
		play(t, j, r)
	})
}

// vanish ends a rank as SIGKILL does, when what it has sent has arrived.
func vanish(r *jobtest.Raw) {
	synctest.Wait()
	r.Vanish()
}

// sums has the two ranks that are left sum n ones, and checks what each partition counts.
func sums(j *jobtest.Job, name string, n int, want ...byte) {
	j.T.Helper()
	start := time.Now()
	j.Each(func(rank int) error { return sumsTo(j, rank, name, n, want...) })
	if took := time.Since(start); took > time.Second {
		j.T.Errorf("%q took %v", name, took)
	}
}

func sumsTo(j *jobtest.Job, rank int, name string, n int, want ...byte) error {
	op := jobtest.Sum(name, n)
	if _, err := j.Do(rank, op); err != nil {
		return err
	}
	for i, v := range op.Output {
		if w := want[min(i/jobtest.Partition, len(want)-1)]; v != w {
			return fmt.Errorf("element %d of %q is %d, want %d", i, name, v, w)
		}
	}
	return nil
}

// TestAnElasticJobGoesOnWithoutALostWorker: what has arrived whole of its push counts, for each key by itself, and everybody who is
// left has the same sum within a second.
func TestAnElasticJobGoesOnWithoutALostWorker(t *testing.T) {
	const n = 2 * jobtest.Partition
	push := func(r *jobtest.Raw, j *jobtest.Job, bytes ...int) {
		tensor, placed := r.Declare(j.Settings, "x", n)
		for part, size := range bytes {
			ones := []byte(strings.Repeat("\x01", jobtest.Partition))
			frame := wire.AppendFrame(nil, r.Push(&tensor, part, 0), ones)
			r.Send(r.Conns[placed.Servers[part]], frame[:len(frame)-jobtest.Partition+size])
		}
	}
	for name, c := range map[string]struct {
		do   func(r *jobtest.Raw, j *jobtest.Job)
		want []byte
	}{
		"before it pushes":       {func(*jobtest.Raw, *jobtest.Job) {}, []byte{2}},
		"after all its pushes":   {func(r *jobtest.Raw, j *jobtest.Job) { push(r, j, jobtest.Partition, jobtest.Partition) }, []byte{3}},
		"between two partitions": {func(r *jobtest.Raw, j *jobtest.Job) { push(r, j, jobtest.Partition) }, []byte{3, 2}},
		"within a partition":     {func(r *jobtest.Raw, j *jobtest.Job) { push(r, j, jobtest.Partition, jobtest.Partition/2) }, []byte{3, 2}},
		"by garbage":             {func(r *jobtest.Raw, _ *jobtest.Job) { r.Send(r.Conns[0], []byte(strings.Repeat("garbage", 100))) }, []byte{2}},
	} {
		for _, servers := range []int{1, 2} {
			for _, waits := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %d servers, the others wait: %v", name, servers, waits), func(t *testing.T) {
					elastically(t, servers, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
						lose := func() { c.do(r, j); vanish(r) }
						if waits {
							go func() { synctest.Wait(); lose() }()
						} else {
							lose()
							synctest.Wait()
						}
						sums(j, "x", n, c.want...)
						for i := range 3 {
							sums(j, "x", n, 2)
							sums(j, fmt.Sprint("new ", i), n, 2)
						}
					})
				})
			}
		}
	}
}

// TestARankThatWasGivenUpHearsItFromEveryServer, with the epoch since which it is no member: the servers may reach it before the scheduler does.
func TestARankThatWasGivenUpHearsItFromEveryServer(t *testing.T) {
	elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
		r.Send(r.Conns[0], []byte(strings.Repeat("garbage", 100)))
		var h wire.Header
		var payload []byte
		for h.Type != wire.TypeLost {
			if err := r.Conns[1].ReadHeader(&h); err != nil {
				t.Fatal(err)
			}
			payload = make([]byte, h.Length)
			if err := r.Conns[1].ReadPayload(payload); err != nil {
				t.Fatal(err)
			}
		}
		if want := "(it is no member since epoch 1, and the others go on without it)"; !strings.Contains(string(payload), want) {
			t.Errorf("it hears %s, want %q", payload, want)
		}
	})
}

// An average divides by who contributed.
func TestAnAverageDividesByWhoContributed(t *testing.T) {
	elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
		vanish(r)
		j.Each(func(rank int) error {
			op := jobtest.Float32s(units.Allreduce, "mean", 1000)
			op.ReduceOp = units.Average
			if _, err := j.Do(rank, op); err != nil {
				return err
			}
			for i, v := range jobtest.Numbers(units.Float32, op.Output) {
				if v != 1 {
					return fmt.Errorf("element %d is %v", i, v)
				}
			}
			return nil
		})
	})
}

// TestWhatALostRankLeavesBehind: what needs it ends with an error that says so, in flight and afterwards, and the job goes on.
func TestWhatALostRankLeavesBehind(t *testing.T) {
	fromIt := func(kind units.Kind) func() worker.Op {
		return func() worker.Op {
			op := jobtest.Float32s(kind, "x", 6)
			op.Root = 2
			if kind == units.Accumulate {
				op.Use, op.Input, op.Output = units.Declare, nil, op.Input
			}
			if kind == units.Reducescatter {
				op.Output = op.Input[:8]
			}
			return op
		}
	}
	for name, c := range map[string]struct {
		op  func() worker.Op
		why string
	}{
		"a broadcast from it":   {fromIt(units.Broadcast), "its root, rank 2, has gone"},
		"a value that it gives": {fromIt(units.Accumulate), "its root, rank 2, has gone"},
		"an alltoall":           {fromIt(units.Alltoall), "alltoall needs every rank"},
		"a reducescatter":       {fromIt(units.Reducescatter), "reducescatter needs every rank"},
	} {
		t.Run(name, func(t *testing.T) {
			elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
				go vanish(r)
				for range 2 { // in flight, and afterwards
					for rank, err := range j.Outcomes(func(rank int) error { _, err := j.Do(rank, c.op()); return err })[:2] {
						if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), c.why) {
							t.Errorf("rank %d: %v", rank, err)
						}
					}
				}
				sums(j, "after", 100, 2)
			})
		})
	}
}

// TestAReducescatterEndsWithoutAPartOfALostRank: the operation's home has all that the rank brings there, and another server lacks what it was to bring.
func TestAReducescatterEndsWithoutAPartOfALostRank(t *testing.T) {
	const n = 3 * jobtest.Partition
	for parts := range 4 {
		elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
			tensor, placed := r.DeclareAs(j.Settings, wire.Tensor{Name: "x", Kind: units.Reducescatter, Op: units.Sum, DType: units.Uint8}, n)
			for part := range parts {
				r.Send(r.Conns[placed.Servers[part]], wire.AppendFrame(nil, r.Push(&tensor, part, 0), make([]byte, tensor.Parts[part])))
			}
			vanish(r)
			synctest.Wait()
			for rank, err := range j.Outcomes(func(rank int) error {
				op := jobtest.Sum("x", n)
				op.Kind, op.Output = units.Reducescatter, make([]byte, jobtest.Partition)
				_, err := j.Do(rank, op)
				return err
			})[:2] {
				if why := "reducescatter needs every rank"; parts < 3 && (!errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), why)) || parts == 3 && err != nil {
					t.Errorf("with %d partitions, rank %d: %v", parts, rank, err)
				}
			}
			sums(j, "after", 100, 2)
		})
	}
}

// A broadcast whose root has announced it, and vanishes with a part of it, ends on every rank alike, whoever has asked for what.
func TestABroadcastWhoseRootVanishesInTheMiddleEnds(t *testing.T) {
	const n = 3 * jobtest.Partition
	for parts := range 4 {
		elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
			tensor, placed := r.DeclareAs(j.Settings, wire.Tensor{Name: "x", Kind: units.Broadcast, Root: 2, DType: units.Uint8}, n)
			for part := range parts {
				r.Send(r.Conns[placed.Servers[part]], wire.AppendFrame(nil, r.Push(&tensor, part, 0), make([]byte, tensor.Parts[part])))
			}
			go vanish(r)
			errs := j.Outcomes(func(rank int) error {
				op := jobtest.Sum("x", n)
				op.Kind, op.Root = units.Broadcast, 2
				_, err := j.Do(rank, op)
				if err == nil && slices.Max(op.Output) > 0 {
					err = errors.New("it gives other bytes")
				}
				return err
			})[:2]
			for rank, err := range errs {
				if parts == 3 && errs[0] == nil && errs[1] == nil { // the root had brought all before it was missed
					break
				}
				if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), "rank 2") {
					t.Errorf("with %d partitions, rank %d: %v", parts, rank, err)
				}
			}
			sums(j, "after", 100, 2)
		})
	}
}

// TestWhatElseGoesOnWithoutALostRank: broadcasts and allgathers of the others, held values, process sets and joins.
func TestWhatElseGoesOnWithoutALostRank(t *testing.T) {
	elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
		vanish(r)
		sums(j, "x", 100, 2)
		j.Each(func(rank int) error {
			op := jobtest.Float32s(units.Broadcast, "b", 50000)
			if rank == 1 {
				clear(op.Output)
			}
			if _, err := j.Do(rank, op); err != nil {
				return err
			}
			if got := jobtest.Numbers(units.Float32, op.Output); got[0] != 1 || got[49999] != 1 {
				return fmt.Errorf("broadcast brought %v", got[:4])
			}
			out, err := j.Do(rank, jobtest.Float32s(units.Allgather, "g", int64(rank)+1, 2))
			if err != nil {
				return err
			}
			if got := fmt.Sprint(out.Rows, len(out.Data)); got != "[1 2 0] 24" {
				return fmt.Errorf("allgather brought %s", got)
			}
			return nil
		})
		j.Each(func(rank int) error {
			v, err := j.Declare(rank, "v", "ssp:1", 1000)
			for step := range 5 {
				if err == nil {
					err = v.Use(units.Add|units.Read, 1)
				}
				if err == nil && v.Now[999] < float32(11+step) {
					err = fmt.Errorf("after %d steps it is %v", step+1, v.Now[999])
				}
			}
			return err
		})
		two := &jobtest.Job{T: j.T, Settings: j.Settings, Log: j.Log, Workers: j.Workers}
		set := two.AddSet([]int{0, 1})
		j.Each(func(rank int) error {
			op := jobtest.Sum("of two", 100)
			op.Set = set
			_, err := j.Do(rank, op)
			return err
		})
		j.Each(func(rank int) error { _, err := j.Join(rank); return err })
		sums(j, "x", 100, 2)
	})
}

// Those who have joined wait for a rank that is lost no longer.
func TestALossEndsAJoin(t *testing.T) {
	elastically(t, 2, func(t *testing.T, j *jobtest.Job, r *jobtest.Raw) {
		go vanish(r)
		j.Each(func(rank int) error { _, err := j.Join(rank); return err })
		sums(j, "x", 100, 2)
	})
}

// A rank of an elastic job that leaves on purpose holds nobody either.
func TestARankThatLeavesAnElasticJobHoldsNobody(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.Dedicated(2), jobtest.Elastic)
		j.Each(func(rank int) error {
			if rank == 2 {
				<-j.Leave(2)
				return nil
			}
			return sumsTo(j, rank, "x", 100, 2)
		})
	})
}
