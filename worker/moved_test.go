package worker_test

import (
	"bytes"
	"slices"
	"testing"
	"testing/synctest"
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
	heard   [3]chan heard
	done    chan error
}

// heard is a frame that a server has got.
type heard struct {
	wire.Header
	payload []byte
}

func move(t *testing.T, model string, test func(m *moving)) { moveAmong(t, 2, model, test) }

// moveAmong is move with another number of servers.
func moveAmong(t *testing.T, servers int, model string, test func(m *moving)) {
	m := &moving{done: make(chan error, 1)}
	change := func(c *worker.Config) {
		elastic(c)
		m.members = c.Membership
	}
	perform(t, servers, 1, change, func(th *theatre) {
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
	synctest.Wait() // the rank pushes there from now on
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

// sumCoded begins a sum, coded with a residual.
func (m *moving) sumCoded() {
	m.t.Helper()
	err := m.engine.Submit([]worker.Op{{
		Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{1}, Input: make([]byte, 4), Output: make([]byte, 4),
		Prescale: 1, Postscale: 1, Name: "g", Declared: options.Declared{Codec: `[{"min_bytes": 0, "codec": "topk:1"}]`}, Done: func(_ worker.Output, err error) { m.done <- err },
	}})
	if err != nil {
		m.t.Fatal(err)
	}
}

// about has a server send a frame about the tensor of another frame.
func (m *moving) about(server int, q heard, h wire.Header, payload []byte) {
	h.Tensor, h.Seq, h.Iteration = q.Tensor, q.Seq, q.Iteration
	m.servers[server].send(m.servers[server].conns[0], h, payload)
}

func (m *moving) sums(server int, q heard) {
	m.t.Helper()
	m.about(server, q, wire.Header{Type: wire.TypeResult, DType: units.Float32, Codec: q.Codec}, q.payload)
	m.wantEnd(m.done, nil)
}

// handsOn has a server hand a residual on, or say that it has one.
func (m *moving) handsOn(server int, q heard, flags wire.Flags, residual ...byte) {
	m.about(server, q, wire.Header{Type: wire.TypeResidual, Flags: flags, DType: units.Float32}, residual)
}

// carried checks that a server gets a residual before a push.
func (m *moving) carried(server int, want ...byte) {
	m.t.Helper()
	if r := m.gets(server, wire.TypeResidual, wire.TypePush); !bytes.Equal(r.payload, want) {
		m.t.Errorf("server %d gets the residual %v, want %v", server, r.payload, want)
	}
}

// A rank brings the residuals that it carries ahead of its next push of the key, but not to the server that leaves.
func TestAResidualGoesAheadOfAPush(t *testing.T) {
	move(t, "asp", func(m *moving) {
		m.answers(m.gets(0, wire.TypePush), 0, 6)
		m.wantEnd(m.done, nil)
		m.sumCoded()
		q := m.gets(0, wire.TypePush, wire.TypeResidual)
		m.handsOn(0, q, 0, 1, 2, 3, 4)
		m.handsOn(0, q, 0, 5, 6, 7, 8) // pieces from a checkpoint, which have come behind it
		m.about(0, q, wire.Header{Type: wire.TypeMoved}, nil)
		m.movesTensor(q.Tensor, 1)
		m.carried(1, 1, 2, 3, 4)
		m.carried(1, 5, 6, 7, 8)
		m.handsOn(1, q, 0)
		m.handsOn(1, q, 0)
		m.sums(1, m.gets(1, wire.TypePush))
		m.sumCoded()
		q = m.gets(1, wire.TypePush, wire.TypeResidual)
		m.handsOn(1, q, wire.FlagLast, 1, 2, 3, 4)
		m.sums(1, q)
		m.sumCoded()
		m.sums(1, m.gets(1, wire.TypePush, wire.TypeResidual))
	})
}

// What a server has handed on that leaves, and what it has not said that it has, its heir gets at once: the next push may be of another rank, or the state be asked for.
func TestAResidualGoesOnFromAServerThatLeaves(t *testing.T) {
	for _, c := range []struct{ handed, brought, lost bool }{{handed: true}, {brought: true}, {brought: true, handed: true}, {brought: true, lost: true}} {
		move(t, "asp", func(m *moving) {
			m.answers(m.gets(0, wire.TypePush), 0, 6)
			m.wantEnd(m.done, nil)
			m.sumCoded()
			q := m.gets(0, wire.TypePush, wire.TypeResidual)
			m.movesTensor(q.Tensor, 1)
			if c.brought {
				m.handsOn(0, q, 0, 1, 2, 3, 4)
			}
			m.about(0, q, wire.Header{Type: wire.TypeMoved}, nil)
			if c.brought {
				m.carried(1, 1, 2, 3, 4)
			}
			m.gets(1, wire.TypePush)
			if c.handed {
				m.handsOn(1, q, wire.FlagLast, 5, 6, 7, 8)
			}
			if !c.lost {
				m.servers[1].send(m.servers[1].conns[0], wire.Header{Type: wire.TypeBye}, nil)
			}
			synctest.Wait()
			m.loses(1, !c.lost)
			if c.brought && !c.lost {
				m.carried(0, 1, 2, 3, 4)
			}
			if c.handed {
				m.carried(0, 5, 6, 7, 8)
			}
			m.sums(0, m.gets(0, wire.TypePush, wire.TypeResidual))
		})
	}
}

// A rank asks for the residual of its checkpoint behind what it carries: where its server leaves, and where that says that the key is elsewhere.
func TestAStateIsAskedForBehindTheResidual(t *testing.T) {
	for _, flags := range []wire.Flags{wire.FlagLast, wire.FlagLast | wire.FlagCopy, 0, wire.FlagCopy} {
		move(t, "asp", func(m *moving) {
			m.answers(m.gets(0, wire.TypePush), 0, 6)
			m.wantEnd(m.done, nil)
			m.sumCoded()
			m.sums(0, m.gets(0, wire.TypePush))
			state := make([]byte, 1<<10)
			go func() {
				n, err := m.engine.State(state)
				state = state[:n]
				m.done <- err
			}()
			q := m.gets(0, wire.TypeState)
			m.handsOn(0, q, flags, 1, 2, 3, 4)
			if flags&wire.FlagLast != 0 { // it leaves; else that is sent back
				m.servers[0].send(m.servers[0].conns[0], wire.Header{Type: wire.TypeBye}, nil)
				synctest.Wait()
				m.loses(0, true)
			} else {
				m.about(0, q, wire.Header{Type: wire.TypeMoved}, nil)
				m.movesTensor(q.Tensor, 1)
			}
			if r := m.gets(1, wire.TypeResidual, wire.TypeState); !bytes.Equal(r.payload, []byte{1, 2, 3, 4}) || r.Flags != flags&wire.FlagCopy {
				t.Errorf("server 1 gets the residual %v, %v", r.Header, r.payload)
			}
			m.about(1, m.gets(1, wire.TypeState, wire.TypeResidual), wire.Header{Type: wire.TypeResult, DType: units.Float32}, []byte{1, 2, 3, 4})
			m.wantEnd(m.done, nil)
			if !bytes.HasSuffix(state, []byte{1, 2, 3, 4}) {
				t.Errorf("the state is %v", state)
			}
			m.sumCoded()
			m.sums(1, m.gets(1, wire.TypePush)) // there the key is now
		})
	}
}

// The heir of a lost server is where this rank pushes, also when the key moves on: what only the heir has it hands on with what it sends away.
func TestAKeyMovesOnFromItsHeir(t *testing.T) {
	moveAmong(t, 3, "asp", func(m *moving) {
		m.answers(m.gets(0, wire.TypePush), 0, 6)
		m.wantEnd(m.done, nil)
		m.sumCoded()
		m.sums(0, m.gets(0, wire.TypePush))
		m.sumCoded()
		q := m.gets(0, wire.TypePush)
		m.loses(0, false)
		heir := 0
		for range 1000 {
			time.Sleep(time.Millisecond) // what is pushed may wait for a batch
			synctest.Wait()
			if heir = slices.IndexFunc(m.heard[:], func(h chan heard) bool { return len(h) > 0 }); heir > 0 {
				break
			}
		}
		if heir < 1 {
			m.t.Fatalf("server %d hears of it", heir)
		}
		m.sums(heir, m.gets(heir, wire.TypePush))
		m.movesTensor(q.Tensor, 3-heir)
		m.sumCoded()
		m.sums(heir, m.gets(heir, wire.TypePush))
	})
}

// What a server gives away is checked here: what another one cannot take would end the connection to that.
func TestWhatCannotBeGivenAwayEndsTheConnection(t *testing.T) {
	value := wire.Header{Type: wire.TypeSupply, DType: units.Float32, Codec: wire.CodecSummed, Tensor: 1}
	cover := wire.Header{Type: wire.TypeCover, Codec: wire.CodecSummed, Tensor: 1}
	residual := wire.Header{Type: wire.TypeResidual, DType: units.Float32, Tensor: 2}
	for what, frame := range map[string]func(m *moving){
		"a value of another length": func(m *moving) { m.sends(cover, coverOf(0)); m.sends(value, make([]byte, 8)) },
		"a value of another type": func(m *moving) {
			m.sends(cover, coverOf(0))
			h := value
			h.DType = units.Float16
			m.sends(h, make([]byte, 8))
		},
		"a value as ranks read it": func(m *moving) {
			m.sends(cover, coverOf(0))
			h := value
			h.Codec = wire.CodecPlain
			m.sends(h, make([]byte, 4))
		},
		"a value without its cover":           func(m *moving) { m.sends(value, make([]byte, 4)) },
		"a value of a sum":                    func(m *moving) { h := value; h.Tensor = 2; m.sends(h, make([]byte, 4)) },
		"a cover of a sum":                    func(m *moving) { h := cover; h.Tensor = 2; m.sends(h, coverOf(0)) },
		"a cover of a rank that is no member": func(m *moving) { m.sends(cover, wire.Cover{Ranks: []wire.CoveredPushes{{Rank: 7}}}.Append(nil)) },
		"a partition that is none":            func(m *moving) { h := residual; h.Part = 1; m.sends(h, make([]byte, 4)) },
		"a residual of another length":        func(m *moving) { m.sends(residual, make([]byte, 8)) },
		"a residual of a held value":          func(m *moving) { h := residual; h.Tensor = 1; m.sends(h, make([]byte, 4)) },
	} {
		move(t, "asp", func(m *moving) {
			m.answers(m.gets(0, wire.TypePush), 0, 6)
			m.wantEnd(m.done, nil)
			m.sumCoded()
			m.sums(0, m.gets(0, wire.TypePush))
			frame(m)
			synctest.Wait()
			select {
			case l := <-m.lost:
				if l.Rank != 0 {
					t.Errorf("%s: %+v is lost", what, l)
				}
			default:
				t.Errorf("%s is taken", what)
			}
			m.loses(0, false)
		})
	}
}

// sends has the first server send a frame.
func (m *moving) sends(h wire.Header, payload []byte) {
	m.servers[0].send(m.servers[0].conns[0], h, payload)
}

// loses begins the epoch without a server, whose connections end.
func (m *moving) loses(server int, drained bool) {
	m.t.Helper()
	next, err := m.members.Now().Next(membership.Change{Lose: []membership.Loss{{Member: membership.Member{Role: membership.ServerRole, Number: server}, Drained: drained}}})
	if err != nil {
		m.t.Fatal(err)
	}
	m.engine.Follow(next)
	m.servers[server].leave()
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
