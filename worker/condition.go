package worker

import (
	"cmp"
	"context"
	"fmt"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/transport/wire"
)

// conditions are the changes of synchronisation models that this worker has asked for and waits for.
type conditions struct {
	mu     lockorder.Mutex
	next   uint64
	asking map[uint64]chan wire.ConditionReply
}

func (c *conditions) open(servers int) (uint64, chan wire.ConditionReply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asking == nil {
		c.asking = map[uint64]chan wire.ConditionReply{}
	}
	c.next++
	replies := make(chan wire.ConditionReply, servers)
	c.asking[c.next] = replies
	return c.next, replies
}

func (c *conditions) close(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.asking, id)
}

func (c *conditions) reply(r wire.ConditionReply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case c.asking[r.ID] <- r: // a nil channel for one that nobody waits for
	default:
	}
}

// fail ends the changes that wait, of which a server has gone.
func (c *conditions) fail(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, replies := range c.asking {
		select {
		case replies <- wire.ConditionReply{ID: id, Error: why}:
		default:
		}
	}
}

// SetCondition changes the pull and push conditions of tensors on some servers, none for all, while training
// runs. All their keys change over when they have closed as many iterations as any rank has pushed of any of
// them by now. If one of them cannot take the conditions, none changes. It returns that number.
func (e *Engine) SetCondition(ctx context.Context, servers []int, w wire.Condition) (at uint64, err error) {
	there := len(e.epoch().Servers)
	for _, s := range servers {
		if s < 0 || s >= there {
			return 0, fmt.Errorf("%w: server %d, the job has %d", ErrInvalid, s, there)
		}
		if !e.epoch().Has(membership.Member{Role: membership.ServerRole, Number: s}) {
			return 0, fmt.Errorf("%w: server %d, which the job has lost", ErrInvalid, s)
		}
	}
	if len(servers) == 0 {
		for i := range there {
			if e.epoch().Has(membership.Member{Role: membership.ServerRole, Number: i}) {
				servers = append(servers, i)
			}
		}
	}
	w.Try = true
	replies, err := e.ask(ctx, servers, w)
	if err != nil {
		return 0, err
	}
	keys := 0
	for _, r := range replies {
		keys += r.Keys
		at = max(at, r.Pushed)
	}
	if keys == 0 {
		return 0, fmt.Errorf("%w: no tensor in use there has a name like %q", ErrInvalid, w.Names)
	}
	w.Try, w.At = false, at
	_, err = e.ask(ctx, servers, w)
	return at, err
}

// ask sends a change to the servers and collects their answers.
func (e *Engine) ask(ctx context.Context, servers []int, w wire.Condition) ([]wire.ConditionReply, error) {
	if err := e.Err(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, e.cfg.DeclareTimeout)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	var answers chan wire.ConditionReply
	w.ID, answers = e.conditions.open(len(servers))
	defer e.conditions.close(w.ID)
	for _, s := range servers {
		to := e.wayTo(s)
		if to == nil { // it has joined just now
			e.met(ctx)
			to = e.wayTo(s)
		}
		if to == nil {
			return nil, cmp.Or(e.Err(), fmt.Errorf("%w: server %d, which has joined, is not reached yet", ErrStall, s))
		}
		if err := to.condition(w); err != nil {
			return nil, err
		}
	}
	var replies []wire.ConditionReply
	for range servers {
		select {
		case r := <-answers:
			if r.Error != "" {
				return nil, fmt.Errorf("%w: %s", ErrInvalid, r.Error) // the others mostly say the same
			}
			replies = append(replies, r)
		case <-ctx.Done():
			if err := e.Err(); err != nil {
				return nil, err
			}
			return nil, fmt.Errorf("%w: %d of %d servers have not answered a change of conditions within %v", ErrStall, len(servers)-len(replies), len(servers), e.cfg.DeclareTimeout)
		}
	}
	return replies, nil
}
