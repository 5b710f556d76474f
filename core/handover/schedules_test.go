package handover

import (
	"cmp"
	"container/heap"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomSchedules plays whole jobs in virtual time: workers push and servers sum, while processes are killed, cut off, drained,
// join and leave, and messages are late, out of order and repeated. It checks, for every seed:
//
//   - each iteration of each key has one result on all survivors;
//   - that has the push of every survivor that takes part in it, of nobody two, and of no other iteration;
//   - every operation ends.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, 1, 1000, func(seed uint64) error { run(t, seed); return nil })
}

const (
	target = 12 // iterations of each key
	tick   = 20 // mean time of a message, and between two iterations of a worker
)

// process is a worker, a server, or both.
type process struct {
	id      uint64
	pusher  *Pusher
	keeper  *Keeper
	dead    bool // it neither sends nor receives
	cut     bool // it does not hear from the scheduler, nor that from it
	lost    bool // it was declared lost
	results map[string]string
}

// world is one schedule.
type world struct {
	*testing.T
	*rand.Rand
	now     int
	queue   events
	ballot  *Ballot
	all     map[uint64]*process
	pending map[uint64][]Message // for processes that have no commit yet
	born    map[uint64]*Commit
	next    uint64
	over    bool
}

type event struct {
	at, seq int
	do      func()
}

type events struct {
	list []event
	seq  int
}

func (e *events) Len() int { return len(e.list) }
func (e *events) Less(i, j int) bool {
	a, b := e.list[i], e.list[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}
func (e *events) Swap(i, j int) { e.list[i], e.list[j] = e.list[j], e.list[i] }
func (e *events) Push(x any)    { e.list = append(e.list, x.(event)) }
func (e *events) Pop() any {
	last := e.list[len(e.list)-1]
	e.list = e.list[:len(e.list)-1]
	return last
}

func (w *world) after(delay int, do func()) {
	w.queue.seq++
	heap.Push(&w.queue, event{w.now + delay, w.queue.seq, do})
}

func (k Key) compare(l Key) int {
	return cmp.Or(cmp.Compare(k.Tensor, l.Tensor), cmp.Compare(k.Part, l.Part))
}

// run panics where a check fails.
func run(t *testing.T, seed uint64) {
	w := &world{T: t, Rand: rand.New(rand.NewPCG(seed, 7)), all: map[uint64]*process{}, pending: map[uint64][]Message{}, born: map[uint64]*Commit{}}
	w.found()
	for range w.IntN(5) {
		w.after(w.IntN(target*tick*6), w.fault)
	}
	for w.queue.Len() > 0 && !w.over {
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.do()
		if w.queue.seq > 100_000 {
			break // somebody waits for ever: check says who
		}
	}
	if !w.over {
		w.check()
	}
}

func (w *world) fail(format string, args ...any) {
	panic(fmt.Errorf("time %d: %w", w.now, fmt.Errorf(format, args...)))
}

func (w *world) log(format string, args ...any) {
	if schedules.Alone() {
		w.Logf("%5d %s", w.now, fmt.Sprintf(format, args...))
	}
}

func (w *world) node(server bool) membership.Node {
	w.next++
	n := membership.Node{Incarnation: w.next}
	if server {
		n.Addresses = address.List{{Kind: "tcp", At: fmt.Sprint("h:", w.next)}}
	}
	return n
}

// found begins with two to four workers, some with servers, and one to three dedicated servers.
func (w *world) found() {
	var nodes, dedicated []membership.Node
	for range 2 + w.IntN(3) {
		nodes = append(nodes, w.node(w.IntN(2) == 0))
	}
	for range 1 + w.IntN(3) {
		dedicated = append(dedicated, w.node(true))
	}
	e, err := membership.Found(1, []string{"round-robin", "eps"}[w.IntN(2)], nodes, dedicated)
	if err != nil {
		w.fail("%v", err)
	}
	d, err := membership.NewDealer(e)
	if err != nil {
		w.fail("%v", err)
	}
	d.Place([]*membership.Tensor{
		{Number: 1, Name: membership.Name{Name: "a"}, Parts: []uint32{8, 8}}, {Number: 2, Name: membership.Name{Name: "b"}, Parts: []uint32{8}},
	})
	w.ballot = NewBallot(e)
	for _, p := range slices.Sorted(maps.Keys(incarnations(e))) {
		w.begin(p, w.ballot.Last())
	}
}

// begin starts a process with the commit in which it joins.
func (w *world) begin(id uint64, c *Commit) {
	p := &process{id: id, results: map[string]string{}}
	for i := range c.Epoch.Workers {
		if c.Epoch.Workers[i].State == membership.Live && c.Epoch.Workers[i].Incarnation == id {
			p.pusher = NewPusher(id, c)
		}
	}
	for i := range c.Epoch.Servers {
		if c.Epoch.Servers[i].State != membership.Gone && c.Epoch.Servers[i].Incarnation == id {
			p.keeper = NewKeeper(id, c, sum)
		}
	}
	w.all[id] = p
	if p.pusher != nil {
		for _, k := range slices.SortedFunc(maps.Keys(p.pusher.keys), Key.compare) {
			w.after(w.IntN(tick), func() { w.work(p, k) })
		}
	}
	for _, m := range w.pending[id] {
		w.receive(m)
	}
	delete(w.pending, id)
}

// sum writes down what was added.
func sum(pushes map[uint64]any) any {
	var all []string
	for _, rank := range slices.Sorted(maps.Keys(pushes)) {
		all = append(all, fmt.Sprintf("%d:%v", rank, pushes[rank]))
	}
	return strings.Join(all, " ")
}

// work pushes a worker's next iteration of a key when it can.
func (w *world) work(p *process, k Key) {
	if s := p.pusher.keys[k]; p.dead || p.lost || s.Results >= target {
		return
	} else if m, ok := p.pusher.Begin(k, fmt.Sprint(s.Results)); ok {
		w.send(m)
	}
	w.after(1+w.IntN(tick), func() { w.work(p, k) })
}

// send delivers a message late, and sometimes twice.
func (w *world) send(all ...Message) {
	slices.SortStableFunc(all, func(a, b Message) int { // machines go through maps, and a seed has to repeat
		return cmp.Or(cmp.Compare(a.To, b.To), cmp.Compare(a.Kind, b.Kind), a.Key.compare(b.Key), cmp.Compare(a.Iteration, b.Iteration))
	})
	for _, m := range all {
		for range 1 + w.IntN(8)/7 {
			delay := 1 + w.IntN(tick)
			if w.IntN(20) == 0 {
				delay += w.IntN(10 * tick) // the network is cut for a while
			}
			w.after(delay, func() { w.receive(m) })
		}
	}
}

func (w *world) receive(m Message) {
	if m.From != 0 && w.all[m.From].dead && w.IntN(2) == 0 {
		return // it was not whole
	}
	switch p := w.all[m.To]; {
	case m.To == 0:
		if !w.all[m.From].cut {
			w.send(w.commits(w.ballot.Reported(m))...)
		}
	case p == nil && m.Kind == Committed && w.born[m.To] == m.Commit:
		w.begin(m.To, m.Commit)
	case p == nil:
		w.pending[m.To] = append(w.pending[m.To], m)
	case p.dead || p.cut && m.From == 0:
	default:
		w.deliver(p, m)
	}
}

// commits notes the first commit of each process.
func (w *world) commits(out []Message) []Message {
	for _, m := range out {
		if m.Kind == Committed && w.all[m.To] == nil && w.born[m.To] == nil {
			w.born[m.To] = m.Commit
		}
		if m.Kind == Committed {
			w.log("commit %d to %d, inherited %v, routes %v", m.Epoch, m.To, m.Commit.Inherited, m.Commit.Routes)
		}
	}
	return out
}

func (w *world) deliver(p *process, m Message) {
	if m.Kind != Prepare && m.Kind != Committed {
		w.log("%d to %d: %s of epoch %d, %v iteration %d: %v %+v", m.From, m.To, kinds[m.Kind], m.Epoch, m.Key, m.Iteration, m.Payload, m.State)
	}
	var out, results []Message
	if p.pusher != nil {
		out, results = p.pusher.Receive(m)
	}
	if p.keeper != nil {
		out = append(out, p.keeper.Receive(m)...)
	}
	for _, r := range results {
		name := fmt.Sprint(r.Key, r.Iteration)
		if p.results[name] != "" {
			w.fail("process %d gets %s twice", p.id, name)
		}
		p.results[name] = r.Payload.(string)
	}
	w.send(together(out)...)
}

var kinds = [...]string{"prepare", "prepared", "committed", "push", "refused", "result", "resume"}

// together makes one report of a process's worker and its server.
func together(all []Message) (out []Message) {
	report := -1
	for _, m := range all {
		switch {
		case m.Kind != Prepared:
			out = append(out, m)
		case report < 0:
			report = len(out)
			out = append(out, m)
		default:
			for k, n := range m.Counts {
				out[report].Counts[k] = max(out[report].Counts[k], n)
			}
			if m.Results != nil {
				out[report].Results = m.Results
			}
		}
	}
	return out
}

// fault is something that happens to the members.
func (w *world) fault() {
	ids := slices.Sorted(maps.Keys(w.all))
	p := w.all[ids[w.IntN(len(ids))]]
	switch w.IntN(6) {
	case 0, 1:
		w.lose(p, w.IntN(3) == 0)
	case 2:
		w.propose(membership.Change{Servers: []membership.Node{w.node(true)}})
	case 3:
		w.propose(membership.Change{Workers: []membership.Node{w.node(w.IntN(2) == 0)}})
	default:
		w.drain(p)
	}
}

// lose kills a process, or cuts it off: then it goes on, and does not know that it is lost. The scheduler learns of it later.
func (w *world) lose(p *process, cut bool) {
	workers, servers := 0, 0
	for _, q := range w.all {
		if q != p && !q.dead && !q.cut {
			if q.pusher != nil {
				workers++
			}
			if at := w.server(q.id); at >= 0 && w.ballot.epoch.Servers[at].State == membership.Live {
				servers++
			}
		}
	}
	if p.dead || p.cut || workers == 0 || servers == 0 {
		return
	}
	w.log("process %d is lost, cut off %t", p.id, cut)
	p.dead, p.cut = !cut, cut
	w.after(w.IntN(5*tick), func() { w.declare(p) })
}

func (w *world) declare(p *process) {
	e := w.ballot.epoch
	l := membership.Loss{Why: "gone"}
	if at := w.server(p.id); at >= 0 {
		l.Member = membership.Member{Role: membership.ServerRole, Number: at}
	}
	for rank := range e.Workers {
		if e.Workers[rank].State == membership.Live && e.Workers[rank].Incarnation == p.id {
			l.Member = membership.Member{Role: membership.WorkerRole, Number: rank}
		}
	}
	if !incarnations(e)[p.id] {
		return // it has left
	}
	p.lost = true
	out, err := w.ballot.Propose(membership.Change{Lose: []membership.Loss{l}})
	if err != nil && w.servers() > 0 {
		w.fail("the loss of %v: %v", l.Member, err)
	}
	w.over = err != nil // the others left before anyone knew of the loss: the job ends
	w.send(w.commits(out)...)
}

// servers counts those of the scheduler's epoch that run.
func (w *world) servers() (n int) {
	for _, s := range w.ballot.epoch.Servers {
		if p := w.all[s.Incarnation]; s.State != membership.Gone && p != nil && !p.dead && !p.cut {
			n++
		}
	}
	return n
}

// server is the index of a process's server in the scheduler's epoch.
func (w *world) server(id uint64) int {
	return slices.IndexFunc(w.ballot.epoch.Servers, func(s membership.Server) bool { return s.State != membership.Gone && s.Incarnation == id })
}

// drain empties a server, and has it leave some time later, whether it is empty or not.
func (w *world) drain(p *process) {
	at := w.server(p.id)
	if at < 0 {
		return
	}
	w.propose(membership.Change{Drain: []int{at}})
	if p.pusher == nil {
		w.after(w.IntN(10*tick), func() {
			if at := w.server(p.id); at >= 0 {
				w.propose(membership.Change{Leave: []membership.Member{{Role: membership.ServerRole, Number: at}}})
			}
		})
	}
}

func (w *world) propose(c membership.Change) {
	out, err := w.ballot.Propose(c)
	w.log("propose %+v: %v", c, err)
	w.send(w.commits(out)...)
}

// check holds what survivors have against the promises.
func (w *world) check() {
	one := map[string]string{}
	members := incarnations(w.ballot.epoch)
	for _, id := range slices.Sorted(maps.Keys(w.all)) {
		p := w.all[id]
		if p.pusher == nil || p.dead || p.lost || !members[id] {
			continue
		}
		for k, s := range p.pusher.keys {
			if s.Results < target {
				w.fail("rank %d waits for iteration %d of %v: %+v; the server is %d", id, s.Results, k, *s, p.pusher.routes.at(k, s.Results))
			}
			for i := s.Start; i < s.Results; i++ {
				name := fmt.Sprint(k, i)
				got := p.results[name]
				if one[name] == "" {
					one[name] = got
				}
				if got != one[name] {
					w.fail("%s is %q on rank %d and %q on another", name, got, id, one[name])
				}
				w.sound(name, got, id, i)
			}
		}
	}
}

// sound checks that a result has a rank's push, each push once, and all of its iteration.
func (w *world) sound(name, got string, rank, iteration uint64) {
	seen := map[string]bool{}
	for part := range strings.FieldsSeq(got) {
		from, of, _ := strings.Cut(part, ":")
		if of != fmt.Sprint(iteration) || seen[from] {
			w.fail("%s is %q", name, got)
		}
		seen[from] = true
	}
	if !seen[fmt.Sprint(rank)] {
		w.fail("%s is %q, without the push of rank %d", name, got, rank)
	}
}
