package server

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// windowStep is the most tensor bytes that are consumed from one window frame to the next.
const windowStep = 1 << 20

// errLeft ends the reading of a connection on which the worker sends no more frames.
var errLeft = errors.New("the worker has left")

var errRoundOver = errors.New("the round of the job is over: its workers have shut down")

// conn is one worker's connection. Its goroutine reads; replies leave through the outbox.
type conn struct {
	r     *round
	tc    transport.Conn
	rank  int
	conns int    // that the worker opens in all
	step  uint64 // consumed bytes from one window frame to the next
	out   *outbox.Outbox
	done  chan struct{}

	request  room.Request // being served
	inner    room.Request // of a batch, being served
	together wire.Batch   // being served
	scratch  []byte
	consumed uint64
	reported uint64
	byed     bool          // the worker said goodbye on this connection
	joins    atomic.Uint32 // how often all ranks had joined, as the worker knows

	replies replies
	corked  bool // it is to be kicked at a release; guarded by the cork's lock
}

func readHello(tc transport.Conn) (wire.Hello, error) {
	hello, err := control.ReadHello(tc)
	if err != nil {
		return hello, err
	}
	if hello.Role != wire.RoleWorker || hello.Conns < 1 || hello.Conns > limits.MaxConnsPerServer {
		return hello, fmt.Errorf("hello of a %q with %d connections, want a worker with 1 to %d", hello.Role, hello.Conns, limits.MaxConnsPerServer)
	}
	return hello, nil
}

func newConn(r *round, tc transport.Conn, hello wire.Hello) *conn {
	c := &conn{r: r, tc: tc, rank: hello.Rank, conns: hello.Conns, step: windowStep, scratch: make([]byte, max(room.ChunkBytes, transport.BatchBytes)), done: make(chan struct{})}
	c.joins.Store(hello.Joins)
	c.replies.mu.Place(room.LevelConn, "replies.mu")
	if hello.Window > 0 {
		c.step = min(hello.Window, windowStep)
	}
	c.out = outbox.New(tc, &c.replies, r.s.cfg.Fusion, func(error) { time.AfterFunc(outbox.LastWords, func() { _ = tc.Close() }) })
	return c
}

// serve reads frames until the connection or the round ends.
func (c *conn) serve() {
	defer close(c.done)
	err := c.enter()
	if err == nil {
		err = c.read()
	}
	_ = c.tc.Close()
	c.out.Close()
	c.leave(err)
}

// enter makes the connection known to the round.
func (c *conn) enter() error {
	c.r.reach(c.joins.Load(), c.rank)
	c.replies.push(reply{Frame: outbox.Frame{Header: wire.Header{Type: wire.TypeWelcome}}}) // before anything that others send, once they find the connection
	c.r.mu.Lock()
	ended, lost, farewell, first := c.r.ended, c.r.lost, c.r.farewell, len(c.r.conns[c.rank]) == 0
	if !ended {
		c.r.conns[c.rank] = append(c.r.conns[c.rank], c)
	}
	c.r.mu.Unlock()
	if ended {
		return errRoundOver
	}
	c.out.Kick()
	if lost != nil {
		c.sendJSON(wire.Header{Type: wire.TypeLost}, lost)
	}
	if farewell {
		c.send(farewellFrame)
	}
	if first && c.r.settings.Elastic {
		c.joined(c.r.members.Now().Joins, c.rank)
	}
	return nil
}

// leave takes the connection out again. One that ends without a goodbye is a lost worker.
func (c *conn) leave(err error) {
	c.r.mu.Lock()
	c.r.conns[c.rank] = slices.DeleteFunc(c.r.conns[c.rank], func(other *conn) bool { return other == c })
	ended, here := c.r.ended || c.r.farewell, c.r.s.cfg.Rank
	c.r.mu.Unlock()
	if c.byed || ended {
		return
	}
	lost := wire.Lost{Role: wire.RoleWorker, Rank: c.rank, Why: fmt.Sprintf("its connection from %v ended: %v", c.tc.RemoteAddr(), err), Silent: transport.Silent(err)}
	switch stopped := errors.Is(err, transport.ErrStopped); {
	case stopped && here == membership.Dedicated && !c.r.settings.Elastic: // not the rank; in an elastic job the scheduler hears from the others too
		lost = wire.Lost{Role: wire.RoleServer, Rank: c.r.settings.Here, Why: fmt.Sprintf("it has ended its connection from %v: %v", c.tc.RemoteAddr(), err)}
	case stopped && here != membership.Dedicated:
		lost.Rank, lost.Why = here, fmt.Sprintf("rank %d has ended its connection from %v: %v", c.rank, c.tc.RemoteAddr(), err)
	case errors.Is(err, io.EOF) && !stopped:
		lost.Why = fmt.Sprintf("its connection from %v was closed without a goodbye", c.tc.RemoteAddr())
	}
	log := c.r.s.cfg.Log.Debug
	if errors.Is(err, transport.ErrIntegrity) {
		log = c.r.s.cfg.Log.Warn
	}
	log("connection lost", zap.Int("rank", c.rank), zap.Error(err))
	c.r.lose(lost)
}

func (c *conn) read() error {
	q := &c.request
	for {
		q.Reply = room.Reply{To: c}
		if err := c.tc.ReadHeader(&q.Header); err != nil {
			return err
		}
		if q.Type == wire.TypeBatch {
			if err := c.batch(&q.Header); err != nil {
				return err
			}
			continue
		}
		q.Payload = room.Stream(c.tc, c.scratch[:room.ChunkBytes], int(q.Length))
		if err := c.frame(q); err != nil {
			return fmt.Errorf("%v frame from rank %d: %w", q.Type, c.rank, err)
		}
	}
}

// batch handles the small frames that travelled together.
func (c *conn) batch(h *wire.Header) error {
	if err := transport.ReadBatch(c.tc, h, &c.together, c.scratch); err != nil {
		return err
	}
	c.r.cork.hold()
	defer c.r.cork.release()
	return c.together.Frames(func(in *wire.Header, data []byte) error {
		c.inner = room.Request{Header: *in, Payload: room.Memory(data), Reply: room.Reply{To: c}}
		if err := c.frame(&c.inner); err != nil {
			return fmt.Errorf("%v frame from rank %d: %w", in.Type, c.rank, err)
		}
		return nil
	})
}

// frame handles one frame. An error ends the connection: the peer does not keep to the protocol.
func (c *conn) frame(q *room.Request) error {
	h := &q.Header
	if int(h.Rank) != c.rank {
		return fmt.Errorf("it says rank %d", h.Rank)
	}
	var at wire.Place
	weight := uint64(h.Length)
	if h.Type == wire.TypePush && q.Has(wire.FlagInPlace) {
		var err error
		if at, err = placeOf(&q.Payload); err != nil {
			return err
		}
		weight = at.Length
	}
	if h.Type.TakesCredit() {
		defer c.account(weight)
	}
	if c.ofAnotherEpoch(h) {
		return c.refuse(q)
	}
	err := c.handle(q, at)
	if err != nil && c.ofAnotherEpoch(h) { // all ranks have joined meanwhile, and the frame's tensor is forgotten
		return c.refuse(q)
	}
	return err
}

// ofAnotherEpoch reports whether a frame has no meaning in the present epoch.
func (c *conn) ofAnotherEpoch(h *wire.Header) bool {
	return h.Type.OfEpoch() && h.Epoch != c.r.members.Now().Joins
}

// refuse answers a frame of another epoch with the present one.
func (c *conn) refuse(q *room.Request) error {
	right := q.Header
	right.Type, right.Flags, right.Epoch = wire.TypeEpoch, 0, c.r.members.Now().Joins
	c.send(outbox.Frame{Header: right})
	return q.Payload.Discard()
}

// handle handles a frame of the present epoch. What is in place lies there.
func (c *conn) handle(q *room.Request, at wire.Place) error {
	h, p := &q.Header, &q.Payload
	if h.Type == wire.TypePush && q.Has(wire.FlagInPlace) {
		return c.inPlace(q, at)
	}
	switch h.Type {
	case wire.TypePush, wire.TypePull, wire.TypePut, wire.TypeGet, wire.TypeState, wire.TypeRestore,
		wire.TypeSend, wire.TypeOffer, wire.TypeReceive, wire.TypePiece, wire.TypeWithdraw, wire.TypeMatch, wire.TypeSupply, wire.TypeUse, wire.TypeCover, wire.TypeResidual:
		if err := c.r.serve(q); err != nil {
			return err
		}
		return p.Discard()
	case wire.TypeAnnounce:
		return c.announce(h, p)
	case wire.TypeCancel:
		c.r.cancel(h)
		return nil
	case wire.TypeFail:
		var f wire.Failure
		if err := decode(h, p, &f); err != nil {
			return err
		}
		return c.r.undeclared(c.rank, &f)
	case wire.TypeJoin:
		switch {
		case h.Flags&wire.FlagOwnWill != 0 && c.r.settings.Hosts.Uplink != nil:
			c.r.takeBack()
		case c.onAll(c.r.joins):
			c.r.join(c.rank)
		}
		return nil
	case wire.TypeReport:
		return c.report(h, p)
	case wire.TypeCondition:
		return c.condition(h, p)
	case wire.TypeBye:
		c.bye()
		return errLeft
	case wire.TypeLost:
		return c.lost(h, p)
	default:
		return errors.New("a worker does not send this")
	}
}

// decode reads the JSON payload of a frame, of at most limits.MaxControl bytes as the header's check has seen to.
func decode(h *wire.Header, p *room.Payload, v any) error {
	data := make([]byte, p.Len())
	if err := p.Into(data); err != nil {
		return err
	}
	return wire.DecodeJSON(h.Type, data, v)
}

func (c *conn) announce(h *wire.Header, p *room.Payload) error {
	var t wire.Tensor
	if err := decode(h, p, &t); err != nil {
		return err
	}
	return c.r.announce(&t)
}

// lost notes that the worker ends because it has lost a peer.
func (c *conn) lost(h *wire.Header, p *room.Payload) error {
	var l wire.Lost
	if err := decode(h, p, &l); err != nil {
		return err
	}
	c.byed = true
	c.r.lose(l)
	return errLeft
}

// bye notes the goodbye; with that on its last connection the worker has left.
func (c *conn) bye() {
	c.byed = true
	if c.onAll(c.r.byes) {
		c.r.bye(c.rank)
	}
}

// onAll counts a frame that the worker sends on each of its connections, behind what it sent there before,
// and reports whether this is the last of them.
func (c *conn) onAll(counts map[int]int) bool {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	counts[c.rank]++
	if counts[c.rank] < c.conns {
		return false
	}
	delete(counts, c.rank)
	return true
}

// account counts the tensor bytes consumed, which have travelled or are lent, and reports them to the worker after each step: they are
// its credit.
func (c *conn) account(n uint64) {
	c.consumed += n
	if c.consumed-c.reported >= c.step {
		c.reported = c.consumed
		c.send(outbox.Encoded(wire.Header{Type: wire.TypeWindow}, wire.Window{Consumed: c.consumed}))
	}
}

// report reads that an iteration has ended.
func (c *conn) report(h *wire.Header, p *room.Payload) error {
	var iteration wire.Report
	if h.Flags&wire.FlagEmpty == 0 || p.Len() > 0 {
		data, err := p.Next(p.Len())
		if err != nil {
			return err
		}
		if err := iteration.Decode(data); err != nil {
			return err
		}
	}
	return c.r.report(h, iteration)
}

// Send implements room.Sender.
func (c *conn) Send(h wire.Header, payload []byte, owner room.Owner, priority int) {
	c.queue(reply{outbox.Frame{Header: h, Payload: payload, Owner: owner}, priority})
}

// send queues a frame that is no answer.
func (c *conn) send(f outbox.Frame) { c.queue(reply{Frame: f}) }

func (c *conn) queue(r reply) {
	c.replies.push(r)
	if !c.r.cork.keeps(c) {
		c.out.Kick()
	}
}

func (c *conn) sendJSON(h wire.Header, v any) {
	f, err := outbox.JSON(h, v)
	if err != nil {
		c.r.s.cfg.Log.Error("notice cannot be sent", zap.Stringer("type", h.Type), zap.Error(err))
		return
	}
	c.send(f)
}

// goodbye tells the worker that the server leaves, and closes once that is sent.
func (c *conn) goodbye() {
	c.send(outbox.Frame{Header: wire.Header{Type: wire.TypeBye}, Owner: closer{c.tc}})
}

type closer struct{ tc transport.Conn }

// Sent implements outbox.Owner.
func (c closer) Sent(error) { _ = c.tc.Close() }
