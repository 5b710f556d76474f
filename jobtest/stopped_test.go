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
const timeout = 3 * time.Second

var timeouts = []string{"PACELINE_PEER_TIMEOUT=3s"}

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

func TestAProcessThatIsStoppedForLessThanThePeerTimeoutIsNotLost(t *testing.T) {
	for name, start := range targets {
		if name == "a worker without a scheduler" {
			continue // soon needs new names
		}
		t.Run(name, func(t *testing.T) {
			f, p, _ := start(t)
			for range 2 {
				p.Stop()
				time.Sleep(timeout / 2) // as crowded as the machine may be; in virtual time it is the whole
				p.Continue()
				f.Steps()
				f.Steps()
			}
		})
	}
}

func TestAProcessThatIsStoppedForLongIsAnErrorOnEverySurvivorAndThenOnItself(t *testing.T) {
	for name, start := range targets {
		t.Run(name, func(t *testing.T) {
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
	for _, long := range []time.Duration{timeout / 2, 3 * timeout} {
		t.Run(fmt.Sprint(long), func(t *testing.T) {
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

// TestAProcessThatIsStoppedInAPhaseHoldsNobody: the others end in bounded time, with an error that names it or, where they do not
// need it, well; and so does a worker that runs again.
func TestAProcessThatIsStoppedInAPhaseHoldsNobody(t *testing.T) {
	for _, c := range []struct {
		stopped, phase string
		servers        int
		want           string // of the others' error
	}{
		{"worker", "init", 0, "rank 1 of 3"},
		{"server", "init", 2, "1 of 2 servers"},
		{"scheduler", "init", 0, "127.0.0.1:"},
		{"worker", "join", 0, "worker 1"},
		{"server", "join", 2, "server "},
		{"scheduler", "join", 0, ""},
		{"worker", "shutdown", 0, ""},
		{"server", "shutdown", 2, ""},
		{"scheduler", "shutdown", 0, ""},
	} {
		t.Run(c.stopped+" at "+c.phase, func(t *testing.T) {
			t.Parallel() // their time passes without work
			env := timeouts
			if c.phase == "init" { // only there it passes
				env = append(slices.Clone(timeouts), "PACELINE_START_TIMEOUT=10s")
			}
			f := jobtest.StartPhasedFleet(t, 3, c.servers, env...)
			p := f.Scheduler
			switch c.stopped {
			case "worker":
				p = f.Workers[1]
			case "server":
				p = f.Servers[1]
			}
			for _, phase := range []string{"init", "join", "shutdown"} {
				if f.At(phase); phase == c.phase {
					break
				}
				f.Release(phase, nil)
			}
			p.Stop()
			f.Release(c.phase, p)
			for rank, w := range f.Workers {
				switch {
				case w == p:
				case c.phase == "join" && c.want == "":
					w.Says("at shutdown")
				default:
					if err := w.Failure(); !strings.Contains(err, c.want) || (err == "") != (c.want == "") {
						t.Errorf("rank %d: %q, want %q", rank, err, c.want)
					}
				}
			}
			if c.stopped != "worker" {
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
