package node_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/paceline/paceline/core"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// job is a whole job in one process, over real sockets: a scheduler, n workers and, where asked for,
// dedicated servers.
type job struct {
	t       testing.TB
	workers []*node.Worker
}

type jobOption func(*settings.Settings)

func dedicated(servers int) jobOption {
	return func(s *settings.Settings) { s.Servers, s.NumServers = "dedicated", servers }
}

// startJob starts n workers and shuts everything down with the test.
func startJob(t testing.TB, n int, options ...jobOption) *job {
	t.Helper()
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_JOB_SECRET": "a secret for this test only"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Complete(); err != nil {
		t.Fatal(err)
	}
	s.Size, s.StartTimeout, s.ServerMemory = n, 20*time.Second, 1<<30
	for _, o := range options {
		o(&s)
	}
	log := zap.NewNop()
	sched, err := node.StartScheduler(s, "127.0.0.1:0", log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sched.Close() })
	s.Scheduler = sched.Address
	if s.Servers == "dedicated" {
		startServers(t, s, log)
	}
	j := &job{t: t, workers: make([]*node.Worker, n)}
	j.start(s, sched.Address)
	t.Cleanup(j.shutdown)
	return j
}

func startServers(t testing.TB, s settings.Settings, log *zap.Logger) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range s.NumServers {
		wg.Go(func() {
			if err := node.RunServer(ctx, s, "", log); err != nil {
				t.Errorf("dedicated server: %v", err)
			}
		})
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func (j *job) start(s settings.Settings, scheduler string) {
	j.t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, s.Size)
	for rank := range s.Size {
		wg.Go(func() {
			mine := s
			mine.Rank, mine.LocalRank, mine.LocalSize = rank, rank, s.Size
			j.workers[rank], errs[rank] = node.StartWorker(j.t.Context(), mine, node.Options{Scheduler: scheduler, Log: zap.NewNop()})
		})
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			j.t.Fatalf("rank %d: %v", rank, err)
		}
	}
}

func (j *job) shutdown() {
	var wg sync.WaitGroup
	for _, w := range j.workers {
		if w != nil {
			wg.Go(w.Shutdown)
		}
	}
	wg.Wait()
}

func (j *job) all() wire.ProcessSet {
	var s wire.ProcessSet
	for rank := range j.workers {
		s.Ranks = append(s.Ranks, rank)
	}
	return s
}

// do submits one operation on a rank and waits for it.
func (j *job) do(rank int, op core.Op) (core.Output, error) {
	type result struct {
		out core.Output
		err error
	}
	done := make(chan result, 1)
	op.Done = func(out core.Output, err error) { done <- result{out, err} }
	if op.Set.Ranks == nil {
		op.Set = j.all()
	}
	if op.Prescale == 0 && op.Postscale == 0 {
		op.Prescale, op.Postscale = 1, 1
	}
	if err := j.workers[rank].Engine.Submit([]core.Op{op}); err != nil {
		return core.Output{}, err
	}
	select {
	case r := <-done:
		return r.out, r.err
	case <-time.After(30 * time.Second):
		return core.Output{}, fmt.Errorf("rank %d: %v hangs", rank, op.Name)
	}
}

// each runs f on every rank at the same time.
func (j *job) each(f func(rank int) error) {
	j.t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, len(j.workers))
	for rank := range j.workers {
		wg.Go(func() { errs[rank] = f(rank) })
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			j.t.Fatalf("rank %d: %v", rank, err)
		}
	}
}

// bytesOf makes a uint8 tensor that differs by rank; sums of up to 8 ranks stay below 256.
func bytesOf(rank, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte((i*7 + rank*3) % 31)
	}
	return b
}

func TestAllreduceSumsOverEveryWorldSizeAndLength(t *testing.T) {
	for _, servers := range []int{0, 2} {
		for _, n := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprintf("%d ranks, %d dedicated servers", n, servers), func(t *testing.T) {
				var options []jobOption
				if servers > 0 {
					options = append(options, dedicated(servers))
				}
				j := startJob(t, n, options...)
				for _, size := range []int{0, 1, 1001, 64 << 10, 4<<20 - 1, 4<<20 + 1, 9 << 20} {
					for range 3 {
						j.each(func(rank int) error { return j.checkSum(rank, size) })
					}
				}
			})
		}
	}
}

func (j *job) checkSum(rank, size int) error {
	buf := bytesOf(rank, size)
	op := core.Op{Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Shape: []int64{int64(size)}, Input: buf, Output: buf, Name: fmt.Sprint("x", size)}
	if _, err := j.do(rank, op); err != nil {
		return err
	}
	want := make([]byte, size)
	for r := range j.workers {
		for i, v := range bytesOf(r, size) {
			want[i] += v
		}
	}
	for i := range want {
		if buf[i] != want[i] {
			return fmt.Errorf("size %d: element %d is %d, want %d", size, i, buf[i], want[i])
		}
	}
	return nil
}
