package jobtest

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

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

	serversFind string // the variable by which dedicated servers find a scheduler that is in rank 0
	other       string // at which MoveScheduler starts the next one
	startServer func() *Process
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

// StartPhasedFleetOfWorkers is StartPhasedFleet with the scheduler in rank 0.
func StartPhasedFleetOfWorkers(t testing.TB, workers int, env ...string) *Fleet {
	t.Helper()
	return LaunchFleetOfWorkers(t, workers, 0, append(slices.Clone(env), phased+"=1")...)
}

// StartFleetOfTwoAddresses is StartFleet with a scheduler that MoveScheduler moves.
func StartFleetOfTwoAddresses(t testing.TB, workers, servers int, env ...string) *Fleet {
	t.Helper()
	f := &Fleet{t: t, env: env, address: freeAddress(t), other: freeAddress(t)}
	both := f.other + "," + f.address // nodes that start find the second
	f.startScheduler(f.address)
	f.start(workers, servers, append(env, "PACELINE_SCHEDULER="+both))
	f.Steps()
	return f
}

// MoveScheduler starts a scheduler at the other address, after the end of the one that runs.
func (f *Fleet) MoveScheduler(end func(*Process)) {
	f.t.Helper()
	end(f.Scheduler)
	f.address, f.other = f.other, f.address
	f.startScheduler(f.address)
}

// freeAddress is one of this host at which nobody listens.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
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
		p.Says("at " + phase)
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
	f := LaunchFleetOfWorkers(t, workers, 0, env...)
	f.Steps()
	return f
}

// LaunchFleetOfWorkers is StartFleetOfWorkers without the wait, and with dedicated servers.
func LaunchFleetOfWorkers(t testing.TB, workers, servers int, env ...string) *Fleet {
	t.Helper()
	address := freeAddress(t)
	_, port, _ := net.SplitHostPort(address)
	f := &Fleet{t: t, serversFind: "PACELINE_SCHEDULER=" + address}
	f.start(workers, servers, append(env, "MASTER_ADDR=127.0.0.1", "PACELINE_PORT="+port))
	return f
}

func (f *Fleet) start(workers, servers int, common []string) {
	t := f.t
	t.Helper()
	common = append(common, fmt.Sprint("PACELINE_SIZE=", workers), fmt.Sprint("PACELINE_NUM_SERVERS=", servers))
	if servers > 0 {
		common = append(common, "PACELINE_SERVERS=dedicated")
	}
	f.startServer = func() *Process { return startProcess(t, nil, "server", append(slices.Clone(common), f.serversFind)...) }
	for range servers {
		f.AddServer()
	}
	for rank := range workers {
		env := append(slices.Clone(common), fmt.Sprint("PACELINE_RANK=", rank))
		if slices.Contains(common, InPairs) {
			env = append(env, "PACELINE_HOST="+pairOf(rank))
		}
		f.Workers = append(f.Workers, startProcess(t, nil, "worker", env...))
	}
}

// AddServer starts one more dedicated server, of Hosts on the next host.
func (f *Fleet) AddServer() { f.Servers = append(f.Servers, f.startServer()) }

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
	f.address = strings.TrimPrefix(f.Scheduler.Says("listens"), "listens ")
}

// Steps waits until every worker has made progress.
func (f *Fleet) Steps() {
	f.t.Helper()
	for _, w := range f.Workers {
		w.Says("step")
	}
}

// Fails waits until all workers that are left have ended with an error that names a node.
func (f *Fleet) Fails(node string) {
	f.t.Helper()
	var wg sync.WaitGroup
	for rank, w := range f.Workers {
		if w != nil {
			wg.Go(func() {
				if err := w.Failure(); !strings.Contains(err, worker.ErrPeerLost.Error()) || !strings.Contains(err, node) {
					f.t.Errorf("rank %d: %q, want %s lost", rank, err, node)
				}
			})
		}
	}
	wg.Wait()
}
