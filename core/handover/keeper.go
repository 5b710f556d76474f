package handover

import (
	"maps"
	"math"
)

// Keeper is a server's half.
//
// Invariants:
//  1. A push counts once in its iteration, and only if its rank's epoch is the server's.
//  2. An iteration closes when every live rank that takes part in it has pushed; a rank that has gone counts if its push is there.
//  3. A key of a lost server opens when every rank that knew that server has said how far it came. What one of them has received is
//     the result for all.
type Keeper struct {
	self    uint64
	number  uint32
	routes  Routes
	members map[uint64]Member
	keys    map[Key]*key
	late    map[uint32]*Commit
	early   []Message                // of later epochs
	sum     func(map[uint64]any) any // of pushes, by rank
}

// key is one of the server's, or one that may come to it.
type key struct {
	closed    uint64                    // iterations: V
	last      any                       // result of iteration closed-1
	has       bool                      // last is known
	open      map[uint64]map[uint64]any // pushes by iteration and rank
	seen      uint64                    // greatest iteration that was pushed here, plus one
	inherited uint32                    // the epoch in which it came from a lost server
	waiting   map[uint64]bool           // ranks that have not resumed since; nil when it is open
	states    map[uint64]State          // of those that have
}

// NewKeeper makes the half of a server that joins with a commit. sum adds the payloads of pushes, by the incarnations of their
// ranks.
func NewKeeper(self uint64, c *Commit, sum func(map[uint64]any) any) *Keeper {
	s := &Keeper{self: self, keys: map[Key]*key{}, late: map[uint32]*Commit{}, sum: sum}
	for k := range c.Routes {
		s.keys[k] = &key{open: map[uint64]map[uint64]any{}}
	}
	s.enter(c)
	return s
}

// Receive handles a message.
func (s *Keeper) Receive(m Message) []Message {
	switch m.Kind {
	case Prepare:
		return s.report(m.Epoch)
	case Committed:
		return s.commit(m.Commit)
	case Push, Resume:
		switch {
		case m.Epoch > s.number:
			s.early = append(s.early, m)
		case m.Kind == Resume:
			return s.resume(m)
		case m.Epoch < s.number: // a rank that has gone learns from this that it has
			return []Message{{Kind: Refused, From: s.self, To: m.From, Epoch: s.number, Key: m.Key, Iteration: m.Iteration}}
		default:
			return s.push(m)
		}
	}
	return nil
}

func (s *Keeper) report(number uint32) []Message {
	if number <= s.number {
		return nil
	}
	counts := make(map[Key]uint64, len(s.keys))
	for k, v := range s.keys {
		counts[k] = v.seen
	}
	return []Message{{Kind: Prepared, From: s.self, Epoch: number, Counts: counts}}
}

// commit enters the next epochs, in their order.
func (s *Keeper) commit(c *Commit) (out []Message) {
	s.late[c.Epoch.Number] = c
	for s.late[s.number+1] != nil {
		c := s.late[s.number+1]
		delete(s.late, s.number+1)
		out = append(out, s.enter(c)...)
	}
	early := s.early
	s.early = nil
	for _, m := range early {
		out = append(out, s.Receive(m)...)
	}
	return out
}

func (s *Keeper) enter(c *Commit) (out []Message) {
	s.number, s.routes, s.members = c.Epoch.Number, c.Routes, c.Members
	for k, v := range s.keys {
		if c.Inherited[k] && s.routes.now(k) == s.self {
			v.inherited, v.waiting, v.states = s.number, map[uint64]bool{}, map[uint64]State{}
			for w, m := range s.members {
				if m.Epoch < s.number {
					v.waiting[w] = true
				}
			}
		}
		maps.DeleteFunc(v.waiting, func(w uint64, _ bool) bool { return !s.live(w) })
		out = append(out, s.reopen(k)...)
		out = append(out, s.close(k)...)
	}
	return out
}

func (s *Keeper) live(w uint64) bool { _, live := s.members[w]; return live }

// push adds a push, or answers it again.
func (s *Keeper) push(m Message) []Message {
	v := s.keys[m.Key]
	switch {
	case v.waiting != nil: // how far the key is, is not known yet
	case m.Iteration+1 == v.closed && v.has:
		return []Message{s.answer(m.Key, m.From)}
	case m.Iteration < v.closed:
		return nil // a copy of one that is over
	}
	s.add(m.Key, m.Iteration, m.From, m.Payload)
	return s.close(m.Key)
}

func (s *Keeper) add(k Key, iteration, rank uint64, payload any) {
	v := s.keys[k]
	if v.open[iteration] == nil {
		v.open[iteration] = map[uint64]any{}
	}
	v.open[iteration][rank] = payload
	v.seen = max(v.seen, iteration+1)
}

// close closes a key's iterations as far as it can.
func (s *Keeper) close(k Key) (out []Message) {
	v := s.keys[k]
	for v.waiting == nil && s.settle(k) {
		pushes := v.open[v.closed]
		for w, m := range s.members {
			if _, pushed := pushes[w]; m.First[k] <= v.closed && !pushed {
				return out
			}
		}
		v.last, v.has = s.sum(pushes), true
		delete(v.open, v.closed)
		v.closed++
		for w, m := range s.members {
			if m.First[k] < v.closed {
				out = append(out, s.answer(k, w))
			}
		}
	}
	return out
}

// settle goes on to the first iteration that is the server's and that somebody takes part in.
func (s *Keeper) settle(k Key) (mine bool) {
	v := s.keys[k]
	least, some := uint64(0), false
	for _, m := range s.members {
		if !some || m.First[k] < least {
			least, some = m.First[k], true
		}
	}
	to := max(v.closed, least, s.routes[k][0].From)
	for _, l := range s.routes[k] {
		if s.routes.at(k, to) != s.self && l.Server == s.self && l.From > to {
			to = l.From
		}
	}
	if to != v.closed {
		v.closed, v.has, v.last = to, false, nil
	}
	return s.routes.at(k, to) == s.self
}

func (s *Keeper) answer(k Key, rank uint64) Message {
	v := s.keys[k]
	return Message{Kind: Result, From: s.self, To: rank, Epoch: s.number, Key: k, Iteration: v.closed - 1, Payload: v.last}
}

func (s *Keeper) resume(m Message) []Message {
	v := s.keys[m.Key]
	if m.Epoch != v.inherited || !v.waiting[m.From] {
		return nil // a copy, or said again for a later epoch
	}
	delete(v.waiting, m.From)
	v.states[m.From] = m.State
	return append(s.reopen(m.Key), s.close(m.Key)...)
}

// reopen goes on with a lost server's key when every rank has said how far it came. The first iteration that somebody lacks is
// over if somebody else has its result, or this server: then that is the result for all.
func (s *Keeper) reopen(k Key) (out []Message) {
	v := s.keys[k]
	if v.waiting == nil || len(v.waiting) > 0 {
		return nil
	}
	v.waiting = nil
	maps.DeleteFunc(v.states, func(w uint64, _ State) bool { return !s.live(w) })
	least := uint64(math.MaxUint64)
	for _, st := range v.states {
		least = min(least, st.Results)
	}
	if len(v.states) > 0 && !(v.has && v.closed == least+1) {
		v.closed, v.has, v.last = least, false, nil
		for _, st := range v.states {
			if st.received(least) {
				v.closed, v.last, v.has = least+1, st.Last, true
			}
		}
	}
	maps.DeleteFunc(v.open, func(i uint64, _ map[uint64]any) bool { return i < v.closed })
	for w, st := range v.states {
		if v.has && st.Results < v.closed {
			out = append(out, s.answer(k, w))
		}
		if st.Pushed > st.Results && st.Results >= v.closed {
			s.add(k, st.Results, w, st.Open)
		}
	}
	v.states = nil
	return out
}
