package worker

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// An answer that cannot be decoded ends its operation with an error that names the sender; an answer of impossible length
// ends the connection, before memory is allocated.
func TestAnAnswerThatCannotBeDecodedEndsTheOperation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, untagged = 4096, "without authentication tags"
		for _, c := range []struct {
			length, codec int
			flags         wire.Flags
			text          string
		}{{7, 1, 0, "malformed message"}, {4 * n, 0, 0, "in encoding 0"}, {300 << 10, 1, 0, "at most"}, {6, 1, wire.FlagEmpty, "says that there are none"}, {0, 1, wire.FlagEmpty, "gives no answer"}, {8, 1, 0, untagged}} {
			network := transporttest.NewNetwork(transporttest.Options{})
			secret := []byte("answers")
			l, err := network.Node("server", secret).Listen("server:1")
			if err != nil {
				t.Fatal(err)
			}
			e := New(Config{
				Membership: membership.NewView(&membership.Epoch{Round: 7, Workers: make([]membership.Worker, 2), Servers: []membership.Server{{Rank: membership.Dedicated, Node: membership.Node{Host: "gamma", Addresses: address.List{{Kind: "twin", At: "server:1"}}}}}}),
				Transports: transport.NewSet(nil, network.Node("worker", secret)), Control: &numbering{}, PartitionBytes: 1 << 20, Credit: 1 << 20, Conns: 2, DeclareTimeout: 10 * time.Second, Log: zap.NewNop(),
			})
			var conns []transport.Conn
			var greeted sync.WaitGroup
			greeted.Go(func() { conns = welcome(t, l) })
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			if err := e.Start(ctx, nil); err != nil {
				t.Fatal(err)
			}
			greeted.Wait()
			done := make(chan error, 1)
			in := make([]byte, 4*n)
			op := Op{
				Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{n}, Input: in, Output: in,
				Prescale: 1, Postscale: 1, Name: "w", Declared: options.Declared{Codec: "topk:0.1", Authenticated: c.text == untagged}, Done: func(_ Output, err error) { done <- err },
			}
			if err := e.Submit([]Op{op}); err != nil {
				t.Fatal(err)
			}
			h := wire.Header{Type: wire.TypeResult, DType: units.Float32, Tensor: 1, Codec: uint8(c.codec), Flags: c.flags}
			var got error
			for got == nil { // answers that come before their request are ignored
				if err := conns[0].Send(net.Buffers{wire.AppendFrame(nil, h, make([]byte, c.length))}); err != nil {
					got = <-done
					break
				}
				select {
				case got = <-done:
				case <-time.After(time.Millisecond):
				}
			}
			if text := got.Error(); c.length == 7 && !(strings.Contains(text, "partition 0 of \"w\" on rank 0") && strings.Contains(text, "host gamma")) ||
				!strings.Contains(text, c.text) && !errors.Is(got, ErrPeerLost) {
				t.Errorf("%d bytes in encoding %d: %v, want %q", c.length, c.codec, got, c.text)
			}
			for _, conn := range conns {
				conn.Close()
			}
			e.Shutdown(ctx)
			cancel()
			l.Close()
			network.Close()
		}
	})
}
