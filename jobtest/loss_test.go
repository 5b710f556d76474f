package jobtest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/tcp"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// raw is a rank that the test plays itself: it takes part like any other, then does what none should.
type raw struct {
	t       testing.TB
	rank    int
	control *control.Client
	epoch   *membership.Epoch
	conns   []transport.Conn // one to each server
}

// startBeside starts all ranks but the last, which is the test's own.
func (j *job) startBeside() *raw {
	j.t.Helper()
	r := &raw{t: j.t, rank: len(j.workers) - 1}
	var wg sync.WaitGroup
	wg.Go(func() { r.join(j.settings) })
	j.start(j.all().Ranks[:r.rank]...)
	wg.Wait()
	if j.t.Failed() {
		j.t.FailNow()
	}
	return r
}

func (r *raw) join(s settings.Settings) {
	ctx, cancel := context.WithTimeout(r.t.Context(), hang)
	defer cancel()
	tr := tcp.New(tcp.Config{Secret: []byte(testSecret)})
	var err error
	r.control, err = control.Dial(ctx, control.Config{Transport: tr, Address: s.Scheduler, Hello: wire.Hello{Role: wire.RoleWorker, Rank: r.rank}})
	if err != nil {
		r.t.Error(err)
		return
	}
	r.t.Cleanup(func() { r.control.Close() })
	r.epoch, err = r.control.Register(ctx, wire.Register{Node: wire.Node{Role: wire.RoleWorker, Rank: r.rank, Host: "raw", Version: version.String()}, Workers: s.Size, Dedicated: s.NumServers, Alike: s.Alike()})
	if err != nil {
		r.t.Error(err)
		return
	}
	for _, server := range r.epoch.Servers {
		conn, err := transport.NewSet(nil, tr).Dial(ctx, server.Addresses)
		if err != nil {
			r.t.Error(err)
			return
		}
		r.t.Cleanup(func() { conn.Close() })
		r.conns = append(r.conns, conn)
		r.sendJSON(conn, wire.TypeHello, wire.Hello{Role: wire.RoleWorker, Round: r.epoch.Round, Rank: r.rank, Conns: 1, Window: 1 << 20})
		var h wire.Header
		if err := conn.ReadHeader(&h); err != nil || h.Type != wire.TypeWelcome {
			r.t.Errorf("no welcome: %v %v", h.Type, err)
		}
	}
}

func (r *raw) header(typ wire.Type) wire.Header {
	return wire.Header{Type: typ, Rank: uint16(r.rank), Epoch: r.epoch.Number}
}

func (r *raw) sendJSON(conn transport.Conn, typ wire.Type, v any) {
	payload, err := json.Marshal(v)
	if err != nil {
		r.t.Error(err)
	}
	r.send(conn, wire.AppendFrame(nil, r.header(typ), payload))
}

// send sends any bytes. That the other side has closed is for the test to find out elsewhere.
func (r *raw) send(conn transport.Conn, b []byte) { _ = conn.Send(net.Buffers{b}) }

// declare makes the tensor of sum(name, n) known to the scheduler and announces it to every server.
func (r *raw) declare(s settings.Settings, name string, n int) (wire.Tensor, wire.Placed) {
	r.t.Helper()
	t := wire.Tensor{
		Name: name, Kind: units.Allreduce, Op: units.Sum, DType: units.Uint8, Shape: []int64{int64(n)}, Ranks: make([]int, s.Size),
		Prescale: 1, Postscale: 1, Parts: placement.Cut(uint64(n), 1, int(s.PartitionBytes), len(r.epoch.Servers), nil),
	}
	for i := range t.Ranks {
		t.Ranks[i] = i
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), hang)
	defer cancel()
	placed, err := r.control.Declare(ctx, []wire.Tensor{t})
	if err != nil {
		r.t.Fatal(err)
	}
	t.ID = placed[0].ID
	for _, c := range r.conns {
		h := r.header(wire.TypeAnnounce)
		h.Tensor = t.ID
		payload, _ := json.Marshal(&t)
		r.send(c, wire.AppendFrame(nil, h, payload))
	}
	return t, placed[0]
}

// push is the header of a partition's push.
func (r *raw) push(t *wire.Tensor, part int, iteration uint64) wire.Header {
	h := r.header(wire.TypePush)
	h.Tensor, h.Part, h.Iteration, h.Seq, h.DType, h.Length = t.ID, uint32(part), iteration, iteration, t.DType, t.Parts[part]
	if part == 0 {
		h.Flags = wire.FlagHome
	}
	return h
}

// pushAll contributes ones to an iteration, like sum.
func (r *raw) pushAll(t *wire.Tensor, p *wire.Placed, iteration uint64) {
	for part, n := range t.Parts {
		ones := make([]byte, n)
		for i := range ones {
			ones[i] = 1
		}
		r.send(r.conns[p.Servers[part]], wire.AppendFrame(nil, r.push(t, part, iteration), ones))
	}
}

// TestAPeerThatBreaksOffOrTheRulesEndsTheRoundForAll at once, with an error that names it.
func TestAPeerThatBreaksOffOrTheRulesEndsTheRoundForAll(t *testing.T) {
	const n = 1 << 20
	for name, c := range map[string]struct {
		do  func(r *raw, s settings.Settings)
		why string
	}{
		"vanishes": {func(r *raw, _ settings.Settings) {
			for _, c := range r.conns {
				c.Close()
			}
		}, "closed without a goodbye"},
		"vanishes on one connection": {func(r *raw, _ settings.Settings) { r.conns[0].Close() }, "closed without a goodbye"},
		"garbage":                    {func(r *raw, _ settings.Settings) { r.send(r.conns[0], []byte(strings.Repeat("garbage", 100))) }, "bad frame header: magic"},
		"an unknown type": {func(r *raw, _ settings.Settings) {
			r.send(r.conns[0], wire.AppendFrame(nil, r.header(99), nil))
		}, "bad frame header: unknown type(99)"},
		"a frame that no worker sends": {func(r *raw, _ settings.Settings) {
			r.send(r.conns[0], wire.AppendFrame(nil, r.header(wire.TypeJoined), nil))
		}, "a worker does not send this"},
		"oversize length": {func(r *raw, _ settings.Settings) {
			h := r.header(wire.TypePush)
			h.Length = 1<<31 + 5
			r.send(r.conns[0], h.Append(nil))
		}, "push payload of 2147483653 bytes, limit 1073741824"},
		"oversize batch": {func(r *raw, _ settings.Settings) {
			h := r.header(wire.TypeBatch)
			h.Length = 1 << 30
			r.send(r.conns[0], h.Append(nil))
		}, "batch payload of 1073741824 bytes, limit 262144"},
		"another's rank": {func(r *raw, _ settings.Settings) {
			h := r.header(wire.TypeJoin)
			h.Rank = 0
			r.send(r.conns[0], wire.AppendFrame(nil, h, nil))
		}, "it says rank 0"},
		"an unannounced tensor": {func(r *raw, _ settings.Settings) {
			h := r.header(wire.TypePush)
			h.Tensor = 77
			r.send(r.conns[0], wire.AppendFrame(nil, h, []byte("data")))
		}, "push of tensor 77, which was not announced"},
		"a tensor that cannot be": {func(r *raw, _ settings.Settings) {
			r.sendJSON(r.conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allreduce, Op: units.Sum, DType: units.Bool, Ranks: []int{0, 1, 2}, Parts: []uint32{4}})
		}, "bool tensors cannot be reduced"},
		"a partition of parts of elements": {func(r *raw, _ settings.Settings) {
			r.sendJSON(r.conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allreduce, Op: units.Sum, DType: units.Float32, Ranks: []int{0, 1, 2}, Parts: []uint32{7}})
		}, "partition 0 of 7 bytes"},
		"sizes of parts of numbers": {func(r *raw, _ settings.Settings) {
			r.sendJSON(r.conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allgather, DType: units.Uint8, Ranks: []int{0, 1, 2}, Parts: []uint32{7}})
		}, "partition 0 of 7 bytes"},
		"a tensor of ranks that are not there": {func(r *raw, _ settings.Settings) {
			r.sendJSON(r.conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allreduce, Op: units.Sum, DType: units.Uint8, Ranks: []int{0, 9}, Parts: []uint32{7}})
		}, "of ranks [0, 9], where the job has 3"},
		"the wrong length": {func(r *raw, s settings.Settings) {
			t, p := r.declare(s, "x", n)
			h := r.push(&t, 0, 0)
			r.send(r.conns[p.Servers[0]], wire.AppendFrame(nil, h, []byte("short")))
		}, `5 bytes of uint8 for partition 0 of "x"`},
		"half of a tensor": {func(r *raw, s settings.Settings) {
			t, p := r.declare(s, "x", n)
			h := r.push(&t, 0, 0)
			r.send(r.conns[p.Servers[0]], append(h.Append(nil), make([]byte, 100<<10)...))
			r.conns[p.Servers[0]].Close()
		}, "closed the connection in the middle of a frame"},
	} {
		for place, option := range map[string]jobOption{"embedded": func(*job) {}, "dedicated": dedicated(1)} {
			t.Run(name+" "+place, func(t *testing.T) {
				j := newJob(t, 3, option)
				r := j.startBeside()
				start := time.Now()
				waiting := make(chan []error, 1)
				go func() {
					waiting <- j.outcomes(func(rank int) error { _, err := j.do(rank, sum("x", n)); return err })
				}()
				c.do(r, j.settings)
				for rank, err := range (<-waiting)[:2] {
					if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "worker 2") || !strings.Contains(err.Error(), c.why) {
						t.Errorf("rank %d: %v, want worker 2 lost: %s", rank, err, c.why)
					}
				}
				if took := time.Since(start); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		}
	}
}

// TestStrangersHarmNobody has those who do not know the secret, or are not of this job.
func TestStrangersHarmNobody(t *testing.T) {
	j := startJob(t, 2, both(1))
	for i, server := range j.workers[0].Membership.Now().Servers {
		at, _ := server.Addresses.Of(tcp.Kind)
		for name, do := range map[string]func(c net.Conn){
			"nothing":   func(net.Conn) {},
			"garbage":   func(c net.Conn) { fmt.Fprint(c, strings.Repeat("GET / HTTP/1.1\r\n", 1000)) },
			"one byte":  func(c net.Conn) { fmt.Fprint(c, "P") },
			"a hello":   func(c net.Conn) { fmt.Fprint(c, "PCLNJOB\x01\x01"+strings.Repeat("n", 32)) },
			"no proof":  func(c net.Conn) { fmt.Fprint(c, "PCLNJOB\x01\x01"+strings.Repeat("n", 200)) },
			"a version": func(c net.Conn) { fmt.Fprint(c, "PCLNJOB\x09\x09"+strings.Repeat("n", 32)) },
		} {
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			do(c)
			j.works(fmt.Sprint(name, i), 100000)
			c.Close()
		}
		ctx, cancel := context.WithTimeout(t.Context(), hang)
		_, err := tcp.New(tcp.Config{Secret: []byte("another secret")}).Dial(ctx, at)
		if !errors.Is(err, transport.ErrAuth) || !strings.Contains(err.Error(), "PACELINE_JOB_SECRET") {
			t.Errorf("with a wrong secret: %v", err)
		}
		for _, hello := range []wire.Hello{
			{Role: wire.RoleWorker, Rank: 0, Conns: 1, Round: 1},
			{Role: wire.RoleWorker, Rank: 2, Conns: 1, Round: j.workers[0].Membership.Now().Round},
			{Role: wire.RoleWorker, Rank: -1, Conns: 1, Round: j.workers[0].Membership.Now().Round},
			{Role: wire.RoleWorker, Rank: 1, Conns: 1 << 20, Round: j.workers[0].Membership.Now().Round},
			{Role: wire.RoleServer, Rank: 1, Conns: 1, Round: j.workers[0].Membership.Now().Round},
		} {
			c, err := tcp.New(tcp.Config{Secret: []byte(testSecret)}).Dial(ctx, at)
			if err != nil {
				t.Fatal(err)
			}
			payload, _ := json.Marshal(hello)
			_ = c.Send(net.Buffers{wire.AppendFrame(nil, wire.Header{Type: wire.TypeHello}, payload)})
			var h wire.Header
			if hello.Round != 1 { // of another round: it waits until that begins
				if err := c.ReadHeader(&h); !errors.Is(err, io.EOF) && !strings.Contains(fmt.Sprint(err), "went away") {
					t.Errorf("hello %+v: %v, %v, want the connection closed", hello, h.Type, err)
				}
			}
			j.works("x", 1000)
			c.Close()
		}
		cancel()
	}
}

// TestASlowReaderIsGivenUp: it pushes with the others but takes none of the results. The memory for
// those is bounded, and when the time for peers is over it counts as lost.
func TestASlowReaderIsGivenUp(t *testing.T) {
	const n, memory = 4 << 20, 64 << 20
	j := newJob(t, 3, dedicated(1), with(func(s *settings.Settings) {
		s.ServerMemory, s.BeatInterval, s.PeerTimeout = memory, 200*time.Millisecond, time.Second
	}))
	r := j.startBeside()
	tensor, placed := r.declare(j.settings, "x", n)
	next := make(chan uint64)
	go func() {
		for i := range next {
			r.pushAll(&tensor, &placed, i)
		}
	}()
	var m runtime.MemStats
	start := time.Now()
	errs := j.outcomes(func(rank int) error {
		for i := uint64(0); ; i++ {
			if rank == 0 {
				select {
				case next <- i:
				case <-time.After(10 * time.Millisecond): // it is stuck in a send
				}
			}
			_, err := j.do(rank, sum("x", n))
			if errors.Is(err, worker.ErrPeerLost) || err != nil && strings.Contains(err.Error(), "hangs") {
				return err // other failures come of the limit on memory
			}
			if i%8 == 0 && rank == 0 {
				runtime.GC()
				if runtime.ReadMemStats(&m); m.HeapAlloc > 4*memory {
					return fmt.Errorf("%d MiB in use", m.HeapAlloc>>20)
				}
			}
		}
	})
	if took := time.Since(start); took > 15*time.Second {
		t.Errorf("it took %v", took)
	}
	for _, c := range r.conns {
		c.Close()
	}
	close(next)
	for rank, err := range errs[:2] {
		if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "worker 2") {
			t.Errorf("rank %d: %v, want worker 2 lost", rank, err)
		}
	}
}
