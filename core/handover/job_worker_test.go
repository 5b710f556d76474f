package handover

import (
	"fmt"
	"slices"
	"strings"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/task"
)

// member is a worker.
type member struct {
	rank   int
	dead   bool
	view   *membership.View
	handed map[int]bool // servers whose keys it has handed over to the heirs
	keys   map[keyName]*exchange
	values map[keyName]*use
}

// exchange is a worker's side of a key.
type exchange struct {
	results []string // by iteration
	from    int      // the server of the last one
	at      int      // the server that has the push of the next one
	task    task.State
}

// heard has a worker follow the scheduler, and go over to the heirs of each server that is lost, one after the other.
func (j *elasticJob) heard(w *member, e *membership.Epoch) error {
	if w.dead {
		return nil
	}
	news, err := w.view.Follow(e)
	if err != nil {
		return err
	}
	for _, d := range news.Lost {
		server := d.Number
		if d.Role == membership.WorkerRole {
			if d.Number == w.rank {
				w.dead = true
				return nil
			}
			if server = slices.IndexFunc(e.Servers, func(s membership.Server) bool { return s.Rank == d.Number }); server < 0 {
				continue
			}
		}
		j.flying = append(j.flying, letter{link: link{w.rank, -1}, do: func() error { return j.succeed(w, server, d.Drained) }})
	}
	if news.Moved {
		for _, k := range j.keysOf(w) {
			if x := w.keys[k]; len(x.results) > 0 {
				j.bring(w, k, x)
			}
		}
	}
	return nil
}

// bring supplies the last result of a key to the server that the key has been moved to.
func (j *elasticJob) bring(w *member, k keyName, x *exchange) {
	if to := j.heir(w, k, x.from); to != x.from && !w.handed[x.from] {
		x.from = to
		j.supply(w, k, x)
	}
}

// moved is the word of a server that a key is elsewhere.
func (j *elasticJob) moved(w *member, k keyName, server int, iteration uint64, supply bool) error {
	x := w.keys[k]
	switch {
	case w.dead || w.handed[server]:
		return nil
	case supply:
		if x.from == server && uint64(len(x.results)-1) == iteration {
			x.from = j.heir(w, k, server)
			j.supply(w, k, x)
		}
		return nil
	case x.at != server:
		return nil
	}
	if uint64(len(x.results)) != iteration {
		return fmt.Errorf("rank %d is to bring iteration %d of %v elsewhere; it waits for %d", w.rank, iteration, k, len(x.results))
	}
	if err := x.step(task.Again); err != nil {
		return fmt.Errorf("rank %d, %v: %w", w.rank, k, err)
	}
	x.at = j.heir(w, k, server)
	return j.send(w, k, x)
}

// succeed is Engine.succeed of package worker.
func (j *elasticJob) succeed(w *member, server int, drained bool) error {
	if w.dead {
		return nil
	}
	at := link{w.rank, server}
	for drained { // it has said goodbye behind its last answers
		i := slices.IndexFunc(j.flying, func(l letter) bool { return l.link == at && !l.up })
		if i < 0 {
			break
		}
		l := j.flying[i]
		j.flying = slices.Delete(j.flying, i, i+1)
		if err := l.do(); err != nil {
			return err
		}
	}
	w.handed[server] = true
	j.flying = slices.DeleteFunc(j.flying, func(l letter) bool { return l.link == at && (!l.up || j.IntN(2) == 0) })
	for _, k := range j.keysOf(w) {
		x := w.keys[k]
		if len(x.results) > 0 && x.from == server {
			x.from = j.heir(w, k, server)
			j.supply(w, k, x)
		}
		if x.at == server && len(x.results) < length {
			if j.IntN(3) == 0 { // a part of the answer was there
				for _, e := range []task.Event{task.Arrive, task.BreakOff} {
					if err := x.step(e); err != nil {
						return err
					}
				}
			}
			if err := x.step(task.Again); err != nil {
				return fmt.Errorf("rank %d, %v: %w", w.rank, k, err)
			}
			x.at = j.heir(w, k, server)
			if err := j.send(w, k, x); err != nil {
				return err
			}
		}
	}
	return j.succeedValues(w, server)
}

func (j *elasticJob) keysOf(w *member) []keyName {
	var all []keyName
	for i, t := range j.tensors {
		for part := range t.Parts {
			if k := (keyName{uint32(i + 1), part}); w.keys[k] != nil {
				all = append(all, k)
			}
		}
	}
	return all
}

// heir is the server of a key among those that the worker has not left, where the key's own is this one.
func (j *elasticJob) heir(w *member, k keyName, server int) int {
	return w.view.Now().HeirAmong(j.key(k), server, func(i int) bool { return !w.handed[i] })
}

// whereTo is the server to which a worker sends its next push of a key: where the last one was answered, until that has said that the key is elsewhere.
func (j *elasticJob) whereTo(w *member, k keyName) int {
	x := w.keys[k]
	if len(x.results) > 0 && !w.handed[x.at] {
		return x.at
	}
	return j.heir(w, k, j.tensors[k.tensor-1].Servers[k.part])
}

// push has a worker begin the next iteration of a key.
func (j *elasticJob) push(w *member, k keyName) error {
	x := w.keys[k]
	if len(x.results) == length {
		return nil
	}
	x.at = j.whereTo(w, k)
	x.task = task.New(task.Answered | task.Retained)
	return j.send(w, k, x)
}

func (x *exchange) step(e task.Event) error {
	next, out := x.task.Step(e)
	if out&task.Refused != 0 {
		return fmt.Errorf("%v is refused to an exchange that is %v", e, x.task)
	}
	x.task = next
	return nil
}

func (j *elasticJob) send(w *member, k keyName, x *exchange) error {
	for _, e := range []task.Event{task.Queue, task.Move, task.Sent} {
		if err := x.step(e); err != nil {
			return err
		}
	}
	iteration, s := uint64(len(x.results)), j.servers[x.at]
	j.post(letter{link: link{w.rank, s.index}, up: true, do: func() error { return j.pushed(s, k, w.rank, iteration) }})
	return nil
}

// supply gives the heir of a key the last result.
func (j *elasticJob) supply(w *member, k keyName, x *exchange) {
	s, iteration, result := j.servers[x.from], uint64(len(x.results)-1), x.results[len(x.results)-1]
	j.post(letter{link: link{w.rank, s.index}, up: true, do: func() error { return j.supplied(s, k, w.rank, iteration, result) }})
}

// answered gives a worker a result.
func (j *elasticJob) answered(w *member, k keyName, server int, iteration uint64, result string) error {
	x := w.keys[k]
	if w.dead || w.handed[server] {
		return nil
	}
	if uint64(len(x.results)) != iteration || x.at != server {
		return fmt.Errorf("rank %d gets iteration %d of %v from server %d; it waits for %d from %d", w.rank, iteration, k, server, len(x.results), x.at)
	}
	for _, e := range []task.Event{task.Arrive, task.Answer, task.Confirm} {
		if err := x.step(e); err != nil {
			return err
		}
	}
	if !x.task.Settled() {
		return fmt.Errorf("rank %d has iteration %d of %v, and its exchange is %v", w.rank, iteration, k, x.task)
	}
	x.results, x.from = append(x.results, result), server
	j.bring(w, k, x)
	return j.push(w, k)
}

// has checks a worker's results of a key.
func (w *member) has(k keyName, left []*member) error {
	x := w.keys[k]
	if len(x.results) != length || !x.task.Settled() {
		return fmt.Errorf("it waits for iteration %d of server %d, %v", len(x.results), x.at, x.task)
	}
	for i, result := range x.results {
		if other := left[0].keys[k].results[i]; result != other {
			return fmt.Errorf("iteration %d is %q, and %q on rank %d", i, result, other, left[0].rank)
		}
		pushes := strings.Fields(result)
		if n := len(slices.Compact(slices.Clone(pushes))); n != len(pushes) {
			return fmt.Errorf("iteration %d is %q: a push counts twice", i, result)
		}
		for _, p := range pushes {
			if !strings.HasSuffix(p, fmt.Sprint("/", i)) {
				return fmt.Errorf("iteration %d is %q, with a push of another one", i, result)
			}
		}
		for _, o := range left {
			if !slices.Contains(pushes, fmt.Sprintf("%d/%d", o.rank, i)) {
				return fmt.Errorf("iteration %d is %q, without rank %d", i, result, o.rank)
			}
		}
	}
	return nil
}
