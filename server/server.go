// Package server aggregates: it sums the pushes of a key, decides by the key's condition when a rank
// gets its answer, and keeps what one rank puts until the others have got it. The same code runs
// embedded in a worker process, where that worker's own share takes the in-process way (Local), and
// dedicated on a CPU node.
//
// Reading order: server.go (what there is), round.go (one init to shutdown), tensor.go (a tensor and its room), conn.go and
// replies.go (frames in and out), local.go (the in-process way), names.go (ranks that disagree or do not come), join.go, elastic.go; then
// the rooms: package room (what passes between the shell and them), sums (what is summed), held (values that ranks read
// and change), transfer (broadcast, allgather, alltoall), messages (from one rank to another).
package server

import (
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/server/held"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Config says how a server works.
type Config struct {
	Rank          int // of the worker in whose process it is, or membership.Dedicated
	Log           *zap.Logger
	Memory        int64         // bound on the bytes held for tensors
	Fusion        int           // payloads of up to this many bytes travel together
	RankOrder     bool          // sum in rank order, so that runs repeat bit for bit
	Seed          uint64        // of the random numbers that codecs draw
	StallWarning  time.Duration // tell waiting ranks whom they wait for; 0 for never
	StallShutdown time.Duration // end an operation that waits this long; 0 for never
	Model         condition.Model
	// Sums has a server sum for the workers of this rank's host alone, and hand the sums on; nil for a server of the job.
	Host *Host
	// OnLost is called when a worker's connection ends without a goodbye.
	OnLost func(wire.Lost)
}

// Host is whose host a server sums for.
type Host struct {
	Rank   int // of the worker in this process
	Uplink room.Uplink
}

// roundWait bounds how long a connection of a round that this server has not heard of yet may wait for
// it: the scheduler tells all nodes at the same time.
const roundWait = 30 * time.Second

// Server is one server. Begin tells it who takes part; connections of that round are served until End.
type Server struct {
	cfg    Config
	pool   *mempool.Pool
	copies *held.Copies

	mu     lockorder.Mutex
	round  *round
	change chan struct{} // closed and made anew when round changes
	served atomic.Uint64 // payload bytes that have come
	conns  map[transport.Conn]struct{}
	closed bool

	wg   sync.WaitGroup
	quit chan struct{}
}

// New makes a server.
func New(cfg Config) *Server {
	s := &Server{
		cfg: cfg, pool: mempool.New(cfg.Memory),
		change: make(chan struct{}), conns: map[transport.Conn]struct{}{}, quit: make(chan struct{}),
	}
	s.mu.Place(room.LevelServer, "Server.mu")
	s.copies = held.NewCopies(s.pool)
	s.pool.Evict = s.copies.Evict
	s.wg.Add(1)
	go s.watchStalls()
	s.wg.Go(func() { ticks.Until(s.quit, mempool.RestPeriod, func(time.Time) { s.pool.Rest() }) })
	return s
}

// Begin starts a round with its first epoch and ends the one before. With a later epoch of the round it goes on in that.
func (s *Server) Begin(first *membership.Epoch) {
	if r := s.running(); r != nil && r.members.Now().Round == first.Round {
		r.follow(first)
		return
	}
	r := newRound(s, first)
	r.leftBefore(first)
	s.swap(r)
	s.cfg.Log.Debug("round begins", zap.Uint64("round", first.Round), zap.Int("workers", len(first.Workers)))
}

// End ends the round: connections are closed and everything held for it is let go.
func (s *Server) End() { s.swap(nil) }

func (s *Server) swap(next *round) {
	s.mu.Lock()
	before := s.round
	s.round = next
	close(s.change)
	s.change = make(chan struct{})
	s.mu.Unlock()
	if before != nil {
		before.end()
		s.pool.Release()
	}
}

// Deserted is closed once every worker of the round has left, on purpose or not: nobody needs this
// server any more.
func (s *Server) Deserted() <-chan struct{} {
	if r := s.running(); r != nil {
		return r.deserted
	}
	gone := make(chan struct{})
	close(gone)
	return gone
}

// Holds reports whether the server holds a value of the running round.
func (s *Server) Holds() bool {
	r := s.running()
	return r != nil && slices.ContainsFunc(r.inUse(), (*tensor).holds)
}

// Alone reports whether no worker of the running round has a connection to the server.
func (s *Server) Alone() bool {
	r := s.running()
	return r == nil || len(r.connected()) == 0
}

// NeededBy are the ranks that have not left the running round.
func (s *Server) NeededBy() []int {
	r := s.running()
	if r == nil {
		return nil
	}
	return r.all().Minus(r.leftRanks()).Ranks()
}

// Served is how many payload bytes have come to the server, in all rounds.
func (s *Server) Served() uint64 { return s.served.Load() }

// Tally is what a server has counted.
type Tally = room.Tally

// Tally is what the running round has counted since its tensors were declared.
func (s *Server) Tally() (sum Tally) {
	if r := s.running(); r != nil {
		for _, t := range r.inUse() {
			sum.Add(t.keys.Tally())
		}
	}
	return sum
}

// running is the running round, nil between rounds.
func (s *Server) running() *round {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.round
}

// Lost tells the running round of a peer that somebody else has lost from it.
func (s *Server) Lost(l wire.Lost) {
	if r := s.running(); r != nil && (l.Round == 0 || l.Round == r.members.Now().Round) {
		r.lose(l)
	}
}

// RemoveSet forgets the tensors of a process set that every worker has removed.
func (s *Server) RemoveSet(set wire.RemovedSet) {
	if r := s.running(); r != nil && r.members.Now().Round == set.Round {
		r.removeSet(set.ID)
	}
}

// Serve accepts connections until the listener is closed.
func (s *Server) Serve(l transport.Listener) error {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		} else if err != nil {
			return err
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = c.Close()
			continue
		}
		s.conns[c] = struct{}{}
		s.wg.Add(1)
		s.mu.Unlock()
		go s.serve(c)
	}
}

// Close ends the round and every connection. The listeners are the caller's to close, before.
func (s *Server) Close() {
	s.End()
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	close(s.quit)
	s.wg.Wait()
}

func (s *Server) serve(tc transport.Conn) {
	defer s.wg.Done()
	defer func() {
		_ = tc.Close()
		s.mu.Lock()
		delete(s.conns, tc)
		s.mu.Unlock()
	}()
	hello, err := readHello(tc)
	if err != nil {
		s.cfg.Log.Warn("connection refused", zap.Stringer("peer", tc.RemoteAddr()), zap.Error(err))
		return
	}
	r := s.awaitRound(hello.Round)
	if r == nil {
		s.cfg.Log.Debug("connection of a round that is over", zap.Stringer("peer", tc.RemoteAddr()), zap.Int("rank", hello.Rank))
		return
	}
	if !r.members.Now().Has(membership.Member{Role: membership.WorkerRole, Number: hello.Rank}) {
		s.cfg.Log.Warn("connection refused: no such rank", zap.Stringer("peer", tc.RemoteAddr()), zap.Int("rank", hello.Rank))
		return
	}
	newConn(r, tc, hello).serve()
}

// awaitRound waits until the round with this number begins, nil if it does not.
func (s *Server) awaitRound(id uint64) *round {
	timer := time.NewTimer(roundWait)
	defer timer.Stop()
	for {
		s.mu.Lock()
		r, change, closed := s.round, s.change, s.closed
		s.mu.Unlock()
		if r != nil && r.members.Now().Round == id {
			return r
		}
		if closed {
			return nil
		}
		select {
		case <-change:
		case <-timer.C:
			return nil
		case <-s.quit:
			return nil
		}
	}
}

// watchStalls looks for operations that wait too long.
func (s *Server) watchStalls() {
	defer s.wg.Done()
	ticks.Until(s.quit, agreement.Every(s.cfg.StallWarning, s.cfg.StallShutdown), func(now time.Time) {
		if r := s.running(); r != nil {
			r.checkStalls(now)
		}
	})
}
