package worker

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// All ranks' states together have each partition once, and none has much more than the others.
func TestEveryPartitionHasOneKeeper(t *testing.T) {
	const ranks, parts = 3, 30
	sum := wire.Tensor{Name: "w", Kind: units.Allreduce, DType: units.Float32, Ranks: []int{4, 7, 9}, Parts: slices.Repeat([]uint32{64}, parts)}
	kept := make([]int, ranks)
	for i := range parts {
		kept[keeper(&sum, i, int64(64*i))]++
	}
	if !slices.Equal(kept, []int{10, 10, 10}) {
		t.Errorf("ranks keep %v partitions", kept)
	}
	// Rows of 8 bytes, of which the ranks get 2, 1 and 1; partitions of one row, and an empty one.
	scatter := wire.Tensor{Kind: units.Reducescatter, DType: units.Float32, Shape: []int64{4, 2}, Ranks: sum.Ranks, Parts: []uint32{8, 8, 8, 8, 0}}
	var keepers []int
	for i, offset := range offsetsOf(scatter.Parts)[:5] {
		keepers = append(keepers, keeper(&scatter, i, offset))
	}
	if !slices.Equal(keepers, []int{0, 0, 1, 2, 2}) {
		t.Errorf("rows are kept by %v, want those that get them", keepers)
	}
}

func TestAnswersKeepOneTensorAtMost(t *testing.T) { // else pieces of the tensor would not be pieces of the residual
	for _, setting := range []string{"none", "fp16", "int8:feedback=on", "onebit", "topk:0.1", "randomk:0.1", "threshold:1", "dgc:0.1"} {
		c, err := codec.Parse(setting)
		if err != nil {
			t.Fatal(err)
		}
		if n := c.Answer().ResidualBytes(10); n != 0 && n != 40 {
			t.Errorf("%s: %d bytes of residual for 10 elements", setting, n)
		}
	}
}

// served is, in virtual time, an engine whose server the test plays, after one operation on the coded tensor 1, "w" of 4096 elements.
func served(t *testing.T, patience time.Duration) (*Engine, []transport.Conn) {
	network := transporttest.NewNetwork(transporttest.Options{})
	t.Cleanup(network.Close)
	secret := []byte("state")
	l, err := network.Node("server", secret).Listen("server:1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	e := New(Config{
		Membership: membership.NewView(&membership.Epoch{Round: 7, Workers: make([]membership.Worker, 1), Servers: []membership.Server{{Rank: membership.Dedicated, Node: membership.Node{Host: "gamma", Addresses: address.List{{Kind: "twin", At: "server:1"}}}}}}),
		Transports: transport.NewSet(nil, network.Node("worker", secret)), Control: &numbering{}, PartitionBytes: 1 << 20, Credit: 1 << 20, Conns: 2, DeclareTimeout: patience, Log: zap.NewNop(),
	})
	var conns []transport.Conn
	var greeted sync.WaitGroup
	greeted.Go(func() { conns = welcome(t, l) })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	if err := e.Start(ctx, nil); err != nil {
		t.Fatal(err)
	}
	greeted.Wait()
	t.Cleanup(func() {
		for _, c := range conns {
			c.Close()
		}
		e.Shutdown(ctx)
	})
	const n = 4096
	done := make(chan error, 1)
	op := Op{
		Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0}}, Shape: []int64{n}, Input: make([]byte, 4*n),
		Output: make([]byte, 4*n), Prescale: 1, Postscale: 1, Name: "w", Declared: options.Declared{Codec: "topk:0.1"}, Done: func(_ Output, err error) { done <- err },
	}
	if err := e.Submit([]Op{op}); err != nil {
		t.Fatal(err)
	}
	c, _ := codec.Parse("topk:0.1")
	message := make([]byte, c.MaxEncoded(n))
	message = message[:c.Encode(message, make([]byte, 4*n), make([]byte, 4*n), codec.Stream{})]
	answer(t, conns[0], wire.Header{Type: wire.TypeResult, Tensor: 1, Codec: wire.CodecDeclared}, message, done)
	return e, conns
}

// answer sends a frame until the operation that waits for it has ended: the engine ignores one that comes too early.
func answer(t *testing.T, c transport.Conn, h wire.Header, payload []byte, done <-chan error) {
	t.Helper()
	for {
		_ = c.Send(net.Buffers{wire.AppendFrame(nil, h, payload)}) // it may have closed over the one before
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// asked is the count of the first request for a tensor's state, which no operation has.
const asked = 1 << 63

func TestTheServersPartOfAStateIsWhatTheServerSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 4096
		e, conns := served(t, 10*time.Second)
		size, err := e.State(nil)
		if err != nil {
			t.Fatal(err)
		}
		residual := bytes.Repeat([]byte{0, 0, 0x80, 0x3f}, n)
		for i, payload := range [][]byte{residual, nil} { // an empty answer is zeros
			state, done := make([]byte, size), make(chan error, 1)
			go func() {
				_, err := e.State(state)
				done <- err
			}()
			answer(t, conns[0], wire.Header{Type: wire.TypeResult, Tensor: 1, Seq: asked + uint64(i)}, payload, done)
			want := make([]byte, 4*n)
			copy(want, payload)
			if !bytes.Equal(state[size-4*n:], want) {
				t.Errorf("with %d bytes from the server, the state has other ones", len(payload))
			}
		}
	})
}

func TestAServerThatDoesNotGiveItsStateIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := served(t, 100*time.Millisecond)
		size, err := e.State(nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = e.State(make([]byte, size)); !errors.Is(err, ErrStall) || !strings.Contains(err.Error(), `"w"`) || !strings.Contains(err.Error(), "rank 0") {
			t.Errorf("from a server that is silent: %v", err)
		}

		e, conns := served(t, 10*time.Second)
		done := make(chan error, 1)
		go func() {
			_, err := e.State(make([]byte, size))
			done <- err
		}()
		var got error
		for got == nil {
			_ = conns[0].Send(net.Buffers{wire.AppendFrame(nil, wire.Header{Type: wire.TypeResult, Tensor: 1, Seq: asked}, make([]byte, 300<<10))})
			select {
			case got = <-done:
			case <-time.After(time.Millisecond):
			}
		}
		for _, text := range []string{`"w"`, "host gamma", "307200 bytes", "want 16384"} {
			if !strings.Contains(got.Error(), text) {
				t.Errorf("from a server that says too much: %v, want %q", got, text)
			}
		}
	})
}

// FuzzState sets any bytes. State returns an accepted state unchanged; no input panics, or has memory allocated for
// bytes that it lacks.
func FuzzState(f *testing.F) {
	e := New(Config{Membership: membership.NewView(&membership.Epoch{}), Control: &numbering{}, Log: zap.NewNop()})
	f.Cleanup(func() { e.Shutdown(context.Background()) })
	le := []byte(stateMagic + "\x00\x00\x00\x00" + "\x01\x00\x00\x00w" + "\x01\x00\x00\x00s" + "\x05\x00\x00\x00\x00\x00\x00\x00" +
		"\x04\x00\x00\x00\x00\x00\x00\x00abcd" + "\x01\x00\x00\x00" + "\x02\x00\x00\x00\x00\x00\x00\x00" + "\x04\x00\x00\x00\x00\x00\x00\x00efgh")
	if err := e.SetState(le); err != nil {
		f.Fatal(err)
	}
	for n := range len(le) + 1 {
		f.Add(le[:n])
	}
	f.Add(append(le, le[len(stateMagic):]...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e.SetState(b) != nil {
			return
		}
		size, err := e.State(nil)
		if err != nil || size > len(b) {
			t.Fatalf("%d bytes of state of %d: %v", size, len(b), err)
		}
		state := make([]byte, size)
		if _, err := e.State(state); err != nil {
			t.Fatal(err)
		}
		if err := e.SetState(state); err != nil {
			t.Fatal(err)
		}
		again := make([]byte, size)
		if n, err := e.State(again); err != nil || n != size || !bytes.Equal(state, again) {
			t.Errorf("it comes back as %d other bytes: %v", n, err)
		}
	})
}
