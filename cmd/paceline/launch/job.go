package launch

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
)

// Job is a set of processes that run together. It ends with its workers; servers are stopped then.
type Job struct {
	Workers []*Task
	Servers []*Task

	Start time.Duration // limit for the start of processes on other hosts
	Peers time.Duration // after the first failure, for the others to detect it and end by themselves
	Stop  time.Duration // from one signal to the next, stronger one

	Elastic bool        // the others go on without workers and servers that fail
	Formed  func() bool // whether they have found each other, before which nobody can go on; nil: not known
	News    *inbox      // from the scheduler

	Say func(format string, args ...any) // reports a problem to the user
}

// The default times of a job.
const (
	DefaultPeers = 5 * time.Second
	DefaultStop  = 5 * time.Second
)

// run is a running job. It belongs to the goroutine in Run.
type run struct {
	*Job
	guard *guard
	ends  chan ended
	turns turns
	alive map[*Task]*process

	unburied int // a child that had ended at the last look, and that somebody may wait for

	code    int         // exit code of the whole
	lost    []Failure   // processes without which an elastic job went on
	givenUp []*Task     // that the others have given up, until they are in a later round; they may run
	failed  []Failure   // processes that ended the job
	why     string      // what ended it otherwise
	well    bool        // a worker has ended well
	calm    bool        // no failure and no request to end
	urged   bool        // a signal of the user was forwarded
	stopped bool        // processes were sent a signal: their ends say nothing more
	steps   []step      // to come, in rising strength
	next    *time.Timer // when the first of them is due
}

type ended struct {
	task *Task
	exit Exit
}

// A step towards the job's end.
type step struct {
	after time.Duration
	sig   syscall.Signal
}

// Run starts the job and returns how it went when every process has ended. The exit code is that of the first that
// failed; of an elastic job 0, if a worker has ended well. Signals are forwarded; a second one ends everything at once.
func (j *Job) Run(signals <-chan os.Signal) Report {
	guard, err := newGuard()
	if err != nil {
		j.Say("%v", err)
		return Report{Code: 1, Ranks: len(j.Workers), Lost: []Failure{}, Failed: []Failure{}, Error: err.Error()}
	}
	defer guard.close()
	r := newRun(j, guard)
	r.start(signals)
	late := time.NewTimer(j.Start)
	defer late.Stop()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for len(r.alive) > 0 {
		select {
		case e := <-r.ends:
			r.News.each(r.hear) // what was told before this end
			r.end(e)
		case sig := <-signals:
			r.interrupt(sig.(syscall.Signal))
		case <-j.News.come:
			r.News.each(r.hear)
		case <-late.C:
			r.late()
		case <-tick.C:
			r.bury()
		case <-r.next.C:
			r.step()
		}
	}
	if r.code == 0 && len(r.lost) > 0 {
		r.Say("the job ended well; it lost %s", strings.Join(each.Of(r.lost, func(f Failure) string { return f.Name + " on " + f.Host }), ", "))
	}
	return r.report(len(j.Workers))
}

func (r *run) report(ranks int) Report {
	none := []Failure{} // in JSON a list, not null
	return Report{Code: r.code, Ranks: ranks, Lost: append(none, r.lost...), Failed: append(none, r.failed...), Error: r.why}
}

func newRun(j *Job, guard *guard) *run {
	adopt()
	if j.News == nil {
		j.News = newInbox()
	}
	r := &run{Job: j, guard: guard, ends: make(chan ended), turns: turns{}, alive: map[*Task]*process{}, calm: true, next: time.NewTimer(0)}
	r.next.Stop()
	return r
}

// start starts the processes one after the other, until a signal or a failure.
func (r *run) start(signals <-chan os.Signal) {
	for _, list := range [][]*Task{r.Servers, r.Workers} {
		for _, t := range list {
			select {
			case sig := <-signals:
				r.interrupt(sig.(syscall.Signal))
				return
			default:
			}
			p, err := start(t, r.turns.of(t.Host), func(e Exit) { r.ends <- ended{t, e} })
			if err != nil {
				r.Say("%v", err)
				r.failed = append(r.failed, failure(t, nil, 127, err.Error()))
				r.fail(127, step{0, syscall.SIGTERM}, step{r.Stop, syscall.SIGKILL})
				return
			}
			r.alive[t] = p
			r.watch()
		}
	}
}

// end records the end of a process.
func (r *run) end(e ended) {
	p := r.alive[e.task]
	delete(r.alive, e.task)
	r.watch()
	worker := slices.Contains(r.Workers, e.task)
	r.well = r.well || worker && e.exit.Code == 0
	switch {
	case r.stopped:
	case !r.calm && e.exit.Code != 0:
		r.Say("%s on %s%s %v too", e.task.Name, e.task.Host, pidOf(p), e.exit)
		r.failed = append(r.failed, failure(e.task, p, e.exit.Code, e.exit.String()))
	case !r.calm:
	case r.Elastic && !worker && e.exit.Code == 0 && r.formed(): // it was drained; servers from elsewhere may have its keys
		r.Say("%s on %s%s has left; the job goes on without it", e.task.Name, e.task.Host, pidOf(p))
	case r.goesOn(worker, e.exit):
		provided := ""
		if !worker && !r.runs(r.Servers) {
			provided = " if another server has joined"
		}
		r.Say("%s on %s%s %v; the job goes on without it%s", e.task.Name, e.task.Host, pidOf(p), e.exit, provided)
		r.lost = append(r.lost, failure(e.task, p, e.exit.Code, e.exit.String()))
		if worker {
			r.endServers()
		}
	case e.exit.Code != 0 || !worker:
		r.Say("%s on %s%s %v%s", e.task.Name, e.task.Host, pidOf(p), e.exit, r.others())
		r.failed = append(r.failed, failure(e.task, p, e.exit.Code, e.exit.String()))
		r.fail(max(e.exit.Code, 1), step{r.Peers, syscall.SIGTERM}, step{r.Stop, syscall.SIGKILL})
	default:
		r.endServers()
	}
}

// formed reports whether the processes have found each other, as far as is known.
func (r *run) formed() bool { return r.Formed == nil || r.Formed() }

// goesOn reports whether the job does without a process that has failed.
func (r *run) goesOn(worker bool, exit Exit) bool {
	switch {
	case !r.Elastic || !r.formed():
		return false
	case worker:
		return exit.Code != 0 && (r.worksStill() || r.well)
	}
	return r.Formed != nil || r.runs(r.Servers) // the scheduler decides it, and the workers end where no server is left
}

// hear handles news of the scheduler, as long as nothing ends the job.
func (r *run) hear(n node.News) {
	switch {
	case !r.calm:
	case n.Lost != nil:
		r.goOnWithout(n.Lost)
	default:
		r.next.Stop()
		r.givenUp = slices.DeleteFunc(r.givenUp, func(t *Task) bool { return t.Rank != nil && slices.Contains(n.Began, *t.Rank) })
	}
}

// goOnWithout notes that the others have given a process up. It may be frozen: nobody waits for it where they have ended. A server that was not started here
// is lost for the report at once; any other process with its end.
func (r *run) goOnWithout(n *wire.Node) {
	if n.Role == wire.RoleServer {
		r.goOnWithoutServer(n)
		return
	}
	i := slices.IndexFunc(r.Workers, func(t *Task) bool { return t.Rank != nil && *t.Rank == n.Rank })
	if i < 0 {
		return
	}
	r.givenUp = append(r.givenUp, r.Workers[i])
	r.endServers()
}

func (r *run) goOnWithoutServer(n *wire.Node) {
	i := slices.IndexFunc(r.Servers, func(t *Task) bool {
		return t.Host == n.Host && r.alive[t] != nil && r.alive[t].pid.Load() == int64(n.PID)
	})
	switch {
	case i >= 0:
		r.givenUp = append(r.givenUp, r.Servers[i])
	case !slices.ContainsFunc(r.lost, func(f Failure) bool { return f.Host == n.Host && f.PID == int64(n.PID) }):
		r.lost = append(r.lost, Failure{Name: fmt.Sprintf("server at %v", n.Addresses), Host: n.Host, PID: int64(n.PID), Why: "was lost"})
	}
}

// endServers ends the servers with the last worker. Where those that run were given up, they have the time of Peers to end by themselves.
func (r *run) endServers() {
	switch {
	case r.worksStill():
	case r.runs(r.Workers):
		r.plan(step{r.Peers, syscall.SIGKILL})
	default:
		r.plan(step{0, syscall.SIGTERM}, step{r.Stop, syscall.SIGKILL})
		r.calm = false
	}
}

// stopGivenUp stops what was given up and has not ended: some processes are frozen. The job has failed, unless it is elastic and a worker has ended well.
func (r *run) stopGivenUp(well bool) {
	const why = "was given up by the others, and had not ended when they had"
	for _, t := range r.givenUp {
		p := r.alive[t]
		if p == nil {
			continue
		}
		r.Say("%s on %s%s %s: it is stopped", t.Name, t.Host, pidOf(p), why)
		f := failure(t, p, 128+int(syscall.SIGKILL), why)
		if well {
			r.lost = append(r.lost, f)
		} else {
			r.failed = append(r.failed, f)
			r.code = f.Code
		}
		p.signal(syscall.SIGKILL)
	}
}

// worksStill reports whether a worker runs that was not given up.
func (r *run) worksStill() bool {
	return slices.ContainsFunc(r.Workers, func(t *Task) bool { return r.alive[t] != nil && !slices.Contains(r.givenUp, t) })
}

// runs reports whether one of some processes does.
func (r *run) runs(some []*Task) bool {
	return slices.ContainsFunc(some, func(t *Task) bool { return r.alive[t] != nil })
}

func (r *run) others() string {
	if len(r.alive) == 0 {
		return ""
	}
	return fmt.Sprintf("; the others (%d) are given %v to end, then stopped", len(r.alive), r.Peers)
}

func pidOf(p *process) string {
	if pid := p.pid.Load(); pid > 0 {
		return fmt.Sprintf(" (pid %d)", pid)
	}
	return ""
}

// interrupt forwards a signal of the user; the second one ends the job at once.
func (r *run) interrupt(sig syscall.Signal) {
	again := r.urged
	r.calm, r.urged = false, true
	switch {
	case again:
		for _, p := range r.alive {
			p.hurried.Store(true)
		}
		r.plan(step{0, syscall.SIGKILL})
	case sig == syscall.SIGINT:
		r.plan(step{0, sig}, step{r.Stop, syscall.SIGTERM}, step{r.Stop, syscall.SIGKILL})
	default:
		r.plan(step{0, syscall.SIGTERM}, step{r.Stop, syscall.SIGKILL})
	}
	if r.code == 0 {
		r.code, r.why = interrupted{sig}.code(), interrupted{sig}.Error()
	}
}

// interrupted is a job's end by a signal of the user.
type interrupted struct{ syscall.Signal }

func (i interrupted) code() int { return 128 + int(i.Signal) }

func (i interrupted) Error() string { return fmt.Sprintf("signal %d (%v)", int(i.Signal), i.Signal) }

// late ends the job if a process on another host has not started yet.
func (r *run) late() {
	for t, p := range r.alive {
		if r.calm && p.pid.Load() == 0 {
			why := fmt.Sprintf("does not run after %v: no answer from %q", r.Start, p.cmd.Args)
			r.Say("%s on %s %s", t.Name, t.Host, why)
			r.failed = append(r.failed, failure(t, p, 1, why))
			r.fail(1, step{0, syscall.SIGTERM}, step{r.Stop, syscall.SIGKILL})
		}
	}
}

// fail ends the job with an exit code.
func (r *run) fail(code int, steps ...step) {
	r.code, r.calm = code, false
	r.plan(steps...)
}

func (r *run) plan(steps ...step) {
	r.steps = steps
	if steps[0].after == 0 {
		r.step()
		return
	}
	r.next.Reset(steps[0].after)
}

// step does the first of the steps and waits for the next.
func (r *run) step() {
	if r.calm {
		r.stopGivenUp(r.well && r.Elastic)
		r.steps, r.calm = []step{{0, syscall.SIGTERM}, {r.Stop, syscall.SIGKILL}}, false
	}
	sig := r.steps[0].sig
	r.steps, r.stopped = r.steps[1:], true
	for _, p := range r.alive {
		p.signal(sig)
	}
	r.next.Stop()
	if len(r.steps) > 0 {
		r.next.Reset(r.steps[0].after)
	}
}

func (r *run) watch() { r.guard.watch(maps.Values(r.alive)) }
