package control

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/valyala/bytebufferpool"
	"go.uber.org/goleak"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair runs a test in virtual time with a listener, whose side the test plays, and a node's transport.
func pair(t *testing.T, test func(t *testing.T, l transport.Listener, node transport.Transport, network *transporttest.Network)) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 8 * time.Second})
		defer network.Close()
		l, err := network.Node("scheduler", []byte("secret")).Listen("scheduler:1")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		test(t, l, network.Node("node", []byte("secret")), network)
	})
}

func accept(t *testing.T, l transport.Listener) transport.Conn {
	conn, err := l.Accept()
	if err != nil {
		t.Error(err)
	}
	if _, err := ReadHello(conn); err != nil {
		t.Error(err)
	}
	return conn
}

// next is the next message that is no question for the clock.
func next(t *testing.T, conn transport.Conn) (m wire.Control) {
	for {
		if err := Read(conn, &m); err != nil {
			t.Errorf("reading as the scheduler: %v", err)
			return m
		}
		if m.Clock == nil {
			return m
		}
	}
}

func TestARequestIsRepeatedOnTheNextLineAndKeepsItsDeadline(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, _ *transporttest.Network) {
		served := make(chan struct{})
		go func() {
			defer close(served)
			conn := accept(t, l)
			first := next(t, conn)
			time.Sleep(20 * time.Second) // virtual
			conn.Close()
			conn = accept(t, l)
			again := next(t, conn)
			if again.ID != first.ID || first.Wait != 59 || again.Wait > 39.1 || again.Wait < 38.5 {
				t.Errorf("first %+v, then %+v", first, again)
			}
			Send(conn, wire.TypeControl, wire.Control{ID: again.ID, Status: &wire.StatusReply{State: "forming"}})
			if bye := next(t, conn); !bye.Bye {
				t.Errorf("want a goodbye, got %+v", bye)
			}
			conn.Close()
		}()
		c, err := Dial(t.Context(), Config{Transport: node, Address: "scheduler:1"})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if got, err := c.Status(ctx); err != nil || got.State != "forming" {
			t.Errorf("status: %v, %v", got, err)
		}
		c.Close()
		<-served
	})
}

// TestALossIsReportedOnEveryLineUntilAnEpochIsWithoutThePeer: the line may break before the scheduler has read the report.
func TestALossIsReportedOnEveryLineUntilAnEpochIsWithoutThePeer(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, _ *transporttest.Network) {
		roster := wire.Roster{Round: 7, Elastic: true, Workers: []wire.Node{{Role: wire.RoleWorker, Session: 1}}, Servers: []wire.Node{
			{Role: wire.RoleServer, Session: 2, Addresses: address.List{{Kind: "tcp", At: "a:1"}}}, {Role: wire.RoleServer, Rank: 1, Session: 3, Addresses: address.List{{Kind: "tcp", At: "b:1"}}},
		}}
		gone := wire.Lost{Role: wire.RoleServer, Rank: 1, Why: "it ended our connection"}
		epochs := make(chan *membership.Epoch, 2)
		served := make(chan struct{})
		go func() {
			defer close(served)
			conn := accept(t, l)
			Send(conn, wire.TypeControl, wire.Control{ID: next(t, conn).ID, Roster: &roster})
			for range 2 { // what arrives is lost with the line, and comes again
				if m := next(t, conn); m.Lost == nil || *m.Lost != gone {
					t.Errorf("want the loss, got %+v", m)
				}
				conn.Close()
				conn = accept(t, l)
				again := next(t, conn)
				if again.Register == nil {
					t.Errorf("want a registration, got %+v", again)
				}
				time.Sleep(time.Second) // a scheduler that was restarted knows no round before, in which somebody could be lost
				Send(conn, wire.TypeControl, wire.Control{ID: again.ID, Roster: &roster})
			}
			if m := next(t, conn); m.Lost == nil || *m.Lost != gone {
				t.Errorf("want the loss again, got %+v", m)
			}
			without := roster
			without.Epoch, without.Gone = 1, []wire.Lost{gone}
			Send(conn, wire.TypeControl, wire.Control{Roster: &without})
			<-epochs
			conn.Close()
			conn = accept(t, l)
			if m := next(t, conn); m.Register == nil {
				t.Errorf("want a registration, got %+v", m)
			}
			if m := next(t, conn); !m.Bye {
				t.Errorf("want a goodbye, got %+v", m)
			}
			conn.Close()
		}()
		c, err := Dial(t.Context(), Config{Transport: node, Address: "scheduler:1", OnRoster: func(e *membership.Epoch) {
			if e.Number > 0 {
				epochs <- e
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Register(t.Context(), wire.Register{Node: roster.Workers[0]}); err != nil {
			t.Fatal(err)
		}
		c.ReportLost(gone)
		time.Sleep(time.Minute) // virtual
		c.Close()
		<-served
	})
}

// TestAFarewellIsSaidOnEveryLine: the one on which it was said may have broken before the scheduler has read it.
func TestAFarewellIsSaidOnEveryLine(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, _ *transporttest.Network) {
		roster := wire.Roster{Round: 7, Workers: []wire.Node{{Role: wire.RoleWorker, Session: 1, Addresses: address.List{{Kind: "tcp", At: "a:1"}}}}}
		roster.Servers = roster.Workers
		served := make(chan struct{})
		go func() {
			defer close(served)
			conn := accept(t, l)
			Send(conn, wire.TypeControl, wire.Control{ID: next(t, conn).ID, Roster: &roster})
			if m := next(t, conn); !m.Farewell {
				t.Errorf("want a farewell, got %+v", m)
			}
			conn.Close()
			conn = accept(t, l)
			if m := next(t, conn); m.Register == nil || !m.Register.Known.Farewell {
				t.Errorf("want a registration that says farewell, got %+v", m)
			}
			if m := next(t, conn); !m.Bye {
				t.Errorf("want a goodbye, got %+v", m)
			}
			conn.Close()
		}()
		c, err := Dial(t.Context(), Config{Transport: node, Address: "scheduler:1"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Register(t.Context(), wire.Register{Node: roster.Workers[0]}); err != nil {
			t.Fatal(err)
		}
		c.Farewell()
		time.Sleep(time.Minute) // virtual
		c.Close()
		<-served
	})
}

func TestALineToASchedulerThatIsStoppedForLongIsMadeAnew(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, network *transporttest.Network) {
		c, err := Dial(t.Context(), Config{Transport: node, Address: "scheduler:1"})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		first := accept(t, l)
		defer first.Close()
		if err := network.Script("at 0s scheduler stop\nat 4s scheduler continue\nat 10s scheduler stop\nat 30s scheduler continue"); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		second := accept(t, l) // the client's next attempt
		defer second.Close()
		if took := time.Since(start); took < 30*time.Second || took > 31*time.Second {
			t.Errorf("a new line after %v, want it only after the second stop", took)
		}
	})
}

func TestCloseDoesNotWaitLongForADeafScheduler(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, network *transporttest.Network) {
		c, err := Dial(t.Context(), Config{Transport: node, Address: "scheduler:1"})
		if err != nil {
			t.Fatal(err)
		}
		conn := accept(t, l)
		defer conn.Close()
		start := time.Now()
		c.Close()
		if took := time.Since(start); took > time.Second {
			t.Errorf("close took %v", took)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestDialSaysWhatIsWrong(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, network *transporttest.Network) {
		go l.Accept()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := Dial(ctx, Config{Transport: network.Node("other", []byte("other")), Address: "scheduler:1"})
		if err == nil || !strings.Contains(err.Error(), "job secret") {
			t.Errorf("wrong secret: %v", err)
		}
		_, err = Dial(ctx, Config{Transport: node, Address: "nobody:1"})
		if err == nil || !strings.Contains(err.Error(), "nobody:1") {
			t.Errorf("nobody there: %v", err)
		}
	})
}

func TestALineThatIsNotReadEnds(t *testing.T) {
	pair(t, func(t *testing.T, l transport.Listener, node transport.Transport, _ *transporttest.Network) {
		conn, err := node.Dial(t.Context(), "scheduler:1")
		if err != nil {
			t.Fatal(err)
		}
		line := NewLine(conn)
		for range maxQueue + 10000 {
			line.Push(&wire.Control{Error: "more"})
		}
		if err := line.Run(func(*wire.Control) {}); err == nil || !strings.Contains(err.Error(), "does not read") {
			t.Errorf("ended with %v", err)
		}
	})
}

func TestEverythingLearntFitsInMessages(t *testing.T) {
	k := newMemory()
	k.register = wire.Register{Node: wire.Node{Role: wire.RoleWorker, Session: 7}}
	if k.registers() != nil {
		t.Fatal("there is nothing to register again before the first round")
	}
	k.learn(nil, &wire.Control{Roster: &wire.Roster{Round: 9}})
	// Names that JSON has to escape, and a great many partitions.
	const tensors = 400
	var all []wire.Tensor
	for i := range tensors {
		all = append(all, wire.Tensor{
			Name: strings.Repeat("\x01", limits.MaxName-10) + fmt.Sprint(i), Kind: units.Allreduce, Ranks: []int{0},
			Parts: make([]uint32, 1000),
		})
		all[i].Parts[0] = limits.MaxPayload
	}
	for rest := all; len(rest) > 0; {
		n, err := batch(rest)
		if err != nil {
			t.Fatal(err)
		}
		if err := wire.AppendJSON(&bytebufferpool.ByteBuffer{}, wire.Header{Type: wire.TypeControl}, wire.Control{Declare: rest[:n]}); err != nil {
			t.Fatalf("a batch of %d: %v", n, err)
		}
		placed := make([]wire.Placed, n)
		for i := range placed {
			placed[i] = wire.Placed{ID: uint32(tensors - len(rest) + i + 1), Servers: make([]int, len(all[0].Parts))}
		}
		k.learn(&request{msg: wire.Control{Declare: rest[:n]}}, &wire.Control{Placed: placed})
		rest = rest[n:]
	}
	ids := map[uint32]bool{}
	parts := k.registers()
	for i := range parts {
		if err := wire.AppendJSON(&bytebufferpool.ByteBuffer{}, wire.Header{Type: wire.TypeControl}, wire.Control{Register: &parts[i]}); err != nil {
			t.Fatal(err)
		}
		if parts[i].More != (i < len(parts)-1) {
			t.Errorf("part %d of %d: more is %v", i, len(parts), parts[i].More)
		}
		for _, x := range parts[i].Known.Tensors {
			ids[x.ID] = true
		}
	}
	if len(ids) != tensors || len(parts) < 2 {
		t.Fatalf("%d of %d tensors in %d messages", len(ids), tensors, len(parts))
	}
	big := wire.Tensor{Name: "big", Parts: make([]uint32, limits.MaxParts)}
	if _, err := batch([]wire.Tensor{big}); err == nil || !strings.Contains(err.Error(), `tensor "big"`) {
		t.Errorf("a tensor that fits in no message: %v", err)
	}
}

func TestMemoryForgetsWhatTheSchedulerForgot(t *testing.T) {
	k := newMemory()
	k.learn(nil, &wire.Control{Roster: &wire.Roster{Round: 1}})
	declare := func(name string, set uint32, generation uint64, id uint32) {
		k.learn(&request{msg: wire.Control{Declare: []wire.Tensor{{Name: name, ProcessSet: set, Generation: generation}}}},
			&wire.Control{Placed: []wire.Placed{{ID: id}}})
	}
	call := func(m wire.Control, set wire.ProcessSet) {
		m.Position = k.calls
		k.learn(&request{msg: m}, &wire.Control{Set: &set})
	}
	call(wire.Control{AddSet: []int{0}}, wire.ProcessSet{ID: 3, Ranks: []int{0}})
	declare("x", 0, 0, 1)
	declare("x", 0, 0, 1)
	declare("x", 3, 0, 2)
	declare("x", 0, 1, 3)
	known := func() string {
		r := k.registers()[0].Known
		text := fmt.Sprint(r.SetCalls, " calls")
		for _, s := range r.Sets {
			text += fmt.Sprint(" set ", s.ID)
		}
		for _, x := range r.Tensors {
			text += fmt.Sprint(" tensor ", x.ID)
		}
		return text
	}
	if got := known(); got != "1 calls set 3 tensor 3 tensor 2" {
		t.Error(got)
	}
	call(wire.Control{RemoveID: 3}, wire.ProcessSet{ID: 3})
	if got := known(); got != "2 calls tensor 3" {
		t.Error(got)
	}
}

// TestARosterWithOthersWhoHaveLeftIsNews, in the same epoch: who leaves begins none.
func TestARosterWithOthersWhoHaveLeftIsNews(t *testing.T) {
	k := newMemory()
	for i, c := range []struct {
		left  []int
		fresh bool
	}{{nil, true}, {nil, false}, {[]int{2}, true}, {[]int{2}, false}, {[]int{1, 2}, true}} {
		if fresh := k.learn(nil, &wire.Control{Roster: &wire.Roster{Round: 1, Epoch: 1, Left: c.left}}); fresh != c.fresh {
			t.Errorf("roster %d, ranks %v have left: fresh is %v", i, c.left, fresh)
		}
	}
}

// TestMemoryKnowsWhoVotes for a scheduler that takes over, until a new round begins.
func TestMemoryKnowsWhoVotes(t *testing.T) {
	k := newMemory()
	for _, c := range []struct {
		message wire.Control
		want    string
	}{
		{wire.Control{Roster: &wire.Roster{Round: 1}}, "{[] []}"},
		{wire.Control{Votes: &wire.Votes{Ended: []int{2}}}, "{[] [2]}"},
		{wire.Control{Roster: &wire.Roster{Round: 1, Epoch: 1}}, "{[] [2]}"},
		{wire.Control{Votes: &wire.Votes{Settled: []int{2}, Ended: []int{2}}}, "{[2] [2]}"},
		{wire.Control{Roster: &wire.Roster{Round: 2}}, "{[] []}"},
	} {
		k.learn(nil, &c.message)
		if got := fmt.Sprint(k.registers()[0].Known.Votes); got != c.want {
			t.Errorf("after %+v: %s, want %s", c.message, got, c.want)
		}
	}
}
