package jobtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// tampering changes the first frame that it fits, on the way between rank 1 and the nodes that it connects to.
type tampering struct {
	fits   func(h *wire.Header) bool
	change func(frame []byte) []byte

	mu   sync.Mutex
	done bool
}

func (x *tampering) of() transporttest.Tamper {
	return func(frame []byte) []byte {
		h, _ := transporttest.DecodedFrame(frame)
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.done || !x.fits(&h) {
			return frame
		}
		x.done = true
		return x.change(frame)
	}
}

// detour is a transport all of whose connections to others pass a relay.
type detour struct {
	transport.Transport
	network *transporttest.Network
	how     *tampering
}

func (d detour) Dial(ctx context.Context, address string) (transport.Conn, error) {
	l, err := d.network.Listen("127.0.0.1", "")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	dial := func() (net.Conn, error) { return d.network.Dial(context.Background(), "127.0.0.1", address) }
	go transporttest.Relay(l, dial, d.network.Integrity == "all", d.how.of, d.how.of)
	return d.Transport.Dial(ctx, l.Addr().String())
}

// flipPayload changes a bit of a payload.
func flipPayload(frame []byte) []byte {
	frame[wire.HeaderSize+wire.TagSize+1000] ^= 1
	return frame
}

// TestARelayBetweenNodesChangesNothingThatIsUsed: rank 1 reaches the server through the relay, and the round ends.
func TestARelayBetweenNodesChangesNothingThatIsUsed(t *testing.T) {
	data := func(h *wire.Header) bool { return h.Length > 50_000 } // too large for a batch
	of := func(t wire.Type) func(h *wire.Header) bool {
		return func(h *wire.Header) bool { return data(h) && h.Type == t }
	}
	for name, c := range map[string]struct {
		integrity string
		atServer  bool // the server notices it, not rank 1
		how       *tampering
	}{
		"a control message": {"control", true, &tampering{fits: func(h *wire.Header) bool { return h.Type == wire.TypeAnnounce }, change: func(frame []byte) []byte {
			frame[wire.HeaderSize+wire.TagSize+5] ^= 1
			return frame
		}}},
		"a header":             {"control", true, &tampering{fits: of(wire.TypePush), change: func(frame []byte) []byte { frame[24] ^= 1; return frame }}},
		"an object on its way": {"control", true, &tampering{fits: of(wire.TypePut), change: flipPayload}},
		"an object as it comes": {"control", false, &tampering{fits: func(h *wire.Header) bool {
			return data(h) && h.Flags&wire.FlagAuthenticated != 0 && h.Type == wire.TypeResult
		}, change: flipPayload}},
		"a push":              {"all", true, &tampering{fits: of(wire.TypePush), change: flipPayload}},
		"a sum":               {"all", false, &tampering{fits: of(wire.TypeResult), change: flipPayload}},
		"a frame, repeated":   {"control", true, &tampering{fits: of(wire.TypePush), change: func(frame []byte) []byte { return slices.Concat(frame, frame) }}},
		"a frame, dropped":    {"control", true, &tampering{fits: of(wire.TypePush), change: func([]byte) []byte { return nil }}},
		"a flag of an object": {"control", true, &tampering{fits: of(wire.TypePut), change: func(frame []byte) []byte { frame[5] &^= byte(wire.FlagAuthenticated >> 8); return frame }}},
	} {
		t.Run(name, func(t *testing.T) {
			errs, log := relayed(t, c.integrity, c.how)
			if !c.how.done {
				t.Fatal("no frame was changed")
			}
			for rank, err := range errs {
				want := "integrity check failed"
				if rank == 0 && !c.atServer { // the server may be the first to tell it that rank 1 has gone
					want = "peer lost"
				}
				if err == nil || errors.Is(err, errOtherBytes) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "worker 1") && !strings.Contains(err.Error(), "rank 1") {
					t.Errorf("rank %d: error %v, want %q with a rank", rank, err, want)
				}
			}
			if log.FilterMessage("connection lost").FilterLevelExact(zap.WarnLevel).Len() == 0 && c.atServer {
				t.Errorf("the server's log does not have it: %v", log.All())
			}
		})
	}
}

// TestTheSettingLeavesOutThePayloadsOfTensors, which is what the documentation says of control.
func TestTheSettingLeavesOutThePayloadsOfTensors(t *testing.T) {
	how := &tampering{fits: func(h *wire.Header) bool { return h.Length > 50_000 && h.Type == wire.TypePush }, change: flipPayload}
	errs, _ := relayed(t, "control", how)
	if err := errors.Join(errs...); !errors.Is(err, errOtherBytes) {
		t.Errorf("error %v, want a sum that is wrong", err)
	}
}

var errOtherBytes = errors.New("other bytes came than were sent")

// relayed runs sums and broadcasts of objects between two ranks, of which the second is behind a relay, and returns what
// each ends with, and the server's log.
func relayed(t *testing.T, integrity string, how *tampering) (errs []error, log *observer.ObservedLogs) {
	core, log := observer.New(zap.WarnLevel)
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, _ jobtest.Option) {
		network := transporttest.NewNetwork(transporttest.Options{Integrity: integrity})
		t.Cleanup(network.Close)
		near := network.Node("127.0.0.1", []byte(jobtest.Secret))
		sets := []*transport.Set{transport.NewSet(nil, near), transport.NewSet(nil, detour{near, network, how})}
		j := jobtest.Start(t, 2, jobtest.Transports(func(rank int) *transport.Set { return sets[max(rank, 0)] }), jobtest.Dedicated(1),
			func(j *jobtest.Job) { j.ServerLog = zap.New(core) })
		errs = j.Outcomes(func(rank int) error {
			for i := range 3 {
				if err := object(j, rank, i); err != nil {
					return err
				}
				if err := sum(j, rank, i); err != nil {
					return err
				}
			}
			return nil
		})
	})
	return errs, log
}

const objectBytes = 100_000

func object(j *jobtest.Job, rank, i int) error {
	want := bytes.Repeat([]byte{byte(i + 1)}, objectBytes)
	op := worker.Op{Kind: units.Broadcast, DType: units.Uint8, Shape: []int64{objectBytes}, Root: 1 - i%2, Name: fmt.Sprint("object", i), Input: make([]byte, objectBytes), Output: make([]byte, objectBytes)}
	op.Declared = options.Declared{Authenticated: true}
	if rank == op.Root {
		copy(op.Input, want)
		op.Output = op.Input
	}
	if _, err := j.Do(rank, op); err != nil {
		return err
	}
	if !bytes.Equal(op.Output, want) {
		return fmt.Errorf("rank %d, object %d: %w", rank, i, errOtherBytes)
	}
	return nil
}

func sum(j *jobtest.Job, rank, i int) error {
	op := worker.Op{Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Shape: []int64{objectBytes}, Name: fmt.Sprint("sum", i), Input: bytes.Repeat([]byte{1}, objectBytes), Output: make([]byte, objectBytes)}
	if _, err := j.Do(rank, op); err != nil {
		return err
	}
	if !bytes.Equal(op.Output, bytes.Repeat([]byte{2}, objectBytes)) {
		return fmt.Errorf("rank %d, sum %d: %w", rank, i, errOtherBytes)
	}
	return nil
}
