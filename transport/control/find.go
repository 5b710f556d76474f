package control

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// Where a node looks for the scheduler. Config.Address has its place, or all at which it may be started. Without a list, the scheduler of an elastic
// job is in its lowest live rank, at that rank's standby (wire.Node.Standby): nodes ask where it was last, and then the live ranks in their order. The first that answers has the
// scheduler, or will have it as soon as it misses the scheduler itself. A rank that no lower one answers takes over (Config.Lead), unless a
// higher one has done so while it was stopped.

// defaultAttempt bounds one attempt to reach a place.
const defaultAttempt = 5 * time.Second

// How long a place has to answer, in sweeps of stream's watch (transport.SweepsPerTimeout). That is a whole attempt, half the peer timeout, but not at a place that has fallen silent, which
// would have to answer just now. And where the line to the scheduler fell silent, most of the timeout is over: for some time searches are quick ones.
const (
	sweepsPerAttempt = transport.SweepsPerTimeout / 2
	silentSweeps     = 2
	lastSweeps       = 4 // the others, where one has the scheduler: one that goes on elsewhere waits for its nodes about as long as they would wait twice for the place where it was
	quickSweeps      = 8 // for so long; and so long has a worker whose silence this node would notice, too
	blindSweeps      = 4 // a worker without a server, whose silence other workers do not notice
	aboveSweeps      = 3 // a higher rank, which has taken over only if this one did not answer it
)

// searchWidth is at how many places a node asks at the same time.
const searchWidth = 16

// places are the addresses at which the scheduler may be, in the order in which to ask. Where they are standbys, lead says that this node takes
// over if nobody answers.
type places struct {
	at       []string
	standbys bool
	lead     string   // the address of the own standby, "" for none
	above    []string // the standbys of higher ranks than this one
	blind    []string // those of workers without a server
	quick    bool     // the search is a quick one
}

// sweeps is how long a place has to answer that is not silent.
func (p places) sweeps(at string) time.Duration {
	switch {
	case !p.quick:
		return sweepsPerAttempt
	case slices.Contains(p.above, at):
		return aboveSweeps
	case slices.Contains(p.blind, at):
		return blindSweeps
	}
	return quickSweeps
}

// silence is how long a place has in sweeps that is silent.
func (p places) silence() time.Duration {
	if p.quick {
		return silentSweeps / 2
	}
	return silentSweeps
}

func (c *Client) places() places {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := places{at: strings.Split(c.config.Address, ",")}
	if c.listed() || c.memory.roster == nil {
		p.at = c.lastFirst(p.at, p.at)
		return p
	}
	gone := map[int]bool{}
	for _, l := range c.memory.roster.Gone {
		gone[l.Rank] = gone[l.Rank] || l.Role == wire.RoleWorker
	}
	var at, blind []string
	lead := ""
	for rank, n := range c.memory.roster.Workers {
		switch {
		case gone[rank] || n.Standby == "":
		case n.Session == c.session && c.config.Lead != nil:
			lead, p.at, at = n.Standby, at, nil
		default:
			at = append(at, n.Standby)
			if len(n.Addresses) == 0 || n.HostSums {
				blind = append(blind, n.Standby)
			}
		}
	}
	quick := time.Now().Before(c.quick)
	switch {
	case lead != "":
		return places{c.lastFirst(p.at, slices.Concat(p.at, at)), true, lead, at, blind, quick}
	case len(at) > 0:
		return places{c.lastFirst(at, at), true, "", nil, blind, quick}
	}
	return p
}

// sweep is the interval of stream's watch.
func (c *Client) sweep() time.Duration { return c.config.Attempt / sweepsPerAttempt }

// silent reports whether this node has found the process at a place silent.
func (c *Client) silent(at string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.memory.roster != nil && slices.Contains(c.memory.silentPlaces(), at)
}

// listed reports whether the scheduler is in a process of its own, at one of several addresses.
func (c *Client) listed() bool { return strings.Contains(c.config.Address, ",") }

// lastFirst puts the place of the last line before others, if it is one that can be: who looks for the scheduler too has it there still.
func (c *Client) lastFirst(at, can []string) []string {
	if !slices.Contains(can, c.at) {
		return at
	}
	return append([]string{c.at}, slices.DeleteFunc(at, func(a string) bool { return a == c.at })...)
}

// find makes a connection to the scheduler and says hello on it, until ctx ends.
func (c *Client) find(ctx context.Context) (transport.Conn, error) {
	start := time.Now()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		conn, err := c.look(ctx)
		if err == nil || auth.Refused(err) || ctx.Err() != nil && len(c.places().at) == 1 {
			return conn, err
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2)):
		case <-ctx.Done():
			return nil, fmt.Errorf("no success in %v (%w); the last attempts: %w", time.Since(start).Round(time.Millisecond), context.Cause(ctx), err)
		}
	}
}

// look is one search. Where there is one place alone it lasts until the scheduler is there, or ctx ends.
func (c *Client) look(ctx context.Context) (transport.Conn, error) {
	p := c.places()
	if len(p.at) > 1 || p.standbys {
		return c.search(ctx, p)
	}
	for {
		conn, err := c.config.Transport.Dial(ctx, p.at[0])
		if err != nil {
			return nil, err
		}
		if err = Send(conn, wire.TypeHello, c.config.Hello); err == nil {
			c.settle(p.at[0])
			return conn, nil
		}
		conn.Close() // it died between the two
	}
}

// settle notes where the scheduler is.
func (c *Client) settle(at string) {
	c.mu.Lock()
	c.at = at
	c.mu.Unlock()
}

// errNoScheduler is the error of a place at which a process runs that has no scheduler at present.
var errNoScheduler = errors.New("a process answers there, without a scheduler at present")

// search asks at several places at the same time, and takes the first in their order: nodes that search at the same time choose the same.
func (c *Client) search(ctx context.Context, p places) (transport.Conn, error) {
	conn, failed := c.first(ctx, p, p.at, errNoScheduler) // a process without one will notice, if the scheduler is gone
	if p.lead != "" && conn == nil && ctx.Err() == nil && !errors.Is(errors.Join(failed...), errNoScheduler) {
		if conn, _ = c.first(ctx, p, p.above, nil); conn == nil {
			c.config.Lead()
			var errs []error
			conn, errs = c.first(ctx, places{}, []string{p.lead}, nil)
			failed = append(failed, errs...)
		}
	}
	if conn != nil {
		return conn, nil
	}
	if !slices.ContainsFunc(failed, func(err error) bool { return !auth.Refused(err) }) {
		return nil, failed[0]
	}
	return nil, fmt.Errorf("no scheduler: %s", strings.Join(each.Of(failed, error.Error), "; "))
}

// first asks at some places for the scheduler. It returns the first in their order that has it, or what is wrong with each, up to the first that is
// wrong so that no later one is to be taken.
func (c *Client) first(ctx context.Context, p places, at []string, last error) (conn transport.Conn, errs []error) {
	for group := range slices.Chunk(at, searchWidth) {
		which, conn, failed := c.firstOf(ctx, p, group, last)
		errs = append(errs, failed...)
		switch {
		case conn != nil:
			c.settle(group[which])
			return conn, nil
		case ctx.Err() != nil, last != nil && errors.Is(errors.Join(failed...), last):
			return nil, errs
		}
	}
	return nil, errs
}

// firstOf is first at a few places, at the same time. When one has the scheduler, the others have a little time left. So it is in a quick search where a process answers that has none:
// another search follows. There what is left is less, and least at silent places; but who has completed the handshake of a connection is not stopped, and has its whole time.
func (c *Client) firstOf(ctx context.Context, p places, at []string, last error) (which int, conn transport.Conn, errs []error) {
	attempt, cancel := context.WithCancel(transport.Once(ctx))
	defer cancel()
	answered, anAnswer := context.WithCancel(attempt)
	defer anAnswer()
	type answer struct {
		conn transport.Conn
		err  error
	}
	answers := make([]chan answer, len(at))
	for i := range at {
		answers[i] = make(chan answer, 1)
		go func() {
			its, giveUp := context.WithTimeout(attempt, p.sweeps(at[i])*c.sweep())
			defer giveUp()
			var runs atomic.Bool // a process has made a connection there: it is not stopped
			unlessItRuns := func() {
				if !runs.Load() {
					giveUp()
				}
			}
			ifSilent := func() {
				if c.silent(at[i]) {
					unlessItRuns()
				}
			}
			context.AfterFunc(answered, func() {
				if !p.quick {
					time.AfterFunc(lastSweeps*c.sweep(), giveUp)
					return
				}
				time.AfterFunc(c.sweep()/4, ifSilent)
				time.AfterFunc(c.sweep(), unlessItRuns)
			})
			go ticks.Until(its.Done(), p.silence()*c.sweep(), func(time.Time) { ifSilent() })
			conn, err := c.attempt(its, at[i], &runs)
			if err == nil || p.quick && last != nil && errors.Is(err, last) {
				anAnswer()
			}
			answers[i] <- answer{conn, err}
		}()
	}
	over := false
	for i := range answers {
		a := <-answers[i] // each ends soon after the attempt
		switch {
		case over && a.err == nil:
			a.conn.Close()
		case over:
		case a.err == nil:
			which, conn, over = i, a.conn, true
		default:
			errs = append(errs, a.err)
			over = last != nil && errors.Is(a.err, last)
		}
		if over {
			cancel()
		}
	}
	return which, conn, errs
}

// attempt connects to a place. A scheduler is one that answers: a process may be stopped, or have none.
func (c *Client) attempt(ctx context.Context, at string, runs *atomic.Bool) (transport.Conn, error) {
	conn, err := c.config.Transport.Dial(ctx, at)
	if err != nil {
		return nil, err
	}
	runs.Store(true)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	var answer wire.Control
	if err = Send(conn, wire.TypeHello, c.config.Hello); err == nil {
		if err = Send(conn, wire.TypeControl, askClock()); err == nil {
			err = Read(conn, &answer)
		}
	}
	if stop() && err == nil && answer.Clock != nil {
		return conn, nil
	}
	conn.Close()
	if err == nil {
		err = net.ErrClosed
	}
	return nil, fmt.Errorf("%s: %w (%w)", at, errNoScheduler, err)
}
