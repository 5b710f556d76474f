package handover

// Pusher is a worker's half. Of each key it keeps its open push, until its result is there, and the last result, until the next one
// is: then every rank has it, because every rank has pushed since. That is what the heir of a lost server may need.
//
// Invariants:
//  1. While a ballot runs no iteration begins.
//  2. Results of a key come in order, each from the server that the current epoch has for it.
type Pusher struct {
	self     uint64
	number   uint32 // of the epoch that it is in
	prepared uint32 // the ballot that it has reported to; above number, it holds
	routes   Routes
	keys     map[Key]*State
	late     map[uint32]*Commit // that came before an earlier one
	again    map[Key]uint32     // refused pushes, and the epoch that they belong to
	early    []Message          // results of later epochs
}

// NewPusher makes the half of a worker that joins with a commit.
func NewPusher(self uint64, c *Commit) *Pusher {
	p := &Pusher{self: self, number: c.Epoch.Number, routes: c.Routes, keys: map[Key]*State{}, late: map[uint32]*Commit{}, again: map[Key]uint32{}}
	for k := range c.Routes {
		first := c.Members[self].First[k]
		p.keys[k] = &State{Start: first, Pushed: first, Results: first}
	}
	return p
}

// State is how far the worker has come with a key.
func (p *Pusher) State(k Key) State { return *p.keys[k] }

// Begin pushes the next iteration of a key, whose result before that must be there. It is refused while a ballot runs, and to
// be repeated after the commit.
func (p *Pusher) Begin(k Key, payload any) (m Message, ok bool) {
	s := p.keys[k]
	if p.prepared > p.number || s.Pushed > s.Results {
		return Message{}, false
	}
	s.Open = payload
	s.Pushed++
	return p.push(k), true
}

// push is the open push of a key, for the server that the current epoch has for it.
func (p *Pusher) push(k Key) Message {
	s := p.keys[k]
	return Message{Kind: Push, From: p.self, To: p.routes.at(k, s.Results), Epoch: p.number, Key: k, Iteration: s.Results, Payload: s.Open}
}

// Receive handles a message. A result that counts is in results.
func (p *Pusher) Receive(m Message) (out []Message, results []Message) {
	switch m.Kind {
	case Prepare:
		return p.report(m.Epoch), nil
	case Committed:
		return p.commit(m.Commit)
	case Refused:
		return p.refused(m), nil
	case Result:
		if p.result(m) {
			results = []Message{m}
		}
	}
	return nil, results
}

func (p *Pusher) report(number uint32) []Message {
	if number <= p.number {
		return nil // the commit overtook a second copy
	}
	p.prepared = max(p.prepared, number)
	m := Message{Kind: Prepared, From: p.self, Epoch: number, Counts: map[Key]uint64{}, Results: map[Key]uint64{}}
	for k, s := range p.keys {
		m.Counts[k], m.Results[k] = s.Pushed, s.Results
	}
	return []Message{m}
}

// commit enters the next epochs, in their order: what was on a lost server is resumed, and what was refused repeated.
func (p *Pusher) commit(c *Commit) (out, results []Message) {
	p.late[c.Epoch.Number] = c
	for p.late[p.number+1] != nil {
		c := p.late[p.number+1]
		delete(p.late, p.number+1)
		p.number++
		p.routes = c.Routes
		for k := range c.Inherited {
			out = append(out, Message{Kind: Resume, From: p.self, To: p.routes.now(k), Epoch: p.number, Key: k, State: *p.keys[k]})
		}
	}
	for k, number := range p.again {
		if number <= p.number {
			delete(p.again, k)
			if s := p.keys[k]; s.Pushed > s.Results {
				out = append(out, p.push(k))
			}
		}
	}
	early := p.early
	p.early = nil
	for _, m := range early {
		if p.result(m) {
			results = append(results, m)
		}
	}
	return out, results
}

func (p *Pusher) refused(m Message) []Message {
	s := p.keys[m.Key]
	if m.Iteration != s.Results || s.Pushed == s.Results {
		return nil // it is answered already
	}
	if m.Epoch > p.number {
		p.again[m.Key] = m.Epoch
		return nil
	}
	return []Message{p.push(m.Key)}
}

// result takes the result of the open iteration; any other is a copy, or of a server that is no longer in charge.
func (p *Pusher) result(m Message) bool {
	s := p.keys[m.Key]
	switch {
	case m.Epoch > p.number:
		p.early = append(p.early, m)
		return false
	case m.Iteration != s.Results || m.From != p.routes.at(m.Key, m.Iteration):
		return false
	}
	s.Results++
	s.Pushed = max(s.Pushed, s.Results)
	s.Last, s.Open = m.Payload, nil
	return true
}
