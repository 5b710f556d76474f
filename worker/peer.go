package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// peer is one server that this worker reaches over connections.
type peer struct {
	e     *Engine
	index int
	at    membership.Server
	links []*link // all of them, once it is connected

	reading sync.WaitGroup // goroutines that read them
	closed  sync.Once
	handed  atomic.Bool // traffic.lost, for those who have not the lock

	mu      lockorder.Mutex
	traffic traffic
}

func newPeer(e *Engine, index int, at membership.Server) *peer {
	p := &peer{
		e: e, index: index, at: at,
		traffic: traffic{rank: e.cfg.Rank, credit: e.cfg.Credit, active: e.cfg.Conns, answers: map[answerID]*task{}, stages: map[answerID]*stage{}, taken: map[answerID]wire.Taken{}, elastic: e.epoch().Elastic, kept: &e.kept, server: index},
	}
	p.mu.Place(levelWorker, "peer")
	return p
}

func (p *peer) String() string {
	if p.e.ofHost(p.index) {
		return fmt.Sprintf("the host's sums in worker %d (at %v)", p.at.Rank, p.at.Addresses)
	}
	within := ""
	if p.at.Rank != membership.Dedicated {
		within = fmt.Sprintf("in worker %d ", p.at.Rank)
	}
	return fmt.Sprintf("server %d (%son host %s at %v)", p.index, within, p.at.Host, p.at.Addresses)
}

// connect opens all connections to the server.
func (p *peer) connect(ctx context.Context) error {
	for range p.e.opens {
		l, err := p.dial(ctx)
		if err != nil {
			for _, l := range p.links {
				l.goodbye() // nobody reads it
			}
			return fmt.Errorf("rank %d cannot reach %v: %w", p.e.cfg.Rank, p, err)
		}
		p.mu.Lock()
		l.traffic = p.traffic.open()
		if arena := transport.Lends(l.conn); len(p.links) == 0 || arena == nil {
			p.traffic.arena = arena
		}
		p.links = append(p.links, l)
		p.mu.Unlock()
	}
	if arena := p.traffic.arena; arena != nil {
		p.traffic.staging = p.e.stageIn(arena)
	}
	p.e.wg.Add(len(p.links))
	for _, l := range p.links {
		p.reading.Go(l.read)
	}
	return nil
}

// mode implements way: a task has the answer that it asks for. In an elastic job it may have to be sent again until that has come.
func (p *peer) mode(t *task) life.Mode {
	switch {
	case !t.answer:
		return 0
	case p.traffic.elastic:
		return life.Answered | life.Retained
	case p.lend(t):
		return life.Answered | life.Lent
	}
	return life.Answered
}

// push implements way.
func (p *peer) push(t *task) {
	var gone error
	p.mu.Lock()
	lost := p.traffic.lost
	if !lost {
		gone = p.traffic.add(t)
	}
	p.mu.Unlock()
	if lost {
		heir := p.heir(t)
		heir.push(t)
		heir.kick(false)
	}
	if gone != nil {
		t.o.fail(gone)
	}
}

// lend has a sum stay where it is, if the server has mapped that memory. In an elastic job it might be needed again.
func (p *peer) lend(t *task) bool {
	if p.traffic.arena == nil || p.traffic.elastic || !t.lendable() {
		return false
	}
	memory := p.traffic.arena.Memory()
	in, ok := within(memory, t.in)
	out, too := within(memory, t.out)
	if !ok || !too {
		return false
	}
	at := wire.Place{Input: in, Output: out, Length: uint64(len(t.in))}
	t.placed, t.in = true, at.Append(t.place[:0])
	t.h.Flags |= wire.FlagInPlace
	return true
}

// within is the offset of b in memory that it may be a part of.
func within(memory, b []byte) (offset uint64, ok bool) {
	if len(memory) == 0 || len(b) == 0 {
		return 0, false
	}
	offset = uint64(uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&memory[0])))
	return offset, offset+uint64(len(b)) <= uint64(len(memory)) && offset < uint64(len(memory))
}

// releaseAll ends what the server has of this rank's memory, because a connection to it has ended.
func (p *peer) releaseAll() {
	p.mu.Lock()
	p.traffic.broken = true
	p.mu.Unlock()
	p.releaseLate()
}

// releaseLate is releaseAll again, if that was, for what has failed to leave since.
func (p *peer) releaseLate() {
	p.mu.Lock()
	if !p.traffic.broken {
		p.mu.Unlock()
		return
	}
	var tasks []*task
	for id, t := range p.traffic.answers {
		if t.placed && life.State(t.state.Load()).Left() {
			delete(p.traffic.answers, id)
			tasks = append(tasks, t)
		}
	}
	p.mu.Unlock()
	for _, t := range tasks {
		t.happened(life.GiveUp)
	}
}

// kick implements way: the connections look at the queue.
func (p *peer) kick(waits bool) {
	for _, l := range p.links {
		if waits {
			l.out.Push()
		} else {
			l.out.Kick()
		}
	}
}

// Sent implements outbox.Owner: the task's memory has left, or the connection has failed. Why, and so what
// becomes of the operation, is for the connection's reader to find out: there may be a goodbye to read.
func (t *task) Sent(err error) {
	if t.encode && t.o.e.epoch().Elastic {
		t.o.e.encoder.left(t)
	}
	if err == nil {
		t.happened(life.Sent)
		return
	}
	p, o, placed := t.way().(*peer), t.o, t.placed // the task may be used again afterwards
	gone := p.notSent(t)
	t.happened(life.SendFailed)
	if placed {
		p.releaseLate()
	}
	if gone != nil {
		o.fail(gone)
	}
}

// notSent keeps a task that was not sent until it is known why; at once where the server has left.
func (p *peer) notSent(t *task) (gone error) {
	p.mu.Lock()
	lost, gone := p.traffic.lost, p.traffic.gone
	if !lost {
		p.traffic.unsent = append(p.traffic.unsent, t)
	}
	p.mu.Unlock()
	if lost {
		return p.heir(t).(*peer).notSent(t)
	}
	return gone
}

// leave fails what still waits for a server that has left on purpose. A join needs every server; where the rank of this one has left, the
// others fail it too.
func (p *peer) leave(err error) {
	p.e.lend()
	p.mu.Lock()
	p.traffic.gone = err
	tasks := p.traffic.tasks()
	p.mu.Unlock()
	for _, t := range tasks {
		t.o.fail(err)
	}
	p.e.handBack()
	server := p.index
	if p.at.Rank == membership.Dedicated || p.traffic.elastic {
		server = -1
	}
	p.e.joinFails(server, err)
}

// awaiting finds the task that an answer belongs to; nil if nobody waits for it any more. Its memory is
// the caller's to write until answered.
func (p *peer) awaiting(h *wire.Header) *task {
	p.mu.Lock()
	t, s := p.traffic.answered(h)
	p.mu.Unlock()
	if s != nil {
		p.unstage(s, h, t)
	}
	return t
}

// covers notes what the held value covers that an answer is about to bring.
func (p *peer) covers(h *wire.Header, payload []byte) error {
	c, err := readCover(payload)
	if err != nil {
		return err
	}
	if h.Codec == wire.CodecSummed {
		d, err := p.givenOf(h)
		if d == nil {
			return err
		}
		if err = d.mayCover(c); err == nil {
			p.e.kept.covers(keyOf{h.Tensor, h.Part}, c)
		}
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.traffic.answers[idOf(h)]
	if t == nil {
		return nil
	}
	t.cover = c
	return t.o.d.mayCover(c)
}

// mayCover reports whether other servers take a value of the tensor that covers this.
func (d *declaration) mayCover(c *cover) error {
	for _, r := range c.Ranks {
		if _, member := slices.BinarySearch(d.t.Ranks, int(r.Rank)); !member {
			return fmt.Errorf("a value of %q has pushes of rank %d, which is not in its process set", d.t.Name, r.Rank)
		}
	}
	for _, changed := range c.Changes {
		if _, err := condition.Parse(changed.Model); err != nil {
			return fmt.Errorf("a value of %q is under a condition that is none: %w", d.t.Name, err)
		}
	}
	return nil
}

// answered says that the task's answer has been read, or why not. What it was sent from is not asked for again.
func (t *task) answered(err error) {
	if err != nil {
		t.o.setErr(err)
	}
	if t.sum != nil {
		t.o.e.staging.Put(t.sum)
		t.sum = nil
	}
	if t.encode && t.o.e.epoch().Elastic {
		t.happened(life.Confirm)
	}
	t.happened(life.Answer)
}

// forget implements way.
func (p *peer) forget(t *task) {
	if p.gone() {
		p.heir(t).forget(t)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.traffic.forget(t)
}

// cancel implements way.
func (p *peer) cancel(d *declaration, h wire.Header) {
	p.onFirst(func(c *connTraffic) { p.traffic.behind(c, d, outbox.Frame{Header: h}) })
}

// undeclared implements way.
func (p *peer) undeclared(h wire.Header, f wire.Failure) {
	frame, err := outbox.JSON(h, f)
	if err != nil {
		p.e.cfg.Log.Error("the other ranks are not told of a failure", zap.String("tensor", f.Name), zap.Error(err))
		return
	}
	p.control(frame)
}

// withdraw implements way.
func (p *peer) withdraw(h wire.Header, abandon func()) {
	if p.gone() {
		p.heirFor(asPieces, &h).withdraw(h, abandon)
		return
	}
	p.mu.Lock()
	abandon()
	if p.traffic.ended && !p.traffic.lost {
		p.traffic.late = append(p.traffic.late, h)
	} else if len(p.links) > 0 {
		c := p.links[0].traffic
		c.control = append(c.control, outbox.Frame{Header: h})
	}
	p.mu.Unlock()
	p.kick(false)
}

// report implements way.
func (p *peer) report(d *declaration, h wire.Header, iteration wire.Report) error {
	if p.gone() {
		return p.heirFor(d, &h).report(d, h, iteration)
	}
	f := outbox.Frame{Header: h}
	if h.Flags&wire.FlagEmpty == 0 {
		f = outbox.Encoded(h, iteration)
	}
	p.on(h.Tensor+h.Part, func(c *connTraffic) { p.traffic.behind(c, d, f) }) // behind what is supplied of it
	return nil
}

// condition implements way.
func (p *peer) condition(w wire.Condition) error {
	f, err := outbox.JSON(wire.Header{Type: wire.TypeCondition, Rank: uint16(p.e.cfg.Rank)}, w)
	if err == nil {
		p.control(f)
	}
	return err
}

// control queues a frame that goes before all tasks.
func (p *peer) control(f outbox.Frame) {
	p.onFirst(func(c *connTraffic) { c.control = append(c.control, f) })
}

// onFirst queues something on the first connection, if there is one.
func (p *peer) onFirst(queue func(*connTraffic)) { p.on(0, queue) }

// on queues something on the connection of a number, if there is one.
func (p *peer) on(number uint32, queue func(*connTraffic)) {
	p.mu.Lock()
	links := p.links
	if p.traffic.lost {
		links = nil
	}
	if len(links) == 0 {
		p.mu.Unlock()
		return
	}
	l := links[number%uint32(len(links))]
	queue(l.traffic)
	p.mu.Unlock()
	l.out.Kick()
}

// left implements way.
func (p *peer) left() (bytes uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.traffic.conns {
		bytes += c.travelled
	}
	return bytes
}

// join implements way. A server that is lost need not know. It uses every connection: it must not overtake what was pushed on another.
func (p *peer) join(h wire.Header) error {
	p.mu.Lock()
	if p.traffic.lost {
		p.mu.Unlock()
		return nil
	}
	for _, c := range p.traffic.conns {
		c.control = append(c.control, outbox.Frame{Header: h})
	}
	gone := p.traffic.gone
	p.mu.Unlock()
	p.kick(false)
	return gone
}

// lost implements way.
func (p *peer) lost(l wire.Lost) []chan struct{} {
	data, err := json.Marshal(l)
	if err != nil {
		return nil
	}
	return p.last(outbox.Frame{Header: wire.Header{Type: wire.TypeLost, Rank: uint16(p.e.cfg.Rank)}, Payload: data})
}

// bye implements way.
func (p *peer) bye() []chan struct{} {
	return p.last(outbox.Frame{Header: wire.Header{Type: wire.TypeBye, Rank: uint16(p.e.cfg.Rank)}})
}

// last queues the last frame of every connection, and tells when each has left.
func (p *peer) last(f outbox.Frame) []chan struct{} {
	var sent []chan struct{}
	p.mu.Lock()
	if p.traffic.lost {
		p.mu.Unlock()
		return nil
	}
	for _, c := range p.traffic.conns {
		done := make(chan struct{})
		f.Owner = closing{done}
		c.control = append(c.control, f)
		sent = append(sent, done)
	}
	p.mu.Unlock()
	p.kick(false)
	return sent
}

type closing struct{ done chan struct{} }

// Sent implements outbox.Owner.
func (c closing) Sent(error) { close(c.done) }

// close implements way: the connections end; what was being sent or read is settled.
func (p *peer) close() {
	p.closed.Do(func() {
		p.mu.Lock()
		links := p.links
		p.mu.Unlock()
		for _, l := range links {
			_ = l.conn.Close()
		}
		for _, l := range links {
			l.out.Close()
		}
	})
}

// reset implements way.
func (p *peer) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.traffic.reset()
}
