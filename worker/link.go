package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/bytebufferpool"
	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// link is one connection to a server. Its goroutine reads; frames leave through the outbox.
type link struct {
	p       *peer
	conn    transport.Conn
	out     *outbox.Outbox
	traffic *connTraffic // what uses this connection; guarded by the peer's mutex
	scratch []byte
	batch   wire.Batch // that is being read
	heard   chan struct{}
	goodbye func() // closes it: the server has said its last word, or the connection has ended
}

const scratchBytes = transport.BatchBytes

// dial opens a connection and waits for the server's welcome.
func (p *peer) dial(ctx context.Context) (*link, error) {
	conn, err := p.e.cfg.Transports.Dial(ctx, p.at.Addresses)
	if err != nil {
		return nil, err
	}
	l := &link{p: p, conn: conn, scratch: make([]byte, scratchBytes), heard: make(chan struct{})}
	l.goodbye = sync.OnceFunc(func() { close(l.heard) })
	stop := context.AfterFunc(ctx, l.abandon)
	err = l.greet()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("no welcome: %w", err)
	}
	l.out = outbox.New(conn, l, p.e.cfg.Fusion, func(error) { time.AfterFunc(outbox.LastWords, func() { _ = conn.Close() }) })
	return l, nil
}

func (l *link) greet() error {
	cfg := &l.p.e.cfg
	conns := l.p.e.opens
	window := max(l.p.e.leastCredit/int64(4*conns), 1) // what no connection has reported yet is a quarter of the credit at most
	hello := wire.Hello{Role: wire.RoleWorker, Round: cfg.Membership.Now().Round, Rank: cfg.Rank, Conns: conns, Window: uint64(window), Joins: cfg.Membership.Now().Joins}
	if err := control.Send(l.conn, wire.TypeHello, hello); err != nil {
		return err
	}
	var h wire.Header
	if err := l.conn.ReadHeader(&h); err != nil {
		return err
	}
	switch h.Type {
	case wire.TypeWelcome:
		return nil
	case wire.TypeLost: // the round has ended before this rank was in it
		payload := make([]byte, h.Length)
		if err := l.conn.ReadPayload(payload); err != nil {
			return err
		}
		if err := notice(&h, payload, l.p.e.Lost); err != nil {
			return err
		}
	}
	return fmt.Errorf("the server answers with a %v frame", h.Type)
}

// abandon closes a connection that is being opened. The server hears why, lest it takes the end for the loss of this rank.
func (l *link) abandon() {
	b := bytebufferpool.Get()
	defer bytebufferpool.Put(b)
	lost, rank := l.p.e.loss(), uint16(l.p.e.cfg.Rank)
	if lost != nil && wire.AppendJSON(b, wire.Header{Type: wire.TypeLost, Rank: rank}, lost) == nil {
		_, _, _ = l.conn.TrySend(net.Buffers{b.B}) // a peer that does not read hears no reason
	}
	_ = l.conn.Close()
}

// Pop implements outbox.Queue.
func (l *link) Pop(limit int) (outbox.Frame, bool) {
	l.p.mu.Lock()
	f, s, ok := l.p.traffic.next(l.traffic, limit)
	if ok {
		l.p.e.profiler.moved(&f)
	}
	l.p.mu.Unlock()
	if s != nil {
		copy(s.memory, f.Owner.(*task).in)
	}
	return f, ok
}

// Waiting implements outbox.Queue.
func (l *link) Waiting() bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.p.traffic.waiting(l.traffic)
}

// read handles the server's frames until the connection ends.
func (l *link) read() {
	defer l.p.e.wg.Done()
	err := l.frames()
	l.goodbye()
	p := l.p
	why := fmt.Sprintf("rank %d lost its connection to %v: %v", p.e.cfg.Rank, p, err)
	survives := p.survives(err)
	if !survives && !closedByServer(err) && !p.shutDown() && p.e.Err() == nil {
		p.fail(err, why) // before the server sees the connection close, and takes that for the loss of this rank
	}
	_ = l.conn.Close()
	p.releaseAll()
	if p.e.Err() != nil || !survives && p.hearsWhy(err) {
		return
	}
	left := p.shutDown()
	if left {
		why = "it has shut down"
	} else if errors.Is(err, io.EOF) && !errors.Is(err, transport.ErrStopped) {
		why = fmt.Sprintf("its connection to rank %d was closed without a goodbye", p.e.cfg.Rank)
	}
	if survives {
		late := p.accuse(p.e.ctx, because{err, why})
		if late == nil {
			return
		}
		why = late.Error()
	}
	switch {
	case p.e.Err() != nil:
	case left:
		p.leave(because{ErrUnsupported, fmt.Sprintf("%v has shut down", p)})
	default:
		p.fail(err, why)
	}
}

// shutDown reports whether the server has said that it shuts down.
func (p *peer) shutDown() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.traffic.left
}

// closedByServer reports whether err is the end of a connection that the server closed, and not one that this rank found: this side is closed after a write that failed.
func closedByServer(err error) bool {
	return slices.ContainsFunc([]error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE}, func(end error) bool { return errors.Is(err, end) })
}

// hearsWhy waits a moment for the reason of a server that closed a connection without a goodbye, such as a frame that was changed on
// its way: nothing can be sent on that connection any more, but the scheduler tells everybody; in an elastic job also a worker that did not run, and that
// the others have given up, with the epoch. It reports whether the reason came.
func (p *peer) hearsWhy(err error) bool {
	if !closedByServer(err) || p.shutDown() || errors.Is(err, transport.ErrStopped) && !p.e.epoch().Elastic {
		return false
	}
	select {
	case <-p.e.ctx.Done():
	case <-time.After(farewellTime):
	}
	return p.e.Err() != nil
}

// fail ends the round: without this server no operation can be done.
func (p *peer) fail(err error, why string) {
	lost := wire.Lost{Role: wire.RoleServer, Rank: p.index, Why: why}
	switch {
	case errors.Is(err, transport.ErrStopped): // not the server
		lost.Role, lost.Rank = wire.RoleWorker, p.e.cfg.Rank
	case p.at.Rank != membership.Dedicated: // lost with its worker
		lost.Role, lost.Rank = wire.RoleWorker, p.at.Rank
	}
	p.e.Lost(lost)
	p.e.cfg.Control.ReportLost(lost)
}

func (l *link) frames() error {
	var h wire.Header
	for {
		if err := l.conn.ReadHeader(&h); err != nil {
			return err
		}
		if h.Type == wire.TypeResult {
			if err := l.result(&h); err != nil {
				return err
			}
			continue
		}
		if h.Type == wire.TypeSupply || h.Type == wire.TypeResidual {
			if err := l.given(&h); err != nil {
				return err
			}
			continue
		}
		if h.Type == wire.TypeBatch {
			if err := transport.ReadBatch(l.conn, &h, &l.batch, l.scratch); err != nil {
				return err
			}
			if err := l.frameBatch(); err != nil {
				return err
			}
			continue
		}
		payload := l.scratch
		if int(h.Length) > len(payload) {
			payload = make([]byte, h.Length)
		}
		payload = payload[:h.Length]
		if err := l.conn.ReadPayload(payload); err != nil {
			return err
		}
		if err := l.frame(&h, payload); err != nil {
			return err
		}
	}
}

// frameBatch handles the frames of a batch. What the server in this process answers to other ranks of the host leaves together.
func (l *link) frameBatch() error {
	if server := l.p.e.hosting; server != nil {
		server.Hold()
		defer server.Release()
	}
	return l.batch.Frames(l.frame)
}

// result reads an answer straight into the tensor.
func (l *link) result(h *wire.Header) error {
	t := l.p.awaiting(h)
	if t == nil {
		l.p.tellSender(h, wire.Match{Outcome: wire.Withdrawn})
		return l.discard(int(h.Length))
	}
	if err := t.arrives(h, l.p); err != nil {
		t.answered(err)
		return err
	}
	into, lender, err := l.room(t, h)
	if err == nil {
		err = l.conn.ReadPayload(into)
	}
	if err != nil { // what the operation fails for, if it does, is found where the connection ends
		l.p.breakOff(t)
		return err
	}
	if kept := l.finish(t, h, into, lender); !kept && lender != nil {
		lender.Put(into)
	}
	return nil
}

// given reads a held value that the server gives away, or a residual that it hands on.
func (l *link) given(h *wire.Header) error {
	d, err := l.p.givenOf(h)
	if err != nil {
		return err
	}
	if d == nil {
		return l.discard(int(h.Length))
	}
	b, err := l.p.e.encoder.pool.Get(int(h.Length))
	if err == nil {
		err = l.conn.ReadPayload(b)
	}
	if err == nil {
		err = l.p.gives(d, h, b)
	}
	return err
}

// room is the memory that an answer is read into: the output, or that of a message, which a pool may have lent. An answer that is kept is no
// output before it is whole.
func (l *link) room(t *task, h *wire.Header) (into []byte, lender *mempool.Pool, err error) {
	switch {
	case h.Codec == wire.CodecPlain && !l.p.e.kept.keeps(t):
		return t.out[:h.Length], nil, nil
	case int(h.Length) <= len(l.scratch):
		return l.scratch[:h.Length], nil, nil
	}
	lender = l.p.e.encoder.pool
	into, err = lender.Get(int(h.Length))
	return into, lender, err
}

// finish ends a task with its answer, which lies in the output already unless it is a message, or is kept: it reports whether what a pool
// has lent was. A message that cannot be read ends the operation on every rank.
func (l *link) finish(t *task, h *wire.Header, answer []byte, lender *mempool.Pool) (kept bool) {
	t.stamp(received)
	inPlace := t.sum != nil
	if inPlace {
		answer, lender = t.sum, l.p.traffic.staging
	}
	l.p.e.profiler.answered(t, l.p.index, h)
	if !t.halted.IsZero() {
		l.p.e.resumed(time.Since(t.halted) - h.Waited())
	}
	keeper := &l.p.e.kept
	keeps := keeper.keeps(t)
	var err error
	switch k := t.o.d.coding; {
	case h.Codec != wire.CodecPlain:
		err = t.decode(h, answer, l.p)
	case h.Flags&wire.FlagEmpty != 0:
		clear(t.out)
	case t.rows != nil:
		err = t.rows.take(h.Part, answer, l.p)
	default:
		if keeps && !inPlace {
			copy(t.out, answer)
		}
		if k != nil && k.follow {
			k.start(h, answer)
		}
	}
	if t.o.Kind == units.Accumulate && h.Codec != wire.CodecPlain {
		answer, lender = t.out, nil
	}
	if err == nil && keeps {
		var given *result
		given, err = keeper.keep(t, h, l.p.index, answer, lender)
		kept = err == nil && lender != nil
		if kept {
			t.sum = nil
		}
		switch {
		case given != nil:
			l.p.e.later(func() { l.p.supplyElsewhere(given, 1) })
		case l.p.e.epoch().Elsewhere(t.o.d.key(h.Part), l.p.index): // it has not heard yet that the key has been moved
			defer l.p.e.later(l.p.e.bring)
		}
	}
	if err != nil {
		t.o.giveUp(err)
		t.answered(err)
		return kept
	}
	if t.h.Type == wire.TypeReceive {
		t.o.out.Value = int(h.Rank)
		l.p.tellSender(h, wire.Match{Outcome: wire.Delivered, Sent: uint64(h.Length), Room: uint64(h.Length)})
	}
	if c := t.o.climb; c != nil {
		c.answer = *h
	}
	l.p.e.observers.answered(t, h.Rank)
	t.answered(nil)
	return kept
}

func (l *link) discard(n int) error {
	for n > 0 {
		b := l.scratch[:min(n, len(l.scratch))]
		if err := l.conn.ReadPayload(b); err != nil {
			return err
		}
		n -= len(b)
	}
	return nil
}

// frame handles a frame whose payload is in memory.
func (l *link) frame(h *wire.Header, payload []byte) error {
	e := l.p.e
	switch h.Type {
	case wire.TypeResult:
		t := l.p.awaiting(h)
		if t == nil {
			l.p.tellSender(h, wire.Match{Outcome: wire.Withdrawn})
			return nil
		}
		if err := t.arrives(h, l.p); err != nil {
			t.answered(err)
			return err
		}
		if h.Codec == wire.CodecPlain {
			copy(t.out, payload)
		}
		l.finish(t, h, payload, nil)
	case wire.TypeMatch:
		var m wire.Match
		if err := m.Decode(payload); err != nil {
			return err
		}
		l.p.tellSender(h, m)
		if t := l.p.awaiting(h); t != nil {
			if m.Outcome == wire.Wanted {
				t.redirect(l.p.index) // where the pieces go
			}
			e.observers.answered(t, h.Rank)
			t.answered(t.matched(int(h.Rank), m))
		}
	case wire.TypeCover:
		return l.p.covers(h, payload)
	case wire.TypeTaken:
		return l.p.takes(h, payload)
	case wire.TypeSupply, wire.TypeResidual:
		d, err := l.p.givenOf(h)
		if d != nil {
			err = l.p.gives(d, h, slices.Clone(payload))
		}
		return err
	case wire.TypeWindow:
		var w wire.Window
		if err := w.Decode(payload); err != nil {
			return err
		}
		l.window(w.Consumed)
	case wire.TypeFail:
		if e.ofHost(l.p.index) {
			return notice(h, payload, e.failedHere)
		}
		return notice(h, payload, func(f wire.Failure) { e.failedAt(l.p.index, f) })
	case wire.TypeStall:
		return notice(h, payload, e.Stalled)
	case wire.TypeLost:
		return notice(h, payload, l.lost)
	case wire.TypeStop:
		var at wire.Stop
		if err := at.Decode(payload); err != nil {
			return err
		}
		e.Stopped(*h, at)
	case wire.TypeCondition:
		return notice(h, payload, e.conditions.reply)
	case wire.TypeJoined:
		e.joined(l.p.index, int(h.Rank))
	case wire.TypeEpoch:
		l.wrongEpoch(h)
	case wire.TypeMoved:
		l.p.moved(h)
	case wire.TypeReleased:
		if t := l.p.awaiting(h); t != nil { // why there is no answer comes, or has come, as a failure of its name
			t.happened(life.GiveUp)
		}
	case wire.TypeBye:
		e.cfg.Log.Debug("server leaves", zap.Stringer("server", l.p))
		l.p.mu.Lock()
		l.p.traffic.left = true
		l.p.mu.Unlock()
		l.goodbye()
	default:
		return fmt.Errorf("%v sends a %v frame", l.p, h.Type)
	}
	return nil
}

// lost is the server's word of a peer for which it ends its round. That an elastic job has lost a server it hears from the scheduler.
func (l *link) lost(gone wire.Lost) {
	if gone.Role == wire.RoleServer && l.p.e.epoch().Elastic {
		return
	}
	l.p.e.Lost(gone)
}

// wrongEpoch fails the operation whose frame the server refused, because it is in another epoch. The operation of a frame
// without an answer may have ended: then there is nobody but the log to tell.
func (l *link) wrongEpoch(h *wire.Header) {
	e := l.p.e
	why := func(o *operation) error {
		return fmt.Errorf("%w: %v of %q on rank %d: %v is in epoch %d, this rank was in %d", ErrUnsupported, o.Kind, o.name(), e.cfg.Rank, l.p, h.Epoch, o.epoch)
	}
	if t := l.p.awaiting(h); t != nil {
		err := why(t.o)
		t.o.giveUp(err)
		t.answered(err)
		return
	}
	defer e.handBack()
	if o := e.started(h.Tensor, h.Seq); o != nil {
		o.giveUp(why(o))
		return
	}
	e.cfg.Log.Warn("a server in another epoch has refused what this rank sent for an operation that has ended here",
		zap.Stringer("server", l.p), zap.Uint32("tensor", h.Tensor), zap.Uint64("operation", h.Seq), zap.Uint32("epoch", h.Epoch))
}

func notice[T any](h *wire.Header, payload []byte, handle func(T)) error {
	var v T
	if err := wire.DecodeJSON(h.Type, payload, &v); err != nil {
		return err
	}
	handle(v)
	return nil
}

// window handles the server's report of how much it has consumed; credit comes back.
func (l *link) window(consumed uint64) {
	l.p.mu.Lock()
	l.p.traffic.consumed(l.traffic, consumed)
	l.p.mu.Unlock()
	l.p.kick(false)
}
