package jobtest_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/jobtest"
)

var (
	upheavals    = flag.Int("upheavals", 2, "how many seeds TestProcessesComeToGriefAtRandomMoments runs")
	upheavalSeed = flag.Uint64("upheaval", 0, "the first of them: a seed that failed")
)

// A grief is what happens to one process of a job, or to the link of its host. The later in this list, the longer others may wait.
type grief int

const (
	newServer    grief = iota // no grief: another server comes
	drain                     // SIGTERM of one
	sigkill                   //
	newScheduler              // the scheduler: SIGKILL, and another at its address
	shortStop                 // SIGSTOP, and SIGCONT before it is given up
	shortCut                  // its link down, and up again before it is given up
	sigstop                   // for good, or until it was given up
	longCut                   // the same of its link
	griefs                    // how many there are
)

var griefNames = [griefs]string{"comes", "drained", "killed", "scheduler restarted", "stopped for a while", "cut off for a while", "stopped", "cut off"}

// An event is one of them. Several can be at once, and a process has at most one.
type event struct {
	what grief
	host int // a worker's is its rank, a server's comes behind
	step int // of the first survivor
}

// An upheaval is a run of an elastic job on hosts of their own, and what happens to it.
type upheaval struct {
	*jobtest.Means
	servers int     // dedicated ones; 0: each worker has one
	more    int     // that come while it trains
	events  []event // in their order
	moves   bool    // the scheduler is in rank 0, and goes on in others
	backs   bool    // what was stopped or cut off comes back after it was given up
	apart   bool    // each process has a host of its own; else they share memory
}

const upheavalSteps = 60

// hold is how long what is short lasts: far less than the peers' timeout, and long enough for everybody to wait.
const hold = 300 * time.Millisecond

// drawUpheaval never takes the last worker or the last server. Links are cut only between processes that are apart.
func drawUpheaval(seed uint64, apart bool) *upheaval {
	random := rand.New(rand.NewPCG(seed, 14))
	ranks, servers := 2+random.IntN(3), random.IntN(4)
	over := servers
	if servers == 0 {
		over = ranks
	}
	u := &upheaval{Means: jobtest.NewMeans(random, ranks, 20000+random.IntN(60000), upheavalSteps, over), servers: servers, apart: apart, backs: random.IntN(2) == 0}
	u.Heirs, u.Lost = true, u.Lost[:random.IntN(len(u.Lost)+1)]
	u.moves = random.IntN(2) == 0
	add := func(host int, of ...grief) {
		what := of[random.IntN(len(of))]
		switch {
		case what == longCut && !apart:
			what = sigstop
		case what == shortCut && !apart:
			what = shortStop
		}
		u.events = append(u.events, event{what, host, 1 + random.IntN(upheavalSteps*3/4)})
		if n := len(u.events); n > 1 && random.IntN(3) == 0 {
			u.events[n-1].step = u.events[n-2].step // at once
		}
	}
	for _, rank := range u.Lost {
		if u.moves && 2*(ranks-len(u.Lost)) <= ranks { // the others would not be most, so all have to have ended
			add(rank, sigkill)
			continue
		}
		add(rank, sigkill, sigkill, sigstop, longCut)
	}
	briefly := []int{random.IntN(ranks)}
	if servers > 0 {
		order := random.Perm(servers)
		for _, i := range order[1+random.IntN(servers):] {
			add(ranks+i, drain, drain, sigkill, sigkill, sigstop, longCut)
		}
		briefly = append(briefly, ranks+order[0])
	}
	for _, host := range briefly {
		if !slices.Contains(u.Lost, host) && random.IntN(2) == 0 {
			add(host, shortStop, shortCut)
		}
	}
	if !u.moves && random.IntN(3) == 0 {
		add(-1, newScheduler)
	}
	if random.IntN(2) == 0 {
		u.more = 1 + random.IntN(2)
	}
	step := 1
	for i := range u.more {
		host := ranks + servers + i
		step += random.IntN(upheavalSteps / 5)
		u.events = append(u.events, event{newServer, host, step})
		if servers > 0 && random.IntN(2) == 0 {
			u.events = append(u.events, event{[]grief{drain, sigkill, sigstop}[random.IntN(3)], host, step + 1 + random.IntN(upheavalSteps/4)})
		}
	}
	if random.IntN(2) == 0 {
		u.Value = []string{"bsp", "ssp:2", "asp"}[random.IntN(3)]
	}
	if random.IntN(2) == 0 {
		u.Codec = []string{"topk:0.1", "int4:block=64,feedback=on", "fp16"}[random.IntN(3)]
	}
	slices.SortStableFunc(u.events, func(a, b event) int { return a.step - b.step })
	return u
}

func (u *upheaval) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d workers, %d servers", u.Ranks, u.servers)
	if u.Value != "" {
		fmt.Fprintf(&b, ", a value under %s", u.Value)
	}
	if u.Codec != "" {
		fmt.Fprintf(&b, ", sums under %s", u.Codec)
	}
	if !u.apart {
		b.WriteString(", on one host")
	}
	if u.moves {
		b.WriteString(", the scheduler in worker 0")
	}
	for _, e := range u.events {
		fmt.Fprintf(&b, "; after step %d ", e.step)
		switch {
		case e.host >= u.Ranks:
			fmt.Fprintf(&b, "server %d ", e.host-u.Ranks)
		case e.host >= 0:
			fmt.Fprintf(&b, "worker %d ", e.host)
		}
		b.WriteString(griefNames[e.what])
	}
	return b.String()
}

// worst is the grief that bounds a survivor's longest step.
func (u *upheaval) worst() (worst grief) {
	for _, e := range u.events {
		worst = max(worst, e.what)
	}
	return worst
}

// TestProcessesComeToGriefAtRandomMoments: workers and servers of an elastic job are killed, stopped, cut from the network or told to leave at random steps,
// several at once or while others pause and the scheduler is restarted, and servers come. All others end well, with the same bits as the reference that has the same
// members, and find what they add to held values there once; who was given up and comes back ends with an error.
func TestProcessesComeToGriefAtRandomMoments(t *testing.T) {
	n := *upheavals
	if race {
		n = min(n, 2)
	}
	var mu sync.Mutex
	pauses := map[grief][]float64{}
	t.Run("", func(t *testing.T) {
		for seed := *upheavalSeed; seed < *upheavalSeed+uint64(n); seed++ {
			t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
				t.Parallel() // most of the time one waits
				together := seed%3 == 2
				u := drawUpheaval(seed, !together && jobtest.CanMakeHosts() == nil)
				longest := u.play(t)
				if t.Failed() {
					t.Logf("%v; again with -upheavals 1 -upheaval %d", u, seed)
				}
				if most := slices.Max(append(longest, 0)); most > timeout.Seconds() {
					t.Logf("a step took %.3f s, longer than the peer timeout: %v", most, u)
				}
				mu.Lock()
				defer mu.Unlock()
				pauses[u.worst()] = append(pauses[u.worst()], longest...)
			})
		}
	})
	for what := range griefs {
		if all := pauses[what]; len(all) > 0 {
			slices.Sort(all)
			t.Logf("the longest step of each of %d survivors, worst grief %q: median %.3f s, p99 %.3f s, most %.3f s", len(all), griefNames[what],
				all[len(all)/2], all[len(all)*99/100], all[len(all)-1])
		}
	}
}

// play runs the job, and returns the longest step of each survivor in seconds.
func (u *upheaval) play(t *testing.T) (longest []float64) {
	var h *jobtest.Hosts
	var f *jobtest.Fleet
	place := "dedicated"
	if u.servers == 0 {
		place = "embedded"
	}
	env := append(u.Env(), "PACELINE_SERVERS="+place, "PACELINE_PEER_TIMEOUT="+timeout.String())
	if u.apart {
		h = jobtest.MakeHosts(t, u.Ranks+u.servers+u.more)
	}
	switch {
	case h != nil && u.moves:
		f = h.LaunchOfWorkers(u.Ranks, u.servers, env...)
	case h != nil:
		f = h.Launch(u.Ranks, u.servers, env...)
	case u.moves:
		f = jobtest.LaunchFleetOfWorkers(t, u.Ranks, u.servers, env...)
	default:
		f = jobtest.LaunchFleet(t, u.Ranks, u.servers, env...)
	}
	events := u.events
	var returns []event // at a step of the first survivor, which it reaches only without the victim
	happen := func(survivor *jobtest.Process, step int) {
		for len(events) > 0 && events[0].step <= step {
			e := events[0]
			events = events[1:]
			began := time.Now()
			befall(f, h, e)
			most := map[grief]time.Duration{shortStop: timeout / 2, shortCut: 2 * hold}[e.what] // TCP sends again after 0.2, 0.6 and 1.4 s, and asks for the address first
			if took := time.Since(began); most > 0 && took > most {
				t.Skipf("%v: what should be for a while, %v, took %v on this machine: the others may have given it up", u, hold, took)
			}
			if u.backs && (e.what == sigstop || e.what == longCut) {
				time.Sleep(hold) // its last step is printed
				returns = append(returns, event{e.what, e.host, step + survivor.Backlog() + 5})
			}
		}
		for len(returns) > 0 && returns[0].step <= step {
			comeBack(t, f, h, returns[0])
			returns = returns[1:]
		}
	}
	first := true
	for rank, w := range f.Workers {
		if slices.Contains(u.Lost, rank) {
			continue
		}
		for more := true; more; {
			line, ok := w.Line()
			if !ok {
				t.Fatalf("%v: rank %d ended without a word", u, rank)
			}
			pause, goesOn, err := u.Heard(rank, line)
			if err != nil {
				t.Fatalf("%v: %v", u, err)
			}
			if more = goesOn; !more {
				longest = append(longest, pause)
			} else if first {
				happen(w, len(u.Results[rank]))
			}
		}
		first = false
	}
	if err := u.Check(); err != nil {
		t.Error(err)
	}
	return longest
}

// befall has an event happen.
func befall(f *jobtest.Fleet, h *jobtest.Hosts, e event) {
	all := slices.Concat(f.Workers, f.Servers)
	switch e.what {
	case newServer:
		f.AddServer()
	case shortStop:
		all[e.host].Stop()
		time.Sleep(hold)
		all[e.host].Continue()
	case shortCut:
		h.Unplug(e.host)
		time.Sleep(hold)
		h.Replug(e.host)
	case newScheduler:
		f.RestartScheduler()
	case drain:
		all[e.host].Terminate()
	case sigkill:
		all[e.host].Kill()
	case sigstop:
		all[e.host].Stop()
	case longCut:
		h.Unplug(e.host)
	}
}

// comeBack has a process that was given up go on.
func comeBack(t *testing.T, f *jobtest.Fleet, h *jobtest.Hosts, e event) {
	all := slices.Concat(f.Workers, f.Servers)
	if e.what == longCut {
		h.Replug(e.host)
	} else {
		all[e.host].Continue()
	}
	if e.host >= len(f.Workers) { // where the job has ended already, a server waits for the next
		return
	}
	if err := all[e.host].Failure(); !strings.HasPrefix(err, "error:") {
		t.Errorf("host %d came back, and ended with %q", e.host, err)
	}
}
