package worker_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// lending is a transport whose peers map this process's memory. Nobody allocates there.
type lending struct {
	transport.Transport
	memory []byte
}

// Dial implements transport.Transport.
func (l lending) Dial(ctx context.Context, address string) (transport.Conn, error) {
	c, err := l.Transport.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	return lender{c, l}, nil
}

func (l lending) Memory() []byte           { return l.memory }
func (l lending) Alloc(int) []byte         { return nil }
func (l lending) Free(unsafe.Pointer) bool { return false }
func (l lending) Abandon(unsafe.Pointer)   {}

type lender struct {
	transport.Conn
	arena lending
}

func (l lender) Lends() transport.Arena                { return l.arena }
func (l lender) Borrow(uint64, uint64) ([]byte, error) { return nil, context.Canceled }
func (l lender) Return()                               {}

// A server that runs, but neither answers nor returns what it was lent, is given up for the whole round: until then it may
// write there.
func TestMemoryThatAServerDoesNotReturnEndsTheRound(t *testing.T) {
	for name, shutdown := range map[string]time.Duration{"of the rank": 5 * time.Second, "of the operation": 0} {
		t.Run(name, func(t *testing.T) {
			arena := lending{memory: make([]byte, partBytes)}
			perform(t, 1, 1, func(c *worker.Config) {
				arena.Transport = c.Transports.Required()
				c.Transports = transport.NewSet(nil, arena)
				c.DeclareTimeout = 10 * time.Second
				c.Patience = agreement.Patience{Warning: time.Second, Shutdown: shutdown, Margin: time.Second}
			}, func(th *theatre) {
				s := th.servers[0]
				go func() { _ = s.frames(s.conns[0], func(wire.Header, []byte) {}) }()
				done := make(chan error, 1)
				err := th.engine.Submit([]worker.Op{{
					Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}},
					Shape: []int64{partBytes}, Input: arena.memory, Output: arena.memory, Prescale: 1, Postscale: 1, Name: "x",
					Timeout: 20*time.Second - 4*shutdown, Done: func(_ worker.Output, err error) { done <- err },
				}})
				if err != nil {
					t.Fatal(err)
				}
				th.wantEnd(done, worker.ErrStall, `"x"`, "on rank 0 has waited")
				if why := (<-th.lost).Why; !strings.Contains(why, `keeps memory of "x", which rank 0 has given up`) {
					t.Errorf("the others hear: %s", why)
				}
			})
		})
	}
}

// What has gone to the heir of a lost server waits for that, and its error names that.
func TestWhatGoesOnAtAnHeirWaitsForIt(t *testing.T) {
	m := &moving{}
	perform(t, 2, 1, func(c *worker.Config) {
		elastic(c)
		c.Patience = agreement.Patience{Shutdown: 5 * time.Second, Margin: time.Second}
		m.members = c.Membership
	}, func(th *theatre) {
		m.theatre = th
		for _, s := range th.servers {
			go func() { _ = s.frames(s.conns[0], func(wire.Header, []byte) {}) }()
		}
		done := th.sum("x", 8)
		th.engine.Flush(true)
		synctest.Wait() // it is declared, and pushed to the server
		m.loses(0, false)
		th.wantEnd(done, worker.ErrStall, `"x" stalled`, "for server 1 (")
	})
}
