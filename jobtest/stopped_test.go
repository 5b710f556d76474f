package jobtest_test

import (
	"fmt"
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
			f.Fails(timeout+5*time.Second, lost)
			p.Continue()
			if !strings.HasPrefix(lost, "worker") {
				return // a server serves the next round
			}
			if err := p.Failure(5 * time.Second); !strings.Contains(err, "peer lost") || !strings.Contains(err, "gradient") || !strings.Contains(err, lost) {
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
