package jobtest

import (
	"context"
	"encoding/json"
	"net"
	"sync"
	"testing"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// Raw is a rank that the test plays: it takes part like any other, then breaks the protocol.
type Raw struct {
	Rank    int
	Control *control.Client
	Epoch   *membership.Epoch
	Conns   []transport.Conn // one to each server

	t    testing.TB
	line *lineOf
}

// lineOf is the transport of the line to the scheduler, which ends with its process.
type lineOf struct {
	transport.Transport
	mu    sync.Mutex
	conn  transport.Conn
	ended bool
}

// Dial implements transport.Transport.
func (l *lineOf) Dial(ctx context.Context, address string) (transport.Conn, error) {
	conn, err := l.Transport.Dial(ctx, address)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.ended {
		conn.Close()
		return nil, net.ErrClosed
	}
	l.conn = conn
	return conn, err
}

// Vanish ends all connections as SIGKILL does, the line to the scheduler too.
func (r *Raw) Vanish() {
	for _, c := range r.Conns {
		c.Close()
	}
	r.line.mu.Lock()
	defer r.line.mu.Unlock()
	r.line.ended = true
	r.line.conn.Close()
}

// StartBeside starts all ranks but the last, which is the test's own.
func (j *Job) StartBeside() *Raw {
	j.T.Helper()
	r := &Raw{t: j.T, Rank: len(j.Workers) - 1}
	var wg sync.WaitGroup
	wg.Go(func() { r.join(j.Settings, j.over(r.Rank)) })
	j.Start(j.All().Ranks[:r.Rank]...)
	wg.Wait()
	if j.T.Failed() {
		j.T.FailNow()
	}
	return r
}

func (r *Raw) join(s settings.Settings, transports *transport.Set) {
	ctx, cancel := context.WithTimeout(r.t.Context(), Hang)
	defer cancel()
	var err error
	r.line = &lineOf{Transport: transports.Required()}
	r.Control, err = control.Dial(ctx, control.Config{Transport: r.line, Address: s.Scheduler, Hello: wire.Hello{Role: wire.RoleWorker, Rank: r.Rank}})
	if err != nil {
		r.t.Error(err)
		return
	}
	r.t.Cleanup(func() { r.Control.Close() })
	r.Epoch, err = r.Control.Register(ctx, wire.Register{Node: wire.Node{Role: wire.RoleWorker, Rank: r.Rank, Host: "raw", Version: version.String()}, Workers: s.Size, Dedicated: s.NumServers, Alike: s.Alike()})
	if err != nil {
		r.t.Error(err)
		return
	}
	for _, server := range r.Epoch.Servers {
		conn, err := transports.Dial(ctx, server.Addresses)
		if err != nil {
			r.t.Error(err)
			return
		}
		r.t.Cleanup(func() { conn.Close() })
		r.Conns = append(r.Conns, conn)
		r.SendJSON(conn, wire.TypeHello, wire.Hello{Role: wire.RoleWorker, Round: r.Epoch.Round, Rank: r.Rank, Conns: 1, Window: 1 << 20})
		var h wire.Header
		if err := conn.ReadHeader(&h); err != nil || h.Type != wire.TypeWelcome {
			r.t.Errorf("no welcome: %v %v", h.Type, err)
		}
	}
}

// Header is the header of a frame of this rank.
func (r *Raw) Header(typ wire.Type) wire.Header {
	return wire.Header{Type: typ, Rank: uint16(r.Rank), Epoch: r.Epoch.Joins}
}

// SendJSON sends a frame whose payload is JSON.
func (r *Raw) SendJSON(conn transport.Conn, typ wire.Type, v any) {
	payload, err := json.Marshal(v)
	if err != nil {
		r.t.Error(err)
	}
	r.Send(conn, wire.AppendFrame(nil, r.Header(typ), payload))
}

// Send sends any bytes. It ignores errors: the test checks elsewhere whether the other side has closed.
func (r *Raw) Send(conn transport.Conn, b []byte) { _ = conn.Send(net.Buffers{b}) }

// Declare makes the tensor of Sum(name, n) known to the scheduler and announces it to every server.
func (r *Raw) Declare(s settings.Settings, name string, n int) (wire.Tensor, wire.Placed) {
	r.t.Helper()
	return r.DeclareAs(s, wire.Tensor{Name: name, Kind: units.Allreduce, Op: units.Sum, DType: units.Uint8}, n)
}

// DeclareAs is Declare of n bytes of another tensor.
func (r *Raw) DeclareAs(s settings.Settings, t wire.Tensor, n int) (wire.Tensor, wire.Placed) {
	r.t.Helper()
	t.Shape, t.Ranks, t.Prescale, t.Postscale = []int64{int64(n)}, make([]int, s.Size), 1, 1
	t.Parts = placement.Cut(uint64(n), 1, int(s.PartitionBytes), len(r.Epoch.Servers), nil)
	if s.Elastic && t.Kind == units.Broadcast { // with which ranks say that they have it
		t.Parts = append(t.Parts, 0)
	}
	for i := range t.Ranks {
		t.Ranks[i] = i
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), Hang)
	defer cancel()
	placed, err := r.Control.Declare(ctx, []wire.Tensor{t})
	if err != nil {
		r.t.Fatal(err)
	}
	t.ID = placed[0].ID
	for _, c := range r.Conns {
		h := r.Header(wire.TypeAnnounce)
		h.Tensor = t.ID
		payload, _ := json.Marshal(&t)
		r.Send(c, wire.AppendFrame(nil, h, payload))
	}
	return t, placed[0]
}

// Push is the header of a partition's push.
func (r *Raw) Push(t *wire.Tensor, part int, iteration uint64) wire.Header {
	h := r.Header(wire.TypePush)
	h.Tensor, h.Part, h.Iteration, h.Seq, h.DType, h.Length = t.ID, uint32(part), iteration, iteration, t.DType, t.Parts[part]
	if t.Kind == units.Broadcast {
		h.DType = units.Int64
	}
	if part == 0 {
		h.Flags = wire.FlagHome
	}
	return h
}

// PushAll contributes ones to an iteration, like Sum.
func (r *Raw) PushAll(t *wire.Tensor, p *wire.Placed, iteration uint64) {
	for part, n := range t.Parts {
		ones := make([]byte, n)
		for i := range ones {
			ones[i] = 1
		}
		r.Send(r.Conns[p.Servers[part]], wire.AppendFrame(nil, r.Push(t, part, iteration), ones))
	}
}
