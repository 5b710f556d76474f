package server

import (
	"encoding/json"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// A rank that has joined still excuses itself from supersteps whose end it hears of, until it hears that all ranks have
// joined. Its report of one is of an earlier epoch then, whether it comes while the server forgets the tensors or is
// being read meanwhile, and is answered with the new one.
func TestReportCrossesTheJoinOfAllRanks(t *testing.T) {
	for _, when := range []string{"while the tensors are forgotten", "while it is read"} {
		t.Run(when, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { crossTheJoin(t, when == "while it is read") })
		})
	}
}

// crossTheJoin has rank 2 in the server's process and ranks 0 and 1 elsewhere. Rank 2 waits for a value, so that it is told
// when the server forgets that: then rank 0's report comes, or goes on, of which the server has read the header before.
func crossTheJoin(t *testing.T, readBefore bool) {
	read := make(chan struct{})
	network := transporttest.NewNetwork(transporttest.Options{})
	defer network.Close()
	l, err := network.Node("server", []byte("join")).Listen("server:1")
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{Log: zap.NewNop(), Memory: 1 << 20, Model: condition.BSP()})
	served := make(chan error, 1)
	go func() { served <- s.Serve(pausing{l, read}) }()
	s.Begin(&membership.Epoch{Round: 7, Workers: make([]membership.Worker, 3)})
	local, err := s.Local(2, deaf{})
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]transport.Conn, 2)
	for rank := range conns {
		if conns[rank], err = network.Node("worker", []byte("join")).Dial(t.Context(), "server:1"); err != nil {
			t.Fatal(err)
		}
	}
	send := func(rank int, h wire.Header, payload []byte) {
		h.Rank = uint16(rank)
		if err := conns[rank].Send(net.Buffers{wire.AppendFrame(nil, h, payload)}); err != nil {
			t.Error(err)
		}
	}
	tensor := under("adaptive:1,2", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 8))
	announced, _ := json.Marshal(&tensor)
	for rank := range conns {
		hello, _ := json.Marshal(wire.Hello{Role: wire.RoleWorker, Round: 7, Rank: rank, Conns: 1})
		send(rank, wire.Header{Type: wire.TypeHello}, hello)
		send(rank, wire.Header{Type: wire.TypeAnnounce, Tensor: 1}, announced)
	}
	synctest.Wait()
	report := func() {
		send(0, wire.Header{Type: wire.TypeReport, Tensor: 1, Seq: 1}, wire.Report{Iteration: 1}.Append(nil))
		synctest.Wait()
	}

	forgotten := make(chan struct{})
	local.Serve(wire.Header{Type: wire.TypePull, Flags: wire.FlagDeclare, Tensor: 1, Rank: 2, DType: units.Float32}, nil, make([]byte, 8), func(wire.Header, error) {
		if readBefore {
			close(read)
		} else {
			report()
		}
		close(forgotten)
	})
	send(0, wire.Header{Type: wire.TypeJoin}, nil)
	local.Join()
	synctest.Wait()
	if readBefore {
		report()
	} else {
		close(read)
	}
	send(1, wire.Header{Type: wire.TypeJoin}, nil)
	<-forgotten
	if !hears(conns[0], wire.TypeEpoch) {
		t.Error("the report of an earlier epoch is not answered with the new one")
	}
	for _, c := range conns {
		c.Close()
	}
	l.Close()
	s.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// hears reports whether a frame of a type comes, alone or in a batch, before the connection ends or falls silent.
func hears(c transport.Conn, want wire.Type) (heard bool) {
	silent := time.AfterFunc(time.Minute, func() { c.Close() })
	defer silent.Stop()
	for !heard {
		err := transporttest.Frame(c, func(h *wire.Header, _ []byte) error {
			heard = heard || h.Type == want
			return nil
		})
		if err != nil {
			return false
		}
	}
	return true
}

// pausing accepts connections on which the payload of a report is read after the header and the close of a channel.
type pausing struct {
	transport.Listener
	until <-chan struct{}
}

func (l pausing) Accept() (transport.Conn, error) {
	c, err := l.Listener.Accept()
	return &pausingConn{Conn: c, until: l.until}, err
}

type pausingConn struct {
	transport.Conn
	until <-chan struct{}
	last  wire.Type
}

func (c *pausingConn) ReadHeader(h *wire.Header) error {
	err := c.Conn.ReadHeader(h)
	c.last = h.Type
	return err
}

func (c *pausingConn) ReadPayload(b []byte) error {
	if c.last == wire.TypeReport {
		<-c.until
	}
	return c.Conn.ReadPayload(b)
}

// deaf is a worker in the server's process that needs no notices.
type deaf struct{}

func (deaf) Failed(wire.Failure)            {}
func (deaf) Stalled(wire.Stall)             {}
func (deaf) Joined(int)                     {}
func (deaf) Lost(wire.Lost)                 {}
func (deaf) Stopped(wire.Header, wire.Stop) {}
