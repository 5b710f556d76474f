// Package roomtest plays the shell and the ranks for tests of one room.
package roomtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Shell is a shell that notes what a room asks for. Its sets are changed between requests only.
type Shell struct {
	Round   room.Round
	HasLeft rankset.Set
	HasDone rankset.Set // has joined
	OnDrop  func(iteration uint64)

	mu   sync.Mutex
	said []string
}

// New makes a shell of some ranks with so much memory. All of it must be back at the test's end.
func New(t testing.TB, ranks int, memory int64) *Shell {
	s := &Shell{Round: room.Round{
		Pool: mempool.New(memory), Log: zap.NewNop(), Model: condition.BSP(), Membership: membership.NewView(&membership.Epoch{Workers: make([]membership.Worker, ranks)}),
		StallWarning: time.Second, StallShutdown: time.Minute,
	}}
	workers := s.Round.Membership.Now().Workers
	for i := range workers {
		workers[i].Host = fmt.Sprint("host", i)
	}
	return s
}

// CheckMemory reports lent memory that has not come back.
func (s *Shell) CheckMemory(t testing.TB) {
	t.Helper()
	if lent := s.Round.Pool.Lent(); lent != 0 {
		t.Errorf("%d bytes did not come back", lent)
	}
}

// Tensor announces a tensor of all ranks.
func (s *Shell) Tensor(t testing.TB, w wire.Tensor) *room.Tensor {
	t.Helper()
	for i := range s.Round.Membership.Now().Workers {
		w.Ranks = append(w.Ranks, i)
	}
	if w.Prescale == 0 {
		w.Prescale, w.Postscale = 1, 1
	}
	n, err := room.NewTensor(&w, &s.Round, s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Elastic has the job be one that servers join and leave: it has two, of which this is the first.
func (s *Shell) Elastic(t testing.TB) {
	t.Helper()
	node := func(i int, addresses ...address.Address) membership.Node {
		return membership.Node{Incarnation: uint64(i), Host: fmt.Sprint("host", i), Addresses: addresses}
	}
	var workers []membership.Node
	for i := range s.Round.Membership.Now().Workers {
		workers = append(workers, node(i+1))
	}
	epoch, err := membership.Found(1, "round-robin", workers, []membership.Node{node(100, address.Address{Kind: "tcp", At: "h:1"}), node(101, address.Address{Kind: "tcp", At: "h:2"})})
	if err != nil {
		t.Fatal(err)
	}
	epoch.Elastic, s.Round.Elastic, s.Round.Membership = true, true, membership.NewView(epoch)
}

// MoveTo begins an epoch in which the first partition of tensor 1 is on a server.
func (s *Shell) MoveTo(t testing.TB, server int) {
	t.Helper()
	now := s.Round.Membership.Now()
	next, err := now.Next(membership.Change{Moved: membership.MovedBy(now.Moved().Times()+1, []membership.Move{{Number: 1, To: server}})})
	if err == nil {
		err = s.Round.Membership.Advance(next)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Said is what the room has asked for since the last call.
func (s *Shell) Said() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	said := s.said
	s.said = nil
	return said
}

func (s *Shell) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = append(s.said, fmt.Sprintf(format, args...))
}

// Joined implements room.Shell.
func (s *Shell) Joined() rankset.Set { return s.HasDone }

// Left implements room.Shell.
func (s *Shell) Left() rankset.Set { return s.HasLeft }

// Fail implements room.Shell.
func (s *Shell) Fail(seq uint64, _ units.FailureCode, text string) { s.note("fail %d: %s", seq, text) }

// Refuse implements room.Shell.
func (s *Shell) Refuse(rank int, seq uint64, _ units.FailureCode, text string) {
	s.note("refuse %d of rank %d: %s", seq, rank, text)
}

// Forget implements room.Shell.
func (s *Shell) Forget(seq uint64) { s.note("forget %d", seq) }

// Drop implements room.Shell.
func (s *Shell) Drop(iteration uint64) {
	s.note("drop from %d", iteration)
	if s.OnDrop != nil {
		s.OnDrop(iteration)
	}
}

// Warn implements room.Shell.
func (s *Shell) Warn(rank int, missing rankset.Set, waited time.Duration) {
	s.note("rank %d waits for %v, %v", rank, missing, waited)
}

// Stop implements room.Shell.
func (s *Shell) Stop(rank int, _ wire.Header, at wire.Stop) {
	s.note("stop rank %d at %d", rank, at.Last)
}

// Answer is what a rank has got.
type Answer struct {
	wire.Header
	Payload []byte
	Err     error // of the worker in this process
}

// Rank plays one rank: as a connection, or as the worker in this process.
type Rank struct {
	Number  int
	Local   bool
	Answers []Answer
}

// Send implements room.Sender.
func (r *Rank) Send(h wire.Header, payload []byte, owner room.Owner, _ int) {
	r.Answers = append(r.Answers, Answer{Header: h, Payload: bytes.Clone(payload)})
	if owner != nil {
		owner.Sent(nil)
	}
}

// ReadPayload implements room.Source: a connection's payload are ones, of float32.
func (r *Rank) ReadPayload(b []byte) error {
	copy(b, Floats(len(b)/4, 1))
	return nil
}

// Request makes the rank's request. The worker in this process expects as many bytes as out.
func (r *Rank) Request(h wire.Header, payload []byte, out int) *room.Request {
	h.Rank = uint16(r.Number)
	q := &room.Request{Header: h, Payload: room.Memory(payload), Reply: room.Reply{To: r}}
	if r.Local {
		if h.Codec == wire.CodecPlain {
			q.Payload = room.Lasting(payload)
		}
		memory := make([]byte, out)
		q.Reply = room.Reply{Out: memory, Done: func(h wire.Header, err error) {
			r.Answers = append(r.Answers, Answer{Header: h, Payload: memory, Err: err})
		}}
	}
	return q
}

// Take gives the answers since the last call.
func (r *Rank) Take() []Answer {
	answers := r.Answers
	r.Answers = nil
	return answers
}

// Floats are n times f.
func Floats(n int, f float32) (b []byte) {
	for range n {
		b = binary.NativeEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

// Allreduce is a plain sum of one partition with n float32 elements.
func Allreduce(n int) wire.Tensor {
	return wire.Tensor{ID: 1, Name: "w", Kind: units.Allreduce, Op: units.Sum, DType: units.Float32, Parts: []uint32{uint32(4 * n)}}
}
