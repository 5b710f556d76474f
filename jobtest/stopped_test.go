package jobtest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/jobtest"
)

// The tests in this file stop processes of a job (SIGSTOP): their kernel keeps the connections and goes on acknowledging.

// timeout is the peers' in these tests.
const timeout = 4 * time.Second

var timeouts = []string{"PACELINE_PEER_TIMEOUT=" + timeout.String()}

// target starts a job and says which of its processes is stopped, and what the others call it.
type target func(t *testing.T) (f *jobtest.Fleet, p *jobtest.Process, name string)

var targets = map[string]target{
	"a worker with its server": func(t *testing.T) (*jobtest.Fleet, *jobtest.Process, string) {
		f := jobtest.StartFleet(t, 3, 0, timeouts...)
		return f, f.Workers[1], "worker 1"
	},
	"rank 0 with the scheduler": func(t *testing.T) (*jobtest.Fleet, *jobtest.Process, string) {
		f := jobtest.StartFleetOfWorkers(t, 3, timeouts...)
		return f, f.Workers[0], "worker 0"
	},
	"a worker beside servers": func(t *testing.T) (*jobtest.Fleet, *jobtest.Process, string) {
		f := jobtest.StartFleet(t, 3, 2, timeouts...)
		return f, f.Workers[2], "worker 2"
	},
	"a representative of its host": func(t *testing.T) (*jobtest.Fleet, *jobtest.Process, string) {
		f := jobtest.StartFleet(t, 4, 1, append([]string{jobtest.InPairs}, timeouts...)...)
		return f, f.Workers[1], "worker 1"
	},
	"a dedicated server": func(t *testing.T) (*jobtest.Fleet, *jobtest.Process, string) {
		f := jobtest.StartFleet(t, 2, 2, timeouts...)
		return f, f.Servers[1], "server "
	},
	"a worker without a scheduler": func(t *testing.T) (*jobtest.Fleet, *jobtest.Process, string) {
		f := jobtest.StartFleet(t, 3, 0, timeouts...)
		f.Scheduler.Kill()
		return f, f.Workers[1], "worker 1"
	},
}

func TestAProcessThatIsStoppedForLessThanPeersBearIsNotLost(t *testing.T) {
	t.Parallel() // its time passes without work
	for name, start := range targets {
		if name == "a worker without a scheduler" {
			continue // soon needs new names
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, p, _ := start(t)
			for range 2 {
				p.Stop()
				time.Sleep(timeout / 4) // as crowded as the machine may be; in virtual time it is all that peers bear
				p.Continue()
				f.Steps()
				f.Steps()
			}
		})
	}
}

func TestAProcessThatIsStoppedForLongIsAnErrorOnEverySurvivorAndThenOnItself(t *testing.T) {
	t.Parallel()
	for name, start := range targets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, p, lost := start(t)
			p.Stop()
			for rank, w := range f.Workers {
				if w == p {
					f.Workers[rank] = nil
				}
			}
			f.Fails(lost)
			p.Continue()
			if !strings.HasPrefix(lost, "worker") {
				return // a server serves the next round
			}
			if err := p.Failure(); !strings.Contains(err, "peer lost") || !strings.Contains(err, "gradient") || !strings.Contains(err, lost) {
				t.Errorf("the process that was stopped: %q", err)
			}
		})
	}
}

func TestASchedulerThatIsStoppedIsNotNoticedHoweverLong(t *testing.T) {
	t.Parallel()
	for _, long := range []time.Duration{timeout / 2, 3 * timeout} {
		t.Run(fmt.Sprint(long), func(t *testing.T) {
			t.Parallel()
			f := jobtest.StartFleet(t, 3, 1, timeouts...)
			f.Scheduler.Stop()
			time.Sleep(long) // of real processes: how long it is stopped is what the test is about
			f.Scheduler.Continue()
			for range 3 { // with new tensors
				f.Steps()
			}
		})
	}
}

// TestAProcessThatIsKilledOrStoppedInAPhaseHoldsNobody: the others end in bounded time, with an error that names it or, where they do not
// need it, well; and so does a worker that runs again. One that is stopped for a while costs nobody anything.
func TestAProcessThatIsKilledOrStoppedInAPhaseHoldsNobody(t *testing.T) {
	t.Parallel()
	for _, fate := range []string{"killed", "stopped", "stopped for a while"} {
		for _, c := range []struct {
			node, phase string
			want        string // of the others' error
		}{
			{"worker", "init", "rank 1 of 3"},
			{"rank 0 with the scheduler", "init", "127.0.0.1:"},
			{"server", "init", "1 of 2 servers"},
			{"scheduler", "init", "127.0.0.1:"},
			{"worker", "join", "worker 1"},
			{"rank 0 with the scheduler", "join", "worker 0"},
			{"server", "join", "server "},
			{"scheduler", "join", ""},
			{"worker", "shutdown", ""},
			{"rank 0 with the scheduler", "shutdown", ""},
			{"server", "shutdown", ""},
			{"scheduler", "shutdown", ""},
		} {
			t.Run(fmt.Sprintf("%s %s at %s", c.node, fate, c.phase), func(t *testing.T) {
				t.Parallel()
				env := timeouts
				if fate == "stopped for a while" {
					c.want = ""
				} else if c.phase == "init" { // only there it passes
					env = append(slices.Clone(timeouts), "PACELINE_START_TIMEOUT=10s")
				}
				f, p := phasedFleet(t, c.node, env)
				for _, phase := range []string{"init", "join", "shutdown"} {
					if f.At(phase); phase == c.phase {
						break
					}
					f.Release(phase, nil)
				}
				if fate == "killed" {
					p.Kill()
				} else {
					p.Stop()
				}
				f.Release(c.phase, p)
				if fate == "stopped for a while" {
					time.Sleep(timeout / 4) // as crowded as the machine may be; in virtual time it is all that peers bear
					p.Continue()
					if p != f.Scheduler && !(c.node == "server" && c.phase != "init") {
						p.Release()
					}
				}
				for rank, w := range f.Workers {
					switch {
					case w == p && fate != "stopped for a while":
					case c.want != "" || c.phase == "shutdown":
						if err := w.Failure(); !strings.Contains(err, c.want) || (err == "") != (c.want == "") {
							t.Errorf("rank %d: %q, want %q", rank, err, c.want)
						}
					default:
						w.Says("at ") // the next phase
					}
				}
				if fate != "stopped" || !slices.Contains(f.Workers, p) {
					return
				}
				p.Continue()
				p.Release()
				if err := p.Failure(); strings.HasPrefix(err, "nothing within") {
					t.Errorf("the worker that was stopped: %s", err)
				}
			})
		}
	}
}

// phasedFleet starts a fleet that waits in phases, and gives one of its processes by its role.
func phasedFleet(t *testing.T, node string, env []string) (f *jobtest.Fleet, p *jobtest.Process) {
	switch node {
	case "rank 0 with the scheduler":
		f = jobtest.StartPhasedFleetOfWorkers(t, 3, env...)
		return f, f.Workers[0]
	case "server":
		f = jobtest.StartPhasedFleet(t, 3, 2, env...)
		return f, f.Servers[1]
	}
	f = jobtest.StartPhasedFleet(t, 3, 0, env...)
	if node == "scheduler" {
		return f, f.Scheduler
	}
	return f, f.Workers[1]
}
