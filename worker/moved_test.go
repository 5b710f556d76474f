package worker_test

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// moving is an engine of an elastic job with two servers, over one connection each, and a held value on the first.
type moving struct {
	*theatre
	members *membership.View
	heard   [2]chan heard
	done    chan error
}

// heard is a frame that a server has got.
type heard struct {
	wire.Header
	payload []byte
}

func move(t *testing.T, model string, test func(m *moving)) {
	m := &moving{done: make(chan error, 1)}
	change := func(c *worker.Config) {
		epoch := *c.Membership.Now()
		epoch.Elastic, epoch.Policy = true, "round-robin"
		for i := range epoch.Workers {
			epoch.Workers[i].Incarnation = uint64(i) + 1
		}
		for i := range epoch.Servers {
			epoch.Servers[i].Incarnation = uint64(i) + 11
		}
		m.members = membership.NewView(&epoch)
		c.Membership = m.members
	}
	perform(t, 2, 1, change, func(th *theatre) {
		m.theatre = th
		for i, s := range th.servers {
			m.heard[i] = make(chan heard, 100)
			go func() {
				_ = s.frames(s.conns[0], func(h wire.Header, payload []byte) { m.heard[i] <- heard{h, slices.Clone(payload)} })
			}()
		}
		m.use(model, units.Declare)
		test(m)
	})
}

// use does something with the value, of one element.
func (m *moving) use(model string, use units.Use) {
	m.t.Helper()
	err := m.engine.Submit([]worker.Op{{
		Kind: units.Accumulate, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{1}, Input: make([]byte, 4), Output: make([]byte, 4),
		Prescale: 1, Postscale: 1, Name: "v", Declared: options.Declared{Sync: options.Sync{Model: model}}, Held: worker.Held{Use: use, Group: "v"}, Done: func(_ worker.Output, err error) { m.done <- err },
	}})
	if err != nil {
		m.t.Fatal(err)
	}
}

// gets waits until a server gets a frame of a type. Of those before it none may be of the others.
func (m *moving) gets(server int, want wire.Type, not ...wire.Type) heard {
	m.t.Helper()
	for {
		select {
		case f := <-m.heard[server]:
			if f.Type == want {
				return f
			}
			if slices.Contains(not, f.Type) {
				m.t.Fatalf("server %d gets %v before %v", server, f.Type, want)
			}
		case <-time.After(time.Minute):
			m.t.Fatalf("server %d gets no %v", server, want)
		}
	}
}

// says has a server send a frame about the value.
func (m *moving) says(server int, h wire.Header, payload []byte) {
	h.Tensor = 1
	m.servers[server].send(m.servers[server].conns[0], h, payload)
}

func coverOf(operations uint64) []byte {
	return wire.Cover{Ranks: []wire.CoveredPushes{{Rank: 0, Next: operations, Pushed: operations}}}.Append(nil)
}

func (m *moving) answers(q heard, operations uint64, value byte) {
	m.says(0, wire.Header{Type: wire.TypeCover, Seq: q.Seq, Iteration: q.Iteration}, coverOf(operations))
	m.says(0, wire.Header{Type: wire.TypeResult, DType: units.Float32, Seq: q.Seq, Iteration: q.Iteration}, []byte{0, 0, 0, value})
}

func (m *moving) gives(server int, operations uint64, value byte) {
	m.says(server, wire.Header{Type: wire.TypeCover, Codec: wire.CodecSummed}, coverOf(operations))
	m.says(server, wire.Header{Type: wire.TypeSupply, DType: units.Float32, Codec: wire.CodecSummed}, []byte{0, 0, 0, value})
}

// moves begins the epoch in which the value is on a server.
func (m *moving) moves(server int) {
	m.t.Helper()
	m.movesTensor(1, server)
}

func (m *moving) movesTensor(number uint32, server int) {
	m.t.Helper()
	now := m.members.Now()
	next, err := now.Next(membership.Change{Moved: membership.MovedBy(now.Moved().Times()+1, []membership.Move{{Number: number, To: server}})})
	if err == nil {
		err = m.members.Advance(next)
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

// brings checks what a server is brought.
func (m *moving) brings(server int, operations uint64, value byte) {
	m.t.Helper()
	cover := m.gets(server, wire.TypeCover)
	supply := m.gets(server, wire.TypeSupply)
	if !bytes.Equal(cover.payload, coverOf(operations)) || !bytes.Equal(supply.payload, []byte{0, 0, 0, value}) || supply.Codec != wire.CodecSummed {
		m.t.Errorf("server %d is brought %v, which covers %v, want %d", server, supply, cover.payload, value)
	}
}

// What a server has answered before it gives a value away may come behind that: it is older, and does not take its place.
func TestAnAnswerThatComesBehindTheValueIsOlder(t *testing.T) {
	move(t, "asp", func(m *moving) {
		q := m.gets(0, wire.TypePush)
		m.gives(0, 0, 7)
		m.answers(q, 0, 6)
		m.wantEnd(m.done, nil)
		m.moves(1)
		m.brings(1, 0, 7)
		m.use("asp", units.Add|units.Read)
		q = m.gets(1, wire.TypePush)
		m.says(1, wire.Header{Type: wire.TypeMoved, Seq: q.Seq, Iteration: q.Iteration}, nil)
		m.moves(0)
		q = m.gets(0, wire.TypePush)
		m.gives(1, 3, 9)
		m.brings(0, 3, 9)
		m.gives(0, 5, 11)
		m.answers(q, 4, 10)
		m.wantEnd(m.done, nil)
		m.moves(1)
		m.brings(1, 5, 11)
	})
}

// A server that has not heard of the epoch yet sends the value back, and is brought it again.
func TestAValueIsBroughtUntilItsServerTakesIt(t *testing.T) {
	move(t, "asp", func(m *moving) {
		m.answers(m.gets(0, wire.TypePush), 0, 6)
		m.wantEnd(m.done, nil)
		m.moves(1)
		m.gives(0, 0, 7)
		for range 3 {
			m.brings(1, 0, 7)
			m.says(1, wire.Header{Type: wire.TypeMoved}, nil)
		}
		m.moves(0)
		m.brings(0, 0, 7)
	})
}

// A rank brings the residual that it carries ahead of its next push of the key, but not to the server that leaves.
func TestAResidualGoesAheadOfAPush(t *testing.T) {
	move(t, "asp", func(m *moving) {
		m.answers(m.gets(0, wire.TypePush), 0, 6)
		m.wantEnd(m.done, nil)
		sum := func() {
			err := m.engine.Submit([]worker.Op{{
				Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{1}, Input: make([]byte, 4), Output: make([]byte, 4),
				Prescale: 1, Postscale: 1, Name: "g", Declared: options.Declared{Codec: `[{"min_bytes": 0, "codec": "topk:1"}]`}, Done: func(_ worker.Output, err error) { m.done <- err },
			}})
			if err != nil {
				m.t.Fatal(err)
			}
		}
		answer := func(server int, q heard) {
			h := wire.Header{Type: wire.TypeResult, Tensor: q.Tensor, DType: units.Float32, Codec: q.Codec, Seq: q.Seq, Iteration: q.Iteration}
			m.servers[server].send(m.servers[server].conns[0], h, q.payload)
			m.wantEnd(m.done, nil)
		}
		residual := func(server int, q heard, flags wire.Flags) {
			h := wire.Header{Type: wire.TypeResidual, Flags: flags, Tensor: q.Tensor, DType: units.Float32}
			m.servers[server].send(m.servers[server].conns[0], h, []byte{1, 2, 3, 4})
		}
		sum()
		q := m.gets(0, wire.TypePush, wire.TypeResidual)
		residual(0, q, 0)
		m.servers[0].send(m.servers[0].conns[0], wire.Header{Type: wire.TypeMoved, Tensor: q.Tensor, Seq: q.Seq, Iteration: q.Iteration}, nil)
		m.movesTensor(q.Tensor, 1)
		if r := m.gets(1, wire.TypeResidual, wire.TypePush); !bytes.Equal(r.payload, []byte{1, 2, 3, 4}) {
			m.t.Errorf("server 1 gets the residual %v", r.payload)
		}
		answer(1, m.gets(1, wire.TypePush, wire.TypeResidual))
		sum()
		q = m.gets(1, wire.TypePush, wire.TypeResidual)
		residual(1, q, wire.FlagLast)
		answer(1, q)
		sum()
		answer(1, m.gets(1, wire.TypePush, wire.TypeResidual))
	})
}

// Under supersteps the new server hears where the rank is, behind the value. The old one may have answered the rank too: the answer that comes second is to a question of the past.
func TestTheServerOfAMovedValueDecides(t *testing.T) {
	move(t, "adaptive:1,1", func(m *moving) {
		m.answers(m.gets(0, wire.TypePush), 0, 6)
		m.wantEnd(m.done, nil)
		ended := make(chan bool, 1)
		end := func() {
			last, err := m.engine.EndIteration(0, "v")
			if err != nil {
				m.t.Error(err)
			}
			ended <- last
		}
		stop := func(server int, s wire.Stop) { m.says(server, wire.Header{Type: wire.TypeStop}, s.Append(nil)) }
		go end()
		m.gets(0, wire.TypeReport)
		m.moves(1)
		m.gives(0, 0, 7)
		report := m.gets(1, wire.TypeReport)
		var where wire.Report
		if err := where.Decode(report.payload); err != nil || where.Iteration != 1 || report.Flags&wire.FlagAsk == 0 {
			m.t.Errorf("the rank is at %+v, %+v (%v)", where, report.Header, err)
		}
		stop(0, wire.Stop{Asked: 1})
		if <-ended {
			m.t.Fatal("the superstep ends where it goes on")
		}
		go end()
		m.gets(1, wire.TypeReport)
		stop(1, wire.Stop{Asked: 1})
		time.Sleep(time.Second) // virtual
		select {
		case <-ended:
			m.t.Fatal("the answer to the question before ends the wait")
		default:
		}
		stop(1, wire.Stop{Last: 2, Asked: 2})
		if !<-ended {
			m.t.Error("the superstep goes on where it ends")
		}
	})
}
