// Package jobtest runs whole jobs in one process, over real sockets, or in virtual time over the twin of a network. Its
// tests hold what a job guarantees: results, agreement of ranks, behaviour under faults.
//
// A test starts a Job with Options, has its ranks do operations (operations.go) or use held values (values.go,
// groups.go), and may play a rank itself (raw.go) or start the nodes as processes and hosts that it kills and cuts off
// (process.go, fleet.go, hosts.go).
package jobtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// Hang is the longest wait of a test before it reports a hang.
const Hang = 30 * time.Second

// Secret is the job secret of tests.
const Secret = "a secret for this test only"

// Job is a whole job in one process: a scheduler, n workers and, where asked for, dedicated servers. It ends with its
// test.
type Job struct {
	T         testing.TB
	Settings  settings.Settings // of every process of the job but for its rank
	Log       *zap.Logger       // of the workers
	ServerLog *zap.Logger       // of dedicated servers and the scheduler
	Scheduler *node.Scheduler
	Workers   []*node.Worker            // by rank; nil where none runs or the test itself plays the rank
	Alloc     func(rank, n int) []byte  // memory for outputs whose size only a worker's engine knows; nil for Go's
	Tuned     func(rank int, over bool) // told of a worker's search (node.Options.Tuned); may be nil

	host       func(rank int) string         // of a worker; nil for one host
	over       func(rank int) *transport.Set // of a worker; -1: of servers and the scheduler
	overServer func(i int) *transport.Set    // of a dedicated server; nil for over
	leaving    sync.WaitGroup

	mu          sync.Mutex
	stopServers []func() // each ends one dedicated server
}

// Start starts a job of n workers.
func Start(t testing.TB, n int, options ...Option) *Job {
	t.Helper()
	j := New(t, n, options...)
	j.Start()
	return j
}

// New starts a job of n workers without the workers: the scheduler and the dedicated servers.
func New(t testing.TB, n int, options ...Option) *Job {
	t.Helper()
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_JOB_SECRET": Secret})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Complete(); err != nil {
		t.Fatal(err)
	}
	s.Size, s.StartTimeout, s.ServerMemory = n, 20*time.Second, 1<<30
	s.PartitionBytes = 4 << 20 // as the engines, for a worker that a test plays
	j := &Job{T: t, Settings: s, Log: zap.NewNop(), ServerLog: zap.NewNop(), Workers: make([]*node.Worker, n)}
	for _, o := range options {
		o(j)
	}
	if j.over == nil {
		kinds, err := node.Transports(&j.Settings, j.Log)
		if err != nil {
			t.Fatal(err)
		}
		j.over = func(int) *transport.Set { return kinds }
	}
	j.StartScheduler("127.0.0.1:0")
	if j.Settings.Servers != "embedded" {
		j.startServers()
	}
	t.Cleanup(j.Shutdown)
	return j
}

// StartScheduler starts a scheduler that listens at an address; New does so, and a test after it has closed that one.
func (j *Job) StartScheduler(listen string) {
	j.T.Helper()
	sched, err := node.StartScheduler(j.Settings, listen, node.Options{Log: j.ServerLog, Transports: j.over(-1)})
	if err != nil {
		j.T.Fatal(err)
	}
	j.T.Cleanup(func() { sched.Close() })
	j.Scheduler, j.Settings.Scheduler = sched, sched.Address
}

func (j *Job) startServers() {
	for range j.Settings.NumServers {
		j.StartServer()
	}
}

// StartServer starts one more dedicated server. It may be called from any goroutine, as StopServer.
func (j *Job) StartServer() {
	j.mu.Lock()
	defer j.mu.Unlock()
	kinds := j.over(-1)
	if j.overServer != nil {
		kinds = j.overServer(len(j.stopServers))
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	s := j.Settings
	s.Role = "server"
	go func() {
		defer close(ended)
		err := node.RunServer(ctx, s, "", node.Options{Log: j.ServerLog, Transports: kinds})
		if givenUp := new(*control.RefusedError); s.Elastic && errors.As(err, givenUp) { // it was lost, and came back
			return
		}
		if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, node.ErrNotEmpty) {
			j.T.Errorf("dedicated server: %v", err)
		}
	}()
	stop := func() { cancel(); <-ended }
	j.stopServers = append(j.stopServers, stop)
	j.T.Cleanup(stop)
}

// Start starts the workers of the given ranks; without any, those of all.
func (j *Job) Start(ranks ...int) {
	j.T.Helper()
	if len(ranks) == 0 {
		ranks = j.All().Ranks
	}
	var wg sync.WaitGroup
	errs := make([]error, len(j.Workers))
	for _, rank := range ranks {
		wg.Go(func() { errs[rank] = j.StartRank(rank) })
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			j.T.Fatalf("rank %d: %v", rank, err)
		}
	}
}

// StartRank starts the worker of one rank. It waits for the others.
func (j *Job) StartRank(rank int) (err error) {
	mine := j.Settings
	mine.Rank, mine.LocalRank, mine.LocalSize = rank, rank, mine.Size
	if j.host != nil {
		mine.Host, mine.LocalRank, mine.LocalSize = j.host(rank), -1, -1
	}
	o := node.Options{Log: j.Log, Transports: j.over(rank)}
	if j.Alloc != nil {
		o.Alloc = func(n int) []byte { return j.Alloc(rank, n) }
	}
	if j.Tuned != nil {
		o.Tuned = func(over bool) { j.Tuned(rank, over) }
	}
	j.Workers[rank], err = node.StartWorker(j.T.Context(), mine, o)
	return err
}

// Shutdown shuts all running workers down and waits for their end.
func (j *Job) Shutdown() {
	for rank := range j.Workers {
		j.Leave(rank)
	}
	j.leaving.Wait()
}

// Leave begins to shut a worker down; its server waits for the others. The channel is closed at its end.
func (j *Job) Leave(rank int) <-chan struct{} {
	left := make(chan struct{})
	w := j.Workers[rank]
	if w == nil {
		close(left)
		return left
	}
	j.Workers[rank] = nil
	j.leaving.Go(func() {
		defer close(left)
		w.Shutdown()
	})
	return left
}

// StopServer ends a dedicated server.
func (j *Job) StopServer(i int) {
	j.mu.Lock()
	stop := j.stopServers[i]
	j.mu.Unlock()
	stop()
}

// First is the job of its first n ranks alone.
func (j *Job) First(n int) *Job {
	return &Job{T: j.T, Settings: j.Settings, Log: j.Log, Workers: slices.Clone(j.Workers[:n])}
}

// All is the process set of all ranks.
func (j *Job) All() wire.ProcessSet {
	var s wire.ProcessSet
	for rank := range j.Workers {
		s.Ranks = append(s.Ranks, rank)
	}
	return s
}

// Transports are those of servers and the scheduler.
func (j *Job) Transports() *transport.Set { return j.over(-1) }
