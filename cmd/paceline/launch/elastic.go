package launch

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/paceline/paceline/core/fleet"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
)

// Elastic describes a job whose processes come and go, as horovodrun has it. The processes that survive ask for a place in
// the next round (core/fleet) through the scheduler.
type Elastic struct {
	Min, Max   int              // processes of a round; 0: those of -np, and any number
	Script     string           // command line that prints the hosts; "" where they stay
	Slots      int              // of a host that the script prints without; 0 for 1
	ResetLimit int              // rounds after the first; 0 for any number
	Timeout    time.Duration    // how long the job may be without enough processes
	Cooldown   [2]time.Duration // how long a host gets no new process after its first failure, and at most; 0 for good
}

// placeElastic checks the numbers, and finds the hosts from which the job starts.
func (j *maker) placeElastic(hosts []Host) error {
	e := j.Elastic
	j.discovery = &discovery{Elastic: e}
	e.Min = cmp.Or(e.Min, j.Processes, 1)
	j.Processes = cmp.Or(j.Processes, e.Min)
	switch {
	case j.Scheduler != "":
		return errors.New("--min-np and --host-discovery-script need the launcher's own scheduler: leave --scheduler out")
	case e.Max != 0 && e.Max < e.Min:
		return fmt.Errorf("--max-np %d is less than --min-np %d", e.Max, e.Min)
	case j.Processes < e.Min || e.Max != 0 && j.Processes > e.Max:
		return fmt.Errorf("-np %d does not lie between --min-np %d and --max-np %d", j.Processes, e.Min, cmp.Or(e.Max, limits.MaxRanks))
	case e.Script != "" && (j.Hosts != "" || j.HostFile != ""):
		return errors.New("--host-discovery-script finds the hosts: leave --hosts and --hostfile out")
	case e.Script != "":
		j.listen()
		var err error
		if hosts, err = j.discovery.discoverUntil(j.heard); err != nil {
			return err
		}
	case j.Hosts == "" && j.HostFile == "":
		hosts[0].Slots = max(j.Processes, e.Max)
	}
	e.Max = cmp.Or(e.Max, limits.MaxRanks)
	for name := range (Worker{}).Env() {
		delete(j.Env, name) // a process learns its rank when it asks
	}
	j.hosts = hosts
	var err error
	j.workers, err = Assign(hosts, 0)
	return err
}

// elastic is a running job of changing size. Its fields belong to the goroutine in run.
type elastic struct {
	*run
	maker     *maker
	scheduler *node.Scheduler
	machine   *fleet.Machine
	began     time.Time
	numbers   map[*Task]int
	tasks     map[int]*Task
	asks      chan ask
	quit      chan struct{} // closed at the end of run
	waiting   map[int]ask   // for a place
	watching  map[int]ask   // for news
	news      wire.Seat
	round     uint64
	ranks     int  // of the last round
	finished  bool // a process has come to the end of the training
	late      int  // exit code of one that failed after that
	over      bool // nothing starts any more
	refused   map[string]bool
	slots     map[string]int // of each host, which has at most as many processes
}

// ask is what a process asks.
type ask struct {
	wire.Seat
	answer func(wire.Seat, error)
	since  time.Time
}

// watchTime is how long a question for news waits for them.
const watchTime = 20 * time.Second

func newElastic(j *maker) *elastic {
	return &elastic{
		maker: j, numbers: map[*Task]int{}, tasks: map[int]*Task{}, asks: make(chan ask), quit: make(chan struct{}),
		waiting: map[int]ask{}, watching: map[int]ask{}, refused: map[string]bool{}, slots: map[string]int{},
	}
}

// seats is what the scheduler calls with the questions of processes; nil without an elastic job.
func (e *elastic) seats() func(wire.Seat, func(wire.Seat, error)) {
	if e == nil {
		return nil
	}
	return func(s wire.Seat, answer func(wire.Seat, error)) {
		select {
		case e.asks <- ask{s, answer, time.Now()}:
		case <-e.quit:
			answer(wire.Seat{}, errors.New("the job has ended"))
		}
	}
}

// runJob is Job.Run for a job that changes its size. Its exit code is 0 where the processes that were left came to the end of
// the training, else that of the first that failed.
func (e *elastic) runJob(job *Job, signals <-chan os.Signal) (Report, error) {
	defer close(e.quit)
	guard, err := newGuard()
	if err != nil {
		return Report{}, err
	}
	defer guard.close()
	e.run = newRun(job, guard)
	o := e.maker.Elastic
	e.began = time.Now()
	e.machine = fleet.NewMachine(fleet.Settings{
		First: e.maker.Processes, Min: o.Min, Max: o.Max, ResetLimit: o.ResetLimit, Timeout: o.Timeout,
		Start: job.Start, Cooldown: o.Cooldown, GoesOn: e.maker.settings.Elastic, Warning: e.maker.settings.StallWarning,
	})
	e.start(signals) // of the dedicated servers
	e.over = !e.calm
	found, stop := e.maker.discovery.watch(e.maker.hosts, e.Say)
	defer stop()
	e.scheduler.Advance(1)
	e.step(fleet.Input{Found: true, Hosts: e.usable(e.maker.hosts)})
	due := time.NewTimer(0)
	defer due.Stop()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for e.goes() {
		if at, ok := e.machine.Deadline(); ok {
			due.Reset(max(at-time.Since(e.began), 0))
		}
		select {
		case x := <-e.ends:
			e.News.each(e.hear) // what was told before this end
			e.ended(x)
		case sig := <-signals:
			if !e.urged {
				e.code = 0 // of failures that were made good
			}
			e.interrupt(sig.(syscall.Signal))
		case a := <-e.asks:
			e.asked(a)
		case <-job.News.come:
			e.News.each(e.hear)
		case hosts := <-found:
			e.step(fleet.Input{Found: true, Hosts: e.usable(hosts)})
		case <-due.C:
			e.step(fleet.Input{})
		case <-tick.C:
			e.patience(job.Start)
			e.bury()
		case <-e.next.C:
			e.run.step()
		}
	}
	return e.report(e.ranks), nil
}

// goes reports whether the job has processes, or may get some: none any more once something has ended it.
func (e *elastic) goes() bool {
	if !e.calm && !e.over {
		e.refuse("the job ends")
	}
	return len(e.alive) > 0 || !e.over
}

// refuse has nothing start any more, and tells those who wait for a place why.
func (e *elastic) refuse(why string) {
	e.over = true
	for _, a := range e.waiting {
		a.answer(wire.Seat{}, errors.New(why))
	}
	clear(e.waiting)
}

// usable are the hosts at which processes can run. A scheduler on loopback is reached from this one alone.
func (e *elastic) usable(hosts []Host) []fleet.Host {
	var out []fleet.Host
	host, _, _ := net.SplitHostPort(e.scheduler.Address)
	for _, h := range hosts {
		if iface.IsLoopback(host) && !e.maker.here(h.Name) {
			if !e.refused[h.Name] {
				e.refused[h.Name] = true
				e.Say("%s cannot take part: the scheduler is at %s, where no other host reaches it; give --network-interfaces", h.Name, host)
			}
			continue
		}
		out = append(out, fleet.Host{Name: h.Name, Slots: h.Slots})
		e.slots[h.Name] = min(h.Slots, e.maker.Elastic.Max)
	}
	return out
}

// patience answers those who have asked for news for long, and gives up processes on other hosts that do not start.
func (e *elastic) patience(start time.Duration) {
	for n, w := range e.watching {
		if time.Since(w.since) > watchTime {
			delete(e.watching, n)
			w.answer(e.news, nil)
		}
	}
	for t, p := range e.alive {
		if p.pid.Load() == 0 && time.Since(p.began) > start && !p.late {
			p.late = true
			e.Say("%s on %s does not run after %v: no answer from %q", t.Name, t.Host, start, p.cmd.Args)
			p.signal(syscall.SIGKILL)
		}
	}
}

func (e *elastic) asked(a ask) {
	waits := e.waiting
	if a.Watch {
		waits = e.watching
	}
	if old, ok := waits[a.Process]; ok {
		old.answer(wire.Seat{}, errors.New("the process has asked again"))
		delete(waits, a.Process)
	}
	switch {
	case e.over:
		a.answer(wire.Seat{}, errors.New("the job ends"))
	case a.Watch && e.news.News > a.News:
		a.answer(e.news, nil)
	case a.Watch:
		e.watching[a.Process] = a
	default:
		e.waiting[a.Process] = a
		e.step(fleet.Input{Ask: &fleet.Ask{Process: a.Process, State: a.State, Commits: a.Commits, Skip: a.Skip, Early: a.Early}})
	}
}

// hear handles news of the scheduler.
func (e *elastic) hear(n node.News) {
	if n.Lost != nil && n.Lost.Role == wire.RoleWorker {
		e.step(fleet.Input{Lost: &fleet.Lost{Round: n.Round, Rank: n.Lost.Rank}})
	} else {
		e.run.hear(n)
	}
}

// ended handles the end of a process.
func (e *elastic) ended(x ended) {
	n, worker := e.numbers[x.task]
	if !worker || e.stopped || !e.calm {
		e.end(x)
		return
	}
	p := e.alive[x.task]
	delete(e.alive, x.task)
	delete(e.numbers, x.task)
	delete(e.tasks, n)
	delete(e.waiting, n)
	delete(e.watching, n)
	e.watch()
	switch {
	case p.dismissed:
	case x.exit.Code == 0:
		e.finished = true
	default:
		if e.finished && x.exit.Signal == 0 && x.exit.Code < 128 {
			e.late = cmp.Or(e.late, x.exit.Code) // not a lost rank, but an error at the end
		}
		e.Say("%s on %s%s %v", x.task.Name, x.task.Host, pidOf(p), x.exit)
		e.lost = append(e.lost, failure(x.task, p, x.exit.Code, x.exit.String()))
		e.code = cmp.Or(e.code, x.exit.Code)
	}
	e.step(fleet.Input{Ended: &fleet.Ended{Process: n, OK: x.exit.Code == 0}})
}

// step gives the machine an input and does what it says.
func (e *elastic) step(in fleet.Input) {
	if e.over {
		return
	}
	in.Now = time.Since(e.began)
	for _, o := range e.machine.Step(in) {
		switch {
		case o.Start != nil:
			e.launch(*o.Start)
		case o.Stop != nil:
			e.stop(*o.Stop)
		case o.Dismiss != nil:
			e.dismiss(*o.Dismiss)
		case o.Broken != 0:
			e.scheduler.Advance(o.Broken + 1)
		case o.Round != nil:
			e.seat(o.Round)
		case o.Expect != nil:
			e.expect(o.Expect)
		case o.News != nil:
			e.tell(o.News)
		case o.Say != "":
			e.Say("%s", o.Say)
		case o.Fail != "":
			e.giveUp(o.Fail)
		case o.Done:
			e.done()
		}
	}
}

// launch starts a process. Whether that works, the machine hears as of any process's end.
func (e *elastic) launch(place fleet.Place) {
	n := place.Process
	own := map[string]string{
		"PACELINE_HOST": place.Host, "HOROVOD_HOSTNAME": place.Host, "PACELINE_ELASTIC_PROCESS": strconv.Itoa(n),
		"PACELINE_ELASTIC_TIMEOUT": strconv.FormatFloat(e.maker.Elastic.Timeout.Seconds(), 'f', -1, 64),
	}
	t, err := e.maker.task(fmt.Sprintf("process %d", n), place.Host, e.maker.Command, own, e.slots[place.Host])
	if err == nil {
		err = e.maker.streams(e.maker.console, t, Worker{Rank: n, Size: 1})
	}
	var p *process
	if err == nil {
		if p, err = start(t, e.turns.of(t.Host), func(x Exit) { e.ends <- ended{t, x} }); err != nil {
			t.Stdout.Close()
			t.Stderr.Close()
		}
	}
	if err != nil {
		e.Say("%v", err)
		e.lost = append(e.lost, Failure{Name: fmt.Sprintf("process %d", n), Host: place.Host, Code: 127, Why: err.Error()})
		e.code = cmp.Or(e.code, 127)
		e.step(fleet.Input{Ended: &fleet.Ended{Process: n}})
		return
	}
	e.numbers[t], e.tasks[n], e.alive[t] = n, t, p
	e.watch()
}

func (e *elastic) stop(s fleet.Stop) {
	if t := e.tasks[s.Process]; t != nil {
		e.Say("%s on %s is stopped: %s", t.Name, t.Host, s.Why)
		e.alive[t].dismissed = !s.Hung
		e.alive[t].signal(syscall.SIGKILL)
	}
}

// dismiss tells a process that asked to end. It ends with exit code 0 by itself.
func (e *elastic) dismiss(d fleet.Dismiss) {
	a := e.waiting[d.Process]
	delete(e.waiting, d.Process)
	a.answer(wire.Seat{Why: d.Why}, nil)
	if t := e.tasks[d.Process]; t != nil {
		e.alive[t].dismissed = true
		e.Say("%s on %s ends: %s", t.Name, t.Host, d.Why)
	}
}

// seat gives the members of a round their places.
func (e *elastic) seat(r *fleet.Round) {
	e.scheduler.Advance(r.Number)
	e.ranks = len(r.Members)
	e.maker.workers = assign(r.Members)
	address, err := e.maker.rendezvous()
	if err != nil {
		e.Say("%v", err) // for scripts that use torch.distributed too
	}
	if e.round = r.Number; r.Number > 1 || e.maker.Verbose {
		e.Say("round %d has %d ranks", r.Number, len(r.Members))
	}
	own := map[string]string{"PACELINE_ELASTIC_ROUND": strconv.FormatUint(r.Number, 10)}
	for i, m := range r.Members {
		a := e.waiting[m.Process]
		delete(e.waiting, m.Process)
		a.answer(wire.Seat{Process: m.Process, Env: Merge(e.maker.workers[i].Env(), address, own), Commits: r.Commits, Skip: r.Skip, News: r.News}, nil)
	}
}

// expect tells a process that is not ready yet which place it will probably get.
func (e *elastic) expect(x *fleet.Expect) {
	a := e.waiting[x.Process]
	delete(e.waiting, x.Process)
	rank := slices.IndexFunc(x.Members, func(p fleet.Place) bool { return p.Process == x.Process })
	a.answer(wire.Seat{Process: x.Process, Env: assign(x.Members)[rank].Env(), Early: true}, nil)
}

// assign gives the members of a round, in the order of their ranks, their places. Local ranks follow the slots: a process that starts where another has ended gets
// that one's, and the GPU that it has left.
func assign(members []fleet.Place) []Worker {
	var hosts []Host
	for _, m := range members {
		hosts, _ = addHost(hosts, m.Host, 1)
	}
	workers, _ := Assign(hosts, 0)
	given := slices.Clone(workers)
	for rank, w := range given {
		first, local := rank-w.LocalRank, 0 // those of a host follow each other
		for _, other := range members[first : first+w.LocalSize] {
			if other.Slot < members[rank].Slot {
				local++
			}
		}
		from := given[first+local]
		workers[rank].LocalRank, workers[rank].CrossRank, workers[rank].CrossSize = from.LocalRank, from.CrossRank, from.CrossSize
	}
	return workers
}

func (e *elastic) tell(n *fleet.News) {
	e.news = wire.Seat{News: n.Number, Removed: n.Removed}
	for _, w := range e.watching {
		w.answer(e.news, nil)
	}
	clear(e.watching)
}

// giveUp ends the job as failed.
func (e *elastic) giveUp(why string) {
	e.Say("%s", why)
	e.why = why
	e.refuse(why)
	e.fail(cmp.Or(e.code, 1), step{e.Peers, syscall.SIGTERM}, step{e.Job.Stop, syscall.SIGKILL})
}

// done ends the job well: what failed before was made good by the others.
func (e *elastic) done() {
	e.over, e.code = true, e.late
	e.stopGivenUp(true)
	if len(e.lost) > 0 {
		without := each.Of(e.lost, func(f Failure) string {
			if f.PID == 0 {
				return f.Name + " on " + f.Host
			}
			return fmt.Sprintf("%s on %s (pid %d)", f.Name, f.Host, f.PID)
		})
		e.Say("the training has come to its end without %s", strings.Join(without, ", "))
	}
	e.calm = false                                                      // what was given up is stopped
	e.plan(step{0, syscall.SIGTERM}, step{e.Job.Stop, syscall.SIGKILL}) // of the servers
}
