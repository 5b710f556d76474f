package jobtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// TestMain also is the main function of the processes that the tests of dying ones start (process_test.go).
func TestMain(m *testing.M) {
	if role := os.Getenv(processRole); role != "" {
		os.Exit(processMain(role))
	}
	goleak.VerifyTestMain(m)
}

// hang is after how long a test calls something that has not ended a hang.
const hang = 30 * time.Second

const testSecret = "a secret for this test only"

// job is a whole job in one process, over real sockets: a scheduler, n workers and, where asked for,
// dedicated servers.
type job struct {
	t        testing.TB
	settings settings.Settings // of every process of the job but for its rank
	log      *zap.Logger       // of the workers
	sched    *node.Scheduler
	workers  []*node.Worker                // nil where the test itself plays the rank
	over     func(rank int) *transport.Set // of a worker; -1: of servers and the scheduler

	stopServers []func() // each ends one dedicated server
	leaving     sync.WaitGroup
}

type jobOption func(*job)

func dedicated(servers int) jobOption {
	return func(j *job) { j.settings.Servers, j.settings.NumServers = "dedicated", servers }
}

func both(servers int) jobOption {
	return func(j *job) { j.settings.Servers, j.settings.NumServers = "both", servers }
}

// inMemory has the job meet on the twin of a network in memory, of which all processes are one node.
func inMemory(t testing.TB) jobOption { return over(t, transporttest.Options{}) }

func over(t testing.TB, o transporttest.Options) jobOption {
	network := transporttest.NewNetwork(o)
	t.Cleanup(network.Close)
	set := transport.NewSet(nil, network.Node("127.0.0.1", []byte(testSecret)))
	return func(j *job) { j.over = func(int) *transport.Set { return set } }
}

// virtually runs a test in virtual time: its jobs have the network of the option that it is given, and time passes only
// where everybody waits for it.
func virtually(t *testing.T, links transporttest.Options, test func(t *testing.T, network jobOption)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, over(t, links)) })
}

func with(change func(*settings.Settings)) jobOption { return func(j *job) { change(&j.settings) } }

// smallPartitions cuts tensors into as many partitions as possible.
var smallPartitions = with(func(s *settings.Settings) { s.PartitionBytes = partition })

// partition is the partition size of smallPartitions in bytes.
const partition = 64 << 10

// startJob starts n workers and shuts everything down with the test.
func startJob(t testing.TB, n int, options ...jobOption) *job {
	t.Helper()
	j := newJob(t, n, options...)
	j.start()
	return j
}

// newJob starts a job of n workers without the workers.
func newJob(t testing.TB, n int, options ...jobOption) *job {
	t.Helper()
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_JOB_SECRET": testSecret})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Complete(); err != nil {
		t.Fatal(err)
	}
	s.Size, s.StartTimeout, s.ServerMemory = n, 20*time.Second, 1<<30
	s.PartitionBytes = 4 << 20 // tests that play a worker cut as the engines do
	j := &job{t: t, settings: s, log: zap.NewNop(), workers: make([]*node.Worker, n)}
	for _, o := range options {
		o(j)
	}
	if j.over == nil {
		kinds, err := node.Transports(&j.settings, j.log)
		if err != nil {
			t.Fatal(err)
		}
		j.over = func(int) *transport.Set { return kinds }
	}
	j.startScheduler("127.0.0.1:0")
	if j.settings.Servers != "embedded" {
		j.startServers()
	}
	t.Cleanup(j.shutdown)
	return j
}

func (j *job) startScheduler(listen string) {
	j.t.Helper()
	sched, err := node.StartSchedulerOver(j.over(-1), j.settings, listen, zap.NewNop())
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { sched.Close() })
	j.sched, j.settings.Scheduler = sched, sched.Address
}

func (j *job) startServers() {
	for range j.settings.NumServers {
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		s := j.settings
		s.Role = "server"
		go func() {
			defer close(ended)
			if err := node.RunServerOver(ctx, j.over(-1), s, "", zap.NewNop()); err != nil && !errors.Is(err, context.Canceled) {
				j.t.Errorf("dedicated server: %v", err)
			}
		}()
		stop := func() { cancel(); <-ended }
		j.stopServers = append(j.stopServers, stop)
		j.t.Cleanup(stop)
	}
}

// start starts the workers of the given ranks, all for none.
func (j *job) start(ranks ...int) {
	j.t.Helper()
	if len(ranks) == 0 {
		ranks = j.all().Ranks
	}
	var wg sync.WaitGroup
	errs := make([]error, len(j.workers))
	for _, rank := range ranks {
		wg.Go(func() {
			mine := j.settings
			mine.Rank, mine.LocalRank, mine.LocalSize = rank, rank, mine.Size
			j.workers[rank], errs[rank] = node.StartWorker(j.t.Context(), mine, node.Options{Log: j.log, Transports: j.over(rank)})
		})
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			j.t.Fatalf("rank %d: %v", rank, err)
		}
	}
}

// shutdown shuts all workers down that are there.
func (j *job) shutdown() {
	for rank := range j.workers {
		j.leave(rank)
	}
	j.leaving.Wait()
}

// leave begins to shut a worker down, which with its server waits for the others.
func (j *job) leave(rank int) {
	if w := j.workers[rank]; w != nil {
		j.workers[rank] = nil
		j.leaving.Go(w.Shutdown)
	}
}

func (j *job) all() wire.ProcessSet {
	var s wire.ProcessSet
	for rank := range j.workers {
		s.Ranks = append(s.Ranks, rank)
	}
	return s
}

type result struct {
	out worker.Output
	err error
}

// submit starts one group of operations on a rank. Each gives one result.
func (j *job) submit(rank int, ops ...worker.Op) ([]chan result, error) {
	results := make([]chan result, len(ops))
	for i := range ops {
		op, done := &ops[i], make(chan result, 1)
		results[i] = done
		op.Done = func(out worker.Output, err error) { done <- result{out, err} }
		if op.Set.Ranks == nil {
			op.Set = j.all()
		}
		if op.Prescale == 0 && op.Postscale == 0 {
			op.Prescale, op.Postscale = 1, 1
		}
	}
	return results, j.workers[rank].Engine.Submit(ops)
}

// do submits one operation on a rank and waits for it.
func (j *job) do(rank int, op worker.Op) (worker.Output, error) {
	results, err := j.submit(rank, op)
	if err != nil {
		return worker.Output{}, err
	}
	return await(results[0], rank, op.Name)
}

func await(done <-chan result, rank int, name string) (worker.Output, error) {
	select {
	case r := <-done:
		return r.out, r.err
	case <-time.After(hang):
		return worker.Output{}, fmt.Errorf("rank %d: %q hangs", rank, name)
	}
}

// outcomes runs f on every rank that is there, at the same time, and gives back what each returned.
func (j *job) outcomes(f func(rank int) error) []error {
	var wg sync.WaitGroup
	errs := make([]error, len(j.workers))
	for rank, w := range j.workers {
		if w != nil {
			wg.Go(func() { errs[rank] = f(rank) })
		}
	}
	wg.Wait()
	return errs
}

// each is outcomes where none may fail.
func (j *job) each(f func(rank int) error) {
	j.t.Helper()
	for rank, err := range j.outcomes(f) {
		if err != nil {
			j.t.Fatalf("rank %d: %v", rank, err)
		}
	}
}

// sum is the allreduce of n bytes under a name, in place: all ones, so that the result counts the ranks.
func sum(name string, n int) worker.Op {
	buf := make([]byte, n)
	for i := range buf {
		buf[i] = 1
	}
	return worker.Op{Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Shape: []int64{int64(n)}, Input: buf, Output: buf, Name: name}
}

// works checks that all ranks can do a sum of n bytes under a name.
func (j *job) works(name string, n int) {
	j.t.Helper()
	j.each(func(rank int) error { return j.sums(rank, name, n) })
}

func (j *job) sums(rank int, name string, n int) error {
	op := sum(name, n)
	if _, err := j.do(rank, op); err != nil {
		return err
	}
	for i, v := range op.Output {
		if int(v) != len(j.workers) {
			return fmt.Errorf("element %d of %q is %d, want %d", i, name, v, len(j.workers))
		}
	}
	return nil
}

func TestTheSizeOfPartitionsFollowsTheServersWhereNoSettingSaysIt(t *testing.T) {
	unset := with(func(s *settings.Settings) { s.PartitionBytes = 0 })
	for _, c := range []struct {
		name string
		job  *job
		want int64
	}{
		{"embedded servers", startJob(t, 1, unset), 4 << 20},
		{"dedicated servers", startJob(t, 1, unset, dedicated(1)), 256 << 10},
		{"a setting", startJob(t, 1, smallPartitions, dedicated(1)), partition},
	} {
		if got := c.job.workers[0].Settings.PartitionBytes; got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.name, got, c.want)
		}
	}
}
