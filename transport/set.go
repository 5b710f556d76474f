package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
)

// optionalPatience is how long a dial of an optional kind may take before the next kind is tried. A server listens
// before others hear of it: one that does not answer for so long cannot be reached by that kind. It is long enough for a
// fabric's first messages on a crowded machine.
const optionalPatience = 5 * time.Second

// Set is the transports of one process, one of each kind, in its order of preference. The last is required: every
// process of the job has it, and the scheduler is reached by it. The others are optional.
//
// Both ends choose: a server has an address of each kind in which it could listen, and whoever connects tries those
// in its own order. A kind that the server has no address of is passed over. An optional kind that fails is reported
// once, and the next is tried; where that reaches the server, the kind is not tried with this server again. Every kind
// authenticates.
type Set struct {
	kinds []Transport
	fell  []sync.Once // of each kind: the fall-back to the next one was logged
	short sync.Once   // that memory was not registered was logged
	log   *zap.Logger

	mu     sync.Mutex
	failed map[address.Address]struct{} // of optional kinds, by which a server is not reached
}

// maxFailed bounds what a set remembers.
const maxFailed = limits.MaxServers

// NewSet makes a set of at least one transport. The log may be nil.
func NewSet(log *zap.Logger, kinds ...Transport) *Set {
	return &Set{kinds: kinds, fell: make([]sync.Once, len(kinds)), log: cmp.Or(log, zap.NewNop()), failed: map[address.Address]struct{}{}}
}

// Required is the transport that every process of the job has.
func (s *Set) Required() Transport { return s.kinds[len(s.kinds)-1] }

// String names the kinds in their order.
func (s *Set) String() string {
	return strings.Join(each.Of(s.kinds, Transport.Kind), ", ")
}

// Listen listens with every kind: with the required one at an address, with the others where they choose. An optional
// kind that cannot listen is left out.
func (s *Set) Listen(at string) (Listeners, error) {
	var all Listeners
	for i, t := range s.kinds {
		where := ""
		if s.required(i) {
			where = at
		}
		l, err := t.Listen(where)
		switch {
		case err == nil:
			all = append(all, l)
		case s.required(i):
			all.Close()
			return nil, err
		default:
			s.log.Warn("this process cannot be reached by an optional transport", zap.String("kind", t.Kind()), zap.Error(err))
		}
	}
	return all, nil
}

// Dial connects to a server by the first kind that succeeds, which is the Network of the connection's RemoteAddr. One that refuses has ended: a server
// listens before others hear of it.
func (s *Set) Dial(ctx context.Context, to address.List) (Conn, error) {
	var failed error
	var without []address.Address // what did not reach the server
	for i, t := range s.kinds {
		at, ok := to.Of(t.Kind())
		if !ok || s.hasFailed(address.Address{Kind: t.Kind(), At: at}) {
			continue
		}
		conn, err := s.dial(ctx, i, at)
		if err == nil {
			s.log.Debug("connected", zap.String("kind", t.Kind()), zap.String("address", at))
			s.remember(without)
			return conn, nil
		}
		without = append(without, address.Address{Kind: t.Kind(), At: at})
		if failed != nil {
			err = fmt.Errorf("%w; %w", failed, err)
		}
		failed = err
		if ctx.Err() != nil || s.required(i) {
			break
		}
		if errors.Is(err, ErrElsewhere) { // as expected
			s.log.Debug("a server is out of reach of an optional transport", zap.String("kind", t.Kind()), zap.Error(err))
			continue
		}
		s.fell[i].Do(func() {
			s.log.Warn("an optional transport does not reach a server: the next one is tried", zap.String("kind", t.Kind()), zap.Error(err))
		})
	}
	if failed == nil {
		return nil, fmt.Errorf("no transport in common: the server listens by [%v], this process connects by [%v]", to, s)
	}
	return nil, failed
}

// Register registers memory with each transport that takes that (Registrar): what is sent from there, or read into it, then needs no registration of
// its own. Where one fails, the memory is used as any other.
func (s *Set) Register(memory []byte) (regions []Region) {
	for _, t := range s.kinds {
		to, ok := t.(Registrar)
		if !ok {
			continue
		}
		r, err := to.Register(memory)
		if err != nil {
			s.short.Do(func() {
				s.log.Warn("memory cannot stay registered with an adapter (is `ulimit -l` unlimited?): it is registered anew for each transfer", zap.String("kind", t.Kind()), zap.Int("bytes", len(memory)), zap.Error(err))
			})
			continue
		}
		s.log.Debug("memory is registered", zap.String("kind", t.Kind()), zap.Int("bytes", len(memory)))
		regions = append(regions, r)
	}
	return regions
}

func (s *Set) hasFailed(a address.Address) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, failed := s.failed[a]
	return failed
}

// remember notes the addresses of a server that is reached otherwise.
func (s *Set) remember(failed []address.Address) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range failed {
		if len(s.failed) < maxFailed {
			s.failed[a] = struct{}{}
		}
	}
}

func (s *Set) required(i int) bool { return i == len(s.kinds)-1 }

func (s *Set) dial(ctx context.Context, i int, at string) (Conn, error) {
	if !s.required(i) {
		patience := optionalPatience
		if deadline, ok := ctx.Deadline(); ok {
			patience = min(patience, time.Until(deadline)/2) // the other half is for the kinds that follow
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	return s.kinds[i].Dial(Listening(ctx), at)
}

// Listeners are the listeners of one process, one of each kind.
type Listeners []Listener

// Addresses is where they are reached.
func (l Listeners) Addresses() address.List {
	return each.Of(l, func(one Listener) address.Address {
		return address.Address{Kind: one.Addr().Network(), At: one.Addr().String()}
	})
}

// Expect tells all of them how many connections a job opens at its start.
func (l Listeners) Expect(connections int) {
	for _, one := range l {
		one.Expect(connections)
	}
}

// Close closes all of them.
func (l Listeners) Close() {
	for _, one := range l {
		one.Close()
	}
}
