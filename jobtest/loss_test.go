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
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/tcp"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// TestAPeerThatBreaksOffOrTheRulesEndsTheRoundForAll at once, with an error that names it.
func TestAPeerThatBreaksOffOrTheRulesEndsTheRoundForAll(t *testing.T) {
	const n = 1 << 20
	for name, c := range map[string]struct {
		do  func(r *jobtest.Raw, s settings.Settings)
		why string
	}{
		"vanishes": {func(r *jobtest.Raw, _ settings.Settings) {
			for _, c := range r.Conns {
				c.Close()
			}
		}, "closed without a goodbye"},
		"vanishes on one connection": {func(r *jobtest.Raw, _ settings.Settings) { r.Conns[0].Close() }, "closed without a goodbye"},
		"garbage":                    {func(r *jobtest.Raw, _ settings.Settings) { r.Send(r.Conns[0], []byte(strings.Repeat("garbage", 100))) }, "bad frame header: magic"},
		"an unknown type": {func(r *jobtest.Raw, _ settings.Settings) {
			r.Send(r.Conns[0], wire.AppendFrame(nil, r.Header(99), nil))
		}, "bad frame header: unknown type(99)"},
		"a frame that no worker sends": {func(r *jobtest.Raw, _ settings.Settings) {
			r.Send(r.Conns[0], wire.AppendFrame(nil, r.Header(wire.TypeJoined), nil))
		}, "a worker does not send this"},
		"oversize length": {func(r *jobtest.Raw, _ settings.Settings) {
			h := r.Header(wire.TypePush)
			h.Length = 1<<31 + 5
			r.Send(r.Conns[0], h.Append(nil))
		}, "push payload of 2147483653 bytes, limit 1073741824"},
		"oversize batch": {func(r *jobtest.Raw, _ settings.Settings) {
			h := r.Header(wire.TypeBatch)
			h.Length = 1 << 30
			r.Send(r.Conns[0], h.Append(nil))
		}, "batch payload of 1073741824 bytes, limit 16384"},
		"another's rank": {func(r *jobtest.Raw, _ settings.Settings) {
			h := r.Header(wire.TypeJoin)
			h.Rank = 0
			r.Send(r.Conns[0], wire.AppendFrame(nil, h, nil))
		}, "it says rank 0"},
		"an unannounced tensor": {func(r *jobtest.Raw, _ settings.Settings) {
			h := r.Header(wire.TypePush)
			h.Tensor = 77
			r.Send(r.Conns[0], wire.AppendFrame(nil, h, []byte("data")))
		}, "push of tensor 77, which was not announced"},
		"a tensor that cannot be": {func(r *jobtest.Raw, _ settings.Settings) {
			r.SendJSON(r.Conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allreduce, Op: units.Sum, DType: units.Bool, Ranks: []int{0, 1, 2}, Parts: []uint32{4}})
		}, "bool tensors cannot be reduced"},
		"a partition of parts of elements": {func(r *jobtest.Raw, _ settings.Settings) {
			r.SendJSON(r.Conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allreduce, Op: units.Sum, DType: units.Float32, Ranks: []int{0, 1, 2}, Parts: []uint32{7}})
		}, "partition 0 of 7 bytes"},
		"sizes of parts of numbers": {func(r *jobtest.Raw, _ settings.Settings) {
			r.SendJSON(r.Conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allgather, DType: units.Uint8, Ranks: []int{0, 1, 2}, Parts: []uint32{7}})
		}, "partition 0 of 7 bytes"},
		"a tensor of ranks that are not there": {func(r *jobtest.Raw, _ settings.Settings) {
			r.SendJSON(r.Conns[0], wire.TypeAnnounce, wire.Tensor{Name: "y", Kind: units.Allreduce, Op: units.Sum, DType: units.Uint8, Ranks: []int{0, 9}, Parts: []uint32{7}})
		}, "of ranks [0, 9], where the job has 3"},
		"the wrong length": {func(r *jobtest.Raw, s settings.Settings) {
			t, p := r.Declare(s, "x", n)
			h := r.Push(&t, 0, 0)
			r.Send(r.Conns[p.Servers[0]], wire.AppendFrame(nil, h, []byte("short")))
		}, `5 bytes of uint8 for partition 0 of "x"`},
		"an object without tags": {func(r *jobtest.Raw, _ settings.Settings) {
			t := wire.Tensor{ID: 50, Name: "y", Kind: units.Broadcast, DType: units.Uint8, Shape: []int64{4}, Root: 2, Ranks: []int{0, 1, 2}, Prescale: 1, Postscale: 1, Parts: []uint32{4}}
			t.Authenticated = true
			r.SendJSON(r.Conns[0], wire.TypeAnnounce, t)
			h := r.Header(wire.TypePut)
			h.Tensor, h.Flags = t.ID, wire.FlagHome
			h.Source, h.Destination = wire.Route(2, -1)
			r.Send(r.Conns[0], wire.AppendFrame(nil, h, []byte("evil")))
		}, `put of "y", which is declared as authenticated, without authentication tags`},
		"half of a tensor": {func(r *jobtest.Raw, s settings.Settings) {
			t, p := r.Declare(s, "x", n)
			h := r.Push(&t, 0, 0)
			r.Send(r.Conns[p.Servers[0]], append(h.Append(nil), make([]byte, 100<<10)...))
			r.Conns[p.Servers[0]].Close()
		}, "closed the connection in the middle of a frame"},
	} {
		for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
			t.Run(name+" "+place, func(t *testing.T) {
				jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
					j := jobtest.New(t, 3, network, option)
					r := j.StartBeside()
					start := time.Now()
					waiting := make(chan []error, 1)
					go func() {
						waiting <- j.Outcomes(func(rank int) error { _, err := j.Do(rank, jobtest.Sum("x", n)); return err })
					}()
					c.do(r, j.Settings)
					for rank, err := range (<-waiting)[:2] {
						if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "worker 2") || !strings.Contains(err.Error(), c.why) {
							t.Errorf("rank %d: %v, want worker 2 lost: %s", rank, err, c.why)
						}
					}
					if took := time.Since(start); took > 5*time.Second {
						t.Errorf("it took %v", took)
					}
				})
			})
		}
	}
}

// TestStrangersHarmNobody has peers connect that do not know the secret, or belong to another job.
func TestStrangersHarmNobody(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.Both(1))
	hello := fmt.Sprintf("PCLNJOB%c%c%c", auth.Version, wire.Version, auth.All)
	for i, server := range j.Workers[0].Membership.Now().Servers {
		at, _ := server.Addresses.Of(tcp.Kind)
		for name, do := range map[string]func(c net.Conn){
			"nothing":   func(net.Conn) {},
			"garbage":   func(c net.Conn) { fmt.Fprint(c, strings.Repeat("GET / HTTP/1.1\r\n", 1000)) },
			"one byte":  func(c net.Conn) { fmt.Fprint(c, "P") },
			"a hello":   func(c net.Conn) { fmt.Fprint(c, hello+strings.Repeat("n", 32)) },
			"no proof":  func(c net.Conn) { fmt.Fprint(c, hello+strings.Repeat("n", 200)) },
			"a version": func(c net.Conn) { fmt.Fprint(c, "PCLNJOB\x09\x09"+strings.Repeat("n", 32)) },
		} {
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			do(c)
			j.Works(fmt.Sprint(name, i), 100000)
			c.Close()
		}
		ctx, cancel := context.WithTimeout(t.Context(), jobtest.Hang)
		_, err := tcp.New(tcp.Config{Secret: []byte("another secret")}).Dial(ctx, at)
		if !errors.Is(err, transport.ErrAuth) || !strings.Contains(err.Error(), "PACELINE_JOB_SECRET") {
			t.Errorf("with a wrong secret: %v", err)
		}
		for _, hello := range []wire.Hello{
			{Role: wire.RoleWorker, Rank: 0, Conns: 1, Round: 1},
			{Role: wire.RoleWorker, Rank: 2, Conns: 1, Round: j.Workers[0].Membership.Now().Round},
			{Role: wire.RoleWorker, Rank: -1, Conns: 1, Round: j.Workers[0].Membership.Now().Round},
			{Role: wire.RoleWorker, Rank: 1, Conns: 1 << 20, Round: j.Workers[0].Membership.Now().Round},
			{Role: wire.RoleServer, Rank: 1, Conns: 1, Round: j.Workers[0].Membership.Now().Round},
		} {
			c, err := tcp.New(tcp.Config{Secret: []byte(jobtest.Secret)}).Dial(ctx, at)
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
			j.Works("x", 1000)
			c.Close()
		}
		cancel()
	}
}

// TestASlowReaderIsGivenUp: a rank pushes with the others, but reads no results. Their memory is bounded, and after the
// peer timeout the rank is lost.
func TestASlowReaderIsGivenUp(t *testing.T) {
	const n, memory = 4 << 20, 64 << 20
	j := jobtest.New(t, 3, jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) {
		s.ServerMemory, s.PeerTimeout = memory, time.Second
	}))
	r := j.StartBeside()
	tensor, placed := r.Declare(j.Settings, "x", n)
	next := make(chan uint64)
	go func() {
		for i := range next {
			r.PushAll(&tensor, &placed, i)
		}
	}()
	var m runtime.MemStats
	errs := j.Outcomes(func(rank int) error {
		for i := uint64(0); ; i++ {
			if rank == 0 {
				select {
				case next <- i:
				case <-time.After(10 * time.Millisecond): // it is stuck in a send
				}
			}
			_, err := j.Do(rank, jobtest.Sum("x", n))
			if errors.Is(err, worker.ErrPeerLost) || err != nil && strings.Contains(err.Error(), "hangs") {
				return err // other failures follow from the memory limit
			}
			if i%8 == 0 && rank == 0 {
				runtime.GC()
				if runtime.ReadMemStats(&m); m.HeapAlloc > 4*memory {
					return fmt.Errorf("%d MiB in use", m.HeapAlloc>>20)
				}
			}
		}
	})
	for _, c := range r.Conns {
		c.Close()
	}
	close(next)
	for rank, err := range errs[:2] {
		if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "worker 2") {
			t.Errorf("rank %d: %v, want worker 2 lost", rank, err)
		}
	}
}
