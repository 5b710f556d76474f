package server

import (
	"errors"
	"fmt"
	"sync"

	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// lent is a push of memory that a rank of this host lends. The rooms serve it as they do one of the worker in this process: they read
// it where it lies and write the answer where it belongs; a frame without a payload then says so.
type lent struct {
	c      *conn
	h      wire.Header
	lender transport.Lender
	done   func(answer wire.Header, err error)
}

// lents are those that are not in use.
var lents sync.Pool

// placeOf reads where such a push lies.
func placeOf(p *room.Payload) (at wire.Place, err error) {
	if p.Len() != wire.PlaceSize {
		return at, fmt.Errorf("a place of %d bytes, want %d", p.Len(), wire.PlaceSize)
	}
	data, err := p.Next(wire.PlaceSize)
	if err != nil {
		return at, err
	}
	err = at.Decode(data)
	return at, err
}

// inPlace serves such a push.
func (c *conn) inPlace(q *room.Request, at wire.Place) error {
	l, err := c.borrow(q, at)
	if err != nil {
		return err
	}
	err = c.r.serve(q)
	if err != nil {
		l.leave()
	}
	return err
}

// borrow makes a request one of memory in place.
func (c *conn) borrow(q *room.Request, at wire.Place) (*lent, error) {
	lender, ok := c.tc.(transport.Lender)
	switch {
	case !ok:
		return nil, errors.New("this connection lends no memory")
	case q.Codec != wire.CodecPlain || q.Has(wire.FlagEmpty) || q.Has(wire.FlagNoPull):
		return nil, errors.New("it does not travel in place")
	}
	in, err := lender.Borrow(at.Input, at.Length)
	if err != nil {
		return nil, err
	}
	out, err := lender.Borrow(at.Output, at.Length)
	if err != nil {
		lender.Return()
		return nil, err
	}
	l, ok := lents.Get().(*lent)
	if !ok {
		l = new(lent)
		l.done = l.answer
	}
	l.c, l.h, l.lender = c, q.Header, lender
	q.Payload, q.Reply = room.Lasting(in), room.Reply{Out: out, Done: l.done}
	return l, nil
}

// answer is the end of a request: the answer lies where it belongs, or there is none.
func (l *lent) answer(answer wire.Header, err error) {
	c, h := l.c, answer
	switch {
	case err == nil && h.Type == wire.TypeResult:
		h.Flags |= wire.FlagInPlace
	case err == nil && h.Type == wire.TypeMoved:
	default:
		h = l.h
		h.Type, h.Flags, h.Before = wire.TypeReleased, 0, 0
	}
	l.leave()
	c.send(outbox.Frame{Header: h})
}

func (l *lent) leave() {
	l.lender.Return()
	l.lender.Return()
	l.c, l.lender = nil, nil
	lents.Put(l)
}
