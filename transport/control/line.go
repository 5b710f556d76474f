package control

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/valyala/bytebufferpool"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// maxQueue bounds the messages that wait on one line for a peer that does not read. A healthy peer
// has at most its own requests, a roster and a loss per node in it.
const maxQueue = 1 << 15

// maxBytes bounds the messages of one write.
const maxBytes = 1 << 20

// finishTime is how long the last messages of a line may take.
const finishTime = time.Second

// Line is one end of a connection with control messages. Sending never blocks the caller, and the line
// ends with its connection, which ends when the peer no longer runs.
type Line struct {
	conn  transport.Conn
	ended chan struct{} // closed by Fail
	wake  chan struct{}

	mu        lockorder.Mutex
	queue     []*wire.Control
	finishing bool
	why       error
}

// NewLine makes a line over conn.
func NewLine(conn transport.Conn) *Line {
	l := &Line{conn: conn, ended: make(chan struct{}), wake: make(chan struct{}, 1)}
	l.mu.Place(levelLine, "control.Line.mu")
	return l
}

// begin queues the first messages of a new line, before any other goroutine has it.
func (l *Line) begin(first []*wire.Control) {
	l.mu.Lock()
	l.queue = first
	l.mu.Unlock()
	l.nudge()
}

// Push queues a message, which must not change any more. It never waits; a queue that is full ends the line.
func (l *Line) Push(m *wire.Control) {
	l.mu.Lock()
	full := len(l.queue) >= maxQueue
	if !full && !l.finishing && l.why == nil {
		l.queue = append(l.queue, m)
	}
	l.mu.Unlock()
	if full {
		l.Fail(fmt.Errorf("the peer does not read: %d messages wait for it", maxQueue))
		return
	}
	l.nudge()
}

// Finish ends the line after what was pushed before it.
func (l *Line) Finish() {
	l.mu.Lock()
	l.finishing = true
	l.mu.Unlock()
	time.AfterFunc(finishTime, func() { l.Fail(errFinished) })
	l.nudge()
}

// Fail ends the line now. The first reason is the one that Run returns.
func (l *Line) Fail(why error) {
	l.mu.Lock()
	first := l.why == nil
	if first {
		l.why = why
		close(l.ended)
	}
	l.mu.Unlock()
	if first {
		l.conn.Close()
	}
}

// Run reads messages and hands each to handle until the line ends, and returns why it did. It may be
// called once; no goroutine of the line is left when it returns.
func (l *Line) Run(handle func(*wire.Control)) error {
	var writer sync.WaitGroup
	writer.Go(l.write)
	for {
		m := new(wire.Control)
		if err := Read(l.conn, m); err != nil {
			l.Fail(err)
			break
		}
		handle(m)
	}
	writer.Wait()
	return l.why
}

func (l *Line) nudge() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

var errFinished = errors.New("the connection was closed on purpose")

// write sends what is in the queue until the line ends.
func (l *Line) write() {
	for {
		select {
		case <-l.ended:
			return
		case <-l.wake:
		}
		l.mu.Lock()
		queue, last := l.queue, l.finishing
		l.queue = nil
		l.mu.Unlock()
		if err := l.sendAll(queue); err != nil {
			l.Fail(err)
		} else if last {
			l.Fail(errFinished)
		}
	}
}

// sendAll sends messages, as many in one write as fit.
func (l *Line) sendAll(queue []*wire.Control) error {
	b := bytebufferpool.Get()
	defer bytebufferpool.Put(b)
	for len(queue) > 0 {
		for b.Reset(); len(queue) > 0 && b.Len() < maxBytes; queue = queue[1:] {
			if err := wire.AppendJSON(b, wire.Header{Type: wire.TypeControl}, queue[0]); err != nil {
				return err
			}
		}
		if err := l.conn.Send(net.Buffers{b.B}); err != nil {
			return err
		}
	}
	return nil
}
