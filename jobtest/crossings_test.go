package jobtest_test

import (
	"context"
	"math"
	"net"
	"sync/atomic"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// link counts what a rank's process sends to others and gets from them: the bytes on its host's link, if it is alone there.
type link struct {
	transport.Transport
	out, in atomic.Int64
}

func (l *link) Listen(address string) (transport.Listener, error) {
	listener, err := l.Transport.Listen(address)
	return countedListener{listener, l}, err
}

func (l *link) Dial(ctx context.Context, address string) (transport.Conn, error) {
	return l.count(l.Transport.Dial(ctx, address))
}

func (l *link) count(c transport.Conn, err error) (transport.Conn, error) {
	if err != nil {
		return nil, err
	}
	return counted{c, l}, nil
}

type countedListener struct {
	transport.Listener
	link *link
}

func (l countedListener) Accept() (transport.Conn, error) { return l.link.count(l.Listener.Accept()) }

type counted struct {
	transport.Conn
	link *link
}

func size(buffers net.Buffers) (n int64) {
	for _, b := range buffers {
		n += int64(len(b))
	}
	return n
}

func (c counted) Send(buffers net.Buffers) error {
	c.link.out.Add(size(buffers))
	return c.Conn.Send(buffers)
}

func (c counted) TrySend(buffers net.Buffers) (net.Buffers, bool, error) {
	before := size(buffers)
	rest, busy, err := c.Conn.TrySend(buffers)
	if !busy {
		c.link.out.Add(before - size(rest))
	}
	return rest, busy, err
}

func (c counted) ReadPayload(b []byte) error {
	c.link.in.Add(int64(len(b)))
	return c.Conn.ReadPayload(b)
}

// TestCollectivesMoveEachByteNoMoreOftenThanNeeded counts the bytes on the links of each rank, in tensors of that rank
// (docs/performance.md has the table). A rank's tensor is its input; of a reducescatter and an alltoall it has a part for every rank.
func TestCollectivesMoveEachByteNoMoreOftenThanNeeded(t *testing.T) {
	const bytes = 6 << 20 // whole partitions for every number of ranks
	type moved struct{ out, in float64 }
	type row struct {
		kind        units.Kind
		root, other moved
	}
	for _, c := range []struct {
		ranks, dedicated int
		rows             []row
	}{
		{2, 0, []row{
			{units.Allreduce, moved{1, 1}, moved{1, 1}},
			{units.Broadcast, moved{1, 0}, moved{0, 1}},
			{units.Allgather, moved{1, 1}, moved{1, 1}},
			{units.Alltoall, moved{1. / 2, 1. / 2}, moved{1. / 2, 1. / 2}},
			{units.Reducescatter, moved{1. / 2, 1. / 2}, moved{1. / 2, 1. / 2}},
		}},
		{4, 0, []row{
			{units.Allreduce, moved{1.5, 1.5}, moved{1.5, 1.5}},
			{units.Broadcast, moved{1, 0}, moved{2. / 3, 1}},
			{units.Allgather, moved{3, 3}, moved{3, 3}},
			{units.Alltoall, moved{3. / 4, 3. / 4}, moved{3. / 4, 3. / 4}},
			{units.Reducescatter, moved{3. / 4, 3. / 4}, moved{3. / 4, 3. / 4}},
		}},
		{4, 4, []row{
			{units.Allreduce, moved{1, 1}, moved{1, 1}},
			{units.Broadcast, moved{1, 0}, moved{0, 1}},
			{units.Allgather, moved{1, 3}, moved{1, 3}},
			{units.Alltoall, moved{3. / 4, 3. / 4}, moved{3. / 4, 3. / 4}},
			{units.Reducescatter, moved{1, 1. / 4}, moved{1, 1. / 4}},
		}},
	} {
		options := []jobtest.Option{jobtest.SmallPartitions}
		if c.dedicated > 0 {
			options = append(options, jobtest.Dedicated(c.dedicated))
		}
		network := transporttest.NewNetwork(transporttest.Options{})
		t.Cleanup(network.Close)
		links := make([]*link, c.ranks+1)
		for i := range links {
			links[i] = &link{Transport: network.Node("127.0.0.1", []byte(jobtest.Secret))}
		}
		j := jobtest.Start(t, c.ranks, append(options, jobtest.Transports(func(rank int) *transport.Set { return transport.NewSet(nil, links[rank+1]) }))...)
		for _, r := range c.rows {
			before := make([]moved, c.ranks)
			for rank := range c.ranks {
				before[rank] = moved{float64(links[rank+1].out.Load()), float64(links[rank+1].in.Load())}
			}
			j.Each(func(rank int) error { return exchange(j, rank, r.kind, bytes) })
			j.Works("all have ended "+r.kind.String(), 1)
			for rank := range c.ranks {
				want := r.other
				if rank == 0 {
					want = r.root
				}
				l := links[rank+1]
				got := moved{(float64(l.out.Load()) - before[rank].out) / bytes, (float64(l.in.Load()) - before[rank].in) / bytes}
				if math.Abs(got.out-want.out) > 0.02 || math.Abs(got.in-want.in) > 0.02 {
					t.Errorf("%v of %d ranks, %d dedicated servers: rank %d sends %.3f and gets %.3f tensors, want %.3f and %.3f",
						r.kind, c.ranks, c.dedicated, rank, got.out, got.in, want.out, want.in)
				}
			}
		}
	}
}

// exchange has a rank do its part of a collective on tensors of some bytes.
func exchange(j *jobtest.Job, rank int, kind units.Kind, bytes int) error {
	op := worker.Op{
		Kind: kind, DType: units.Uint8, ReduceOp: units.Sum, Shape: []int64{int64(bytes)}, Input: make([]byte, bytes), Name: kind.String(), Set: j.All(),
	}
	_, out, err := op.Lengths(rank)
	if err != nil {
		return err
	}
	op.Output = make([]byte, out)
	_, err = j.Do(rank, op)
	return err
}
