package jobtest

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// Fleet is a job of processes.
type Fleet struct {
	Scheduler *Process
	Servers   []*Process
	Workers   []*Process // by rank; nil for one that the test has ended

	t       testing.TB
	before  []string // what starts the scheduler's process elsewhere than here
	env     []string
	address string // of the scheduler
}

// StartFleet starts a job of processes on this host, and waits until it trains.
func StartFleet(t testing.TB, workers, servers int, env ...string) *Fleet {
	t.Helper()
	f := LaunchFleet(t, workers, servers, env...)
	f.Steps()
	return f
}

// LaunchFleet is StartFleet without the wait.
func LaunchFleet(t testing.TB, workers, servers int, env ...string) *Fleet {
	t.Helper()
	f := &Fleet{t: t, env: env}
	f.startScheduler("127.0.0.1:0")
	f.start(workers, servers, append(env, "PACELINE_SCHEDULER="+f.address))
	return f
}

// StartPhasedFleet starts a job whose nodes wait at each phase, the first time before init.
func StartPhasedFleet(t testing.TB, workers, servers int, env ...string) *Fleet {
	t.Helper()
	f := &Fleet{t: t, env: env}
	f.startScheduler("127.0.0.1:0")
	f.start(workers, servers, append(env, "PACELINE_SCHEDULER="+f.address, phased+"=1"))
	return f
}

// Settings are those by which an observer reaches the fleet's scheduler.
func (f *Fleet) Settings() settings.Settings {
	f.t.Helper()
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_ROLE": "server", "PACELINE_SCHEDULER": f.address, "PACELINE_JOB_SECRET": Secret})
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

// At waits until all workers, before init the servers too, are at a phase.
func (f *Fleet) At(phase string) {
	f.t.Helper()
	for _, p := range f.waiting(phase) {
		p.Says("at "+phase, Hang)
	}
}

// Release lets those go on that At has waited for, but one.
func (f *Fleet) Release(phase string, but *Process) {
	for _, p := range f.waiting(phase) {
		if p != but {
			p.Release()
		}
	}
}

func (f *Fleet) waiting(phase string) []*Process {
	if phase == "init" {
		return slices.Concat(f.Servers, f.Workers)
	}
	return f.Workers
}

// StartFleetOfWorkers is StartFleet with the scheduler in rank 0, as launchers other than Paceline's own start a job.
func StartFleetOfWorkers(t testing.TB, workers int, env ...string) *Fleet {
	t.Helper()
	f := &Fleet{t: t}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	f.start(workers, 0, append(env, fmt.Sprint("PACELINE_PORT=", port), fmt.Sprint("PACELINE_LOCAL_SIZE=", workers)))
	f.Steps()
	return f
}

func (f *Fleet) start(workers, servers int, common []string) {
	t := f.t
	t.Helper()
	common = append(common, fmt.Sprint("PACELINE_SIZE=", workers), fmt.Sprint("PACELINE_NUM_SERVERS=", servers))
	if servers > 0 {
		common = append(common, "PACELINE_SERVERS=dedicated")
	}
	for range servers {
		f.Servers = append(f.Servers, startProcess(t, nil, "server", common...))
	}
	for rank := range workers {
		env := append(slices.Clone(common), fmt.Sprint("PACELINE_RANK=", rank))
		if slices.Contains(common, InPairs) {
			env = append(env, "PACELINE_HOST="+pairOf(rank))
		}
		f.Workers = append(f.Workers, startProcess(t, nil, "worker", env...))
	}
}

// InPairs has two workers of a fleet on each host, and none beside the servers.
const InPairs = "PACELINE_TEST_IN_PAIRS=1"

// RestartScheduler kills the scheduler and starts another at its address.
func (f *Fleet) RestartScheduler() {
	f.t.Helper()
	f.Scheduler.Kill()
	f.startScheduler(f.address)
}

func (f *Fleet) startScheduler(address string) {
	f.t.Helper()
	f.Scheduler = startProcess(f.t, f.before, "scheduler", append(slices.Clone(f.env), listenAt+"="+address)...)
	f.address = strings.TrimPrefix(f.Scheduler.Says("listens", Hang), "listens ")
}

// Steps waits until every worker has made progress.
func (f *Fleet) Steps() {
	f.t.Helper()
	for _, w := range f.Workers {
		w.Says("step", Hang)
	}
}

// Fails waits until all workers that are left have ended with an error that names a node.
func (f *Fleet) Fails(within time.Duration, node string) {
	f.t.Helper()
	var wg sync.WaitGroup
	for rank, w := range f.Workers {
		if w != nil {
			wg.Go(func() {
				if err := w.Failure(within); !strings.Contains(err, worker.ErrPeerLost.Error()) || !strings.Contains(err, node) {
					f.t.Errorf("rank %d: %q, want %s lost", rank, err, node)
				}
			})
		}
	}
	wg.Wait()
}
