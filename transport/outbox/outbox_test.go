package outbox_test

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const fusion = 4 << 10

// line is a first-in, first-out queue.
type line struct {
	mu     sync.Mutex
	frames []outbox.Frame
}

func (q *line) push(f outbox.Frame) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.frames = append(q.frames, f)
}

func (q *line) Pop(most int) (outbox.Frame, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.frames) == 0 || len(q.frames[0].Payload) > most {
		return outbox.Frame{}, false
	}
	f := q.frames[0]
	q.frames = q.frames[1:]
	return f, true
}

func (q *line) Waiting() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.frames) > 0
}

// owner counts the calls of Sent and records their errors.
type owner struct {
	told   atomic.Int32
	failed atomic.Int32
}

func (o *owner) Sent(err error) {
	o.told.Add(1)
	if err != nil {
		o.failed.Add(1)
	}
}

// ends are the two ends of a connection over links that hold little, so that senders have to wait.
func ends(t *testing.T, o transporttest.Options) (near, far transport.Conn, network *transporttest.Network) {
	t.Helper()
	network = transporttest.NewNetwork(o)
	l, err := network.Node("far", []byte("secret")).Listen("far:1")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan transport.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if near, err = network.Node("near", []byte("secret")).Dial(ctx, "far:1"); err != nil {
		t.Fatal(err)
	}
	return near, <-accepted, network
}

// read reads n frames, alone or in batches, and calls back with each. It counts the frames that came in batches.
func read(t *testing.T, c transport.Conn, n int, each func(h *wire.Header, payload []byte)) (together int) {
	for got := 0; got < n; {
		before := got
		err := transporttest.Frame(c, func(h *wire.Header, payload []byte) error { each(h, payload); got++; return nil })
		if err != nil {
			t.Fatal(err)
		}
		if got > before+1 {
			together += got - before
		}
	}
	return together
}

// TestFramesOfManyGoroutinesArriveWholeAndInTheQueuesOrder has payloads from 0 to several times the
// connection's buffer. Each owner is called once.
func TestFramesOfManyGoroutinesArriveWholeAndInTheQueuesOrder(t *testing.T) {
	for _, fuse := range []int{0, fusion} {
		synctest.Test(t, func(t *testing.T) {
			near, far, network := ends(t, transporttest.Options{Latency: time.Millisecond, Bandwidth: 100 << 20, Buffer: 32 << 10})
			defer network.Close()
			q := &line{}
			out := outbox.New(near, q, fuse, func(err error) { t.Error(err) })
			const senders, each = 8, 30
			var o owner
			for s := range senders {
				random := rand.New(rand.NewPCG(1, uint64(s)))
				go func() {
					for i := range each {
						size := []int{0, 8, 100, 3000, 20000, 100000}[random.IntN(6)]
						payload := make([]byte, size)
						if size > 0 {
							binary.LittleEndian.PutUint64(payload, uint64(i))
						}
						q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush, Rank: uint16(s), Iteration: uint64(i)}, Payload: payload, Owner: &o})
						out.Kick()
						if random.IntN(4) == 0 {
							time.Sleep(time.Millisecond) // virtual
						}
					}
				}()
			}
			var next [senders]uint64
			together := read(t, far, senders*each, func(h *wire.Header, payload []byte) {
				if h.Iteration != next[h.Rank] {
					t.Fatalf("frame %d of sender %d came, want %d", h.Iteration, h.Rank, next[h.Rank])
				}
				next[h.Rank]++
				if len(payload) > 0 && binary.LittleEndian.Uint64(payload) != h.Iteration {
					t.Fatal("a payload came with another's header")
				}
			})
			if fuse > 0 && together == 0 {
				t.Error("small frames that waited together did not travel together")
			}
			synctest.Wait()
			if o.told.Load() != senders*each || o.failed.Load() != 0 {
				t.Errorf("owners were told %d times, %d of them of an error; want %d", o.told.Load(), o.failed.Load(), senders*each)
			}
			near.Close()
			far.Close()
			out.Close()
		})
	}
}

// TestWhenTheConnectionFailsEveryOwnerIsToldOnce: the owners of frames in a send, of waiting frames, and of later ones.
func TestWhenTheConnectionFailsEveryOwnerIsToldOnce(t *testing.T) {
	for _, fault := range []string{"after 300000 near->far reset", "after 64 near->far cut", "at 1ms near<->far freeze"} {
		synctest.Test(t, func(t *testing.T) {
			near, far, network := ends(t, transporttest.Options{Latency: time.Millisecond, Buffer: 16 << 10, PeerTimeout: time.Second})
			defer network.Close()
			if err := network.Script(fault); err != nil {
				t.Fatal(err)
			}
			q := &line{}
			failures := make(chan error, 10)
			out := outbox.New(near, q, fusion, func(err error) { failures <- err; near.Close() })
			go func() {
				var h wire.Header
				for far.ReadHeader(&h) == nil && far.ReadPayload(make([]byte, h.Length)) == nil {
					continue
				}
			}()
			var o owner
			const frames = 200
			for range frames {
				q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Payload: make([]byte, 10000), Owner: &o})
				out.Kick()
			}
			if err := <-failures; err == nil {
				t.Error("no reason")
			}
			synctest.Wait()
			q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Owner: &o})
			out.Kick()
			out.Close()
			q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Owner: &o})
			out.Kick()
			if o.told.Load() != frames+2 || o.failed.Load() < 3 {
				t.Errorf("%s: owners were told %d times, %d of them of an error; want %d", fault, o.told.Load(), o.failed.Load(), frames+2)
			}
			if len(failures) > 0 {
				t.Errorf("%s: the failure was told twice", fault)
			}
			far.Close()
		})
	}
}

// TestCloseSettlesASendThatWaitsForThePeer: the peer reads nothing, and the connection is closed.
func TestCloseSettlesASendThatWaitsForThePeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far, network := ends(t, transporttest.Options{Buffer: 16 << 10})
		defer network.Close()
		q := &line{}
		out := outbox.New(near, q, fusion, func(error) {})
		var o owner
		for range 5 {
			q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Payload: make([]byte, 1<<20), Owner: &o})
		}
		out.Kick() // must not wait
		synctest.Wait()
		if o.told.Load() != 0 {
			t.Fatal("a send that waits was told to be done")
		}
		near.Close()
		out.Close()
		if o.told.Load() != 5 || o.failed.Load() != 5 {
			t.Errorf("owners were told %d times, %d of them of an error; want 5", o.told.Load(), o.failed.Load())
		}
		far.Close()
	})
}

// late is a queue that gets a frame just after its sender found it empty and is still busy.
type late struct {
	line
	arrive func()
}

func (q *late) Pop(most int) (outbox.Frame, bool) {
	f, ok := q.line.Pop(most)
	if arrive := q.arrive; !ok && arrive != nil {
		q.arrive = nil
		arrive()
	}
	return f, ok
}

// TestAFrameThatComesWhileTheOutboxClosesIsSettled, although its Kick finds the outbox busy.
func TestAFrameThatComesWhileTheOutboxClosesIsSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far, network := ends(t, transporttest.Options{})
		defer network.Close()
		q := &late{}
		out := outbox.New(near, q, fusion, func(error) {})
		var o owner
		q.arrive = func() {
			q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Owner: &o})
			out.Kick()
		}
		near.Close()
		out.Close()
		if o.told.Load() != 1 || o.failed.Load() != 1 {
			t.Errorf("the owner was told %d times, %d of them of an error; want 1", o.told.Load(), o.failed.Load())
		}
		far.Close()
	})
}

// halted is a connection of a process that is stopped in the middle of a send.
type halted struct{ transport.Conn }

func (halted) TrySend(net.Buffers) (rest net.Buffers, busy bool, err error) {
	time.Sleep(time.Minute)
	return nil, false, nil
}

// TestTimeGoesOnWhileTheOutboxWaitsForASender: else virtual time stands still for good, and a core is busy.
func TestTimeGoesOnWhileTheOutboxWaitsForASender(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &line{}
		out := outbox.New(halted{}, q, fusion, func(error) {})
		var o owner
		q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Owner: &o})
		go out.Kick()
		synctest.Wait()
		out.Close()
		if o.told.Load() != 1 || o.failed.Load() != 0 {
			t.Errorf("the owner was told %d times, %d of them of an error; want 1 and 0", o.told.Load(), o.failed.Load())
		}
	})
}

// swallow is a connection that accepts everything at once.
type swallow struct{ transport.Conn }

func (swallow) TrySend(net.Buffers) (rest net.Buffers, busy bool, err error) { return nil, false, nil }

func TestSmallFramesTakeNoMemory(t *testing.T) {
	q := &line{}
	out := outbox.New(swallow{}, q, fusion, func(error) {})
	defer out.Close()
	var o owner
	payload := make([]byte, 1000)
	frames := make([]outbox.Frame, 0, 3)
	n := testing.AllocsPerRun(100, func() {
		q.frames = frames
		for range 3 { // sent in a batch
			q.push(outbox.Frame{Header: wire.Header{Type: wire.TypePush}, Payload: payload, Owner: &o})
		}
		out.Kick()
	})
	if n > 0 || o.told.Load() != 3*101 {
		t.Errorf("%v allocations to send 3 frames, owners told %d times", n, o.told.Load())
	}
}
