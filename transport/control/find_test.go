package control

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// sites runs a test in virtual time, in which nodes have the names of the addresses at which they listen, all with port 1.
func sites(t *testing.T, test func(t *testing.T, network *transporttest.Network, listen func(node string, scheduler bool) transport.Listener)) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 8 * time.Second})
		defer network.Close()
		test(t, network, func(node string, scheduler bool) transport.Listener {
			l, err := network.Node(node, []byte("secret")).Listen(node + ":1")
			if err != nil {
				t.Fatal(err)
			}
			go answer(l, scheduler, 0)
			return l
		})
	})
}

// answer has connections to a listener be answered after some time, as by a scheduler, or closed, as by a process that has none.
func answer(l transport.Listener, scheduler bool, after time.Duration) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		var m wire.Control
		if _, err = ReadHello(conn); err != nil || !scheduler || Read(conn, &m) != nil || m.Clock == nil {
			conn.Close()
			continue
		}
		go func() { // until the client says goodbye
			time.Sleep(after) // virtual time
			_ = Send(conn, wire.TypeControl, wire.Control{Clock: m.Clock})
			for Read(conn, &m) == nil && !m.Bye {
				continue
			}
			conn.Close()
		}()
	}
}

// at dials, and says where the scheduler was found and after what time.
func at(t *testing.T, network *transporttest.Network, config Config) (c *Client, at string) {
	t.Helper()
	start := time.Now()
	config.Transport = network.Node("node", []byte("secret"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := Dial(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	return c, fmt.Sprintf("%s after %v", c.at, time.Since(start).Round(time.Second))
}

func TestTheFirstAddressWithASchedulerIsTaken(t *testing.T) {
	sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
		defer listen("b", true).Close()
		defer listen("c", true).Close()
		const all = "a:1,b:1,c:1"
		c, found := at(t, network, Config{Address: all})
		c.Close()
		if found != "b:1 after 0s" {
			t.Errorf("with the first one down: %s", found)
		}
		if err := network.Script("at 0s b stop\n"); err != nil {
			t.Fatal(err)
		}
		c, found = at(t, network, Config{Address: all, Attempt: 12 * time.Second})
		c.Close()
		if found != "c:1 after 3s" {
			t.Errorf("with the second one stopped: %s, want a quarter of the attempt", found)
		}
		if err := network.Script("at 0s b continue\n"); err != nil {
			t.Fatal(err)
		}
		c, found = at(t, network, Config{Address: all})
		defer c.Close()
		defer listen("a", true).Close()
		if p := c.places(); found != "b:1 after 0s" || strings.Join(p.at, ",") != "b:1,a:1,c:1" {
			t.Errorf("found %s, and asks again at %v; want the last one first", found, p.at)
		}
	})
}

// TestASilentSchedulerIsOneInAWorker: the next scheduler hears where it was, but for one in a process of its own, which trains nothing.
func TestASilentSchedulerIsOneInAWorker(t *testing.T) {
	for address, want := range map[string]string{"a:1": "a:1", "a:1,b:1": ""} {
		sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
			defer listen("a", true).Close()
			c, _ := at(t, network, Config{Address: address})
			defer c.Close()
			if err := network.Script("at 0s a stop\nat 60s a continue\n"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(30 * time.Second)
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.broken == nil || c.memory.silent != want {
				t.Errorf("the scheduler at %s is silent: %q, want %q; the line: %v", address, c.memory.silent, want, c.broken)
			}
		})
	}
}

func TestOneSilentConnectionIsEnough(t *testing.T) {
	var k memory
	lost := wire.Lost{Role: wire.RoleWorker, Rank: 1}
	for _, silent := range []bool{false, true, false} {
		lost.Silent = silent
		k.reports(lost)
	}
	if len(k.lost) != 1 || !k.lost[0].Silent {
		t.Errorf("a peer with a silent connection is reported as %+v", k.lost)
	}
}

func TestAPlaceIsSilentThatANodeHasFoundSilent(t *testing.T) {
	k := newMemory()
	k.roster = &wire.Roster{
		Workers: []wire.Node{{Standby: "a:1"}, {Standby: "b:1"}, {Standby: "c:1"}, {}},
		Servers: []wire.Node{{Role: wire.RoleServer}, {Role: wire.RoleWorker, Rank: 2}},
	}
	for _, c := range []struct {
		scheduler string
		lost      []wire.Lost
		want      string
	}{
		{"", nil, ""},
		{"b:1", nil, "b:1"},
		{"scheduler:1", nil, "scheduler:1,a:1"}, // in rank 0
		{"", []wire.Lost{{Role: wire.RoleWorker, Rank: 0, Silent: true}, {Role: wire.RoleWorker, Rank: 1}}, "a:1"},
		{"", []wire.Lost{{Role: wire.RoleServer, Rank: 0, Silent: true}, {Role: wire.RoleServer, Rank: 1, Silent: true}}, "c:1"},
		{"", []wire.Lost{{Role: wire.RoleServer, Rank: 7, Silent: true}}, ""},
	} {
		k.silent, k.lost = c.scheduler, c.lost
		if got := strings.Join(k.silentPlaces(), ","); got != c.want {
			t.Errorf("with a scheduler silent at %q and %v: %s, want %s", c.scheduler, c.lost, got, c.want)
		}
	}
}

func TestASearchSaysWhatIsWrongWithEachPlace(t *testing.T) {
	sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
		defer listen("b", false).Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := Dial(ctx, Config{Transport: network.Node("node", []byte("secret")), Address: "a:1,b:1"})
		for _, want := range []string{"a:1: connection refused", "b:1: " + errNoScheduler.Error(), "no success in 10s"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		}
		again, stop := context.WithTimeout(t.Context(), 10*time.Second)
		defer stop()
		_, err = Dial(again, Config{Transport: network.Node("node", []byte("other")), Address: "b:1,b:1"})
		if err == nil || !strings.Contains(err.Error(), "job secret") {
			t.Errorf("with another secret: %v", err)
		}
	})
}

// TestARankTakesOverWhenNoLowerOneAnswers: one that runs is waited for, one that has gone is not asked, one that is stopped is given up.
func TestARankTakesOverWhenNoLowerOneAnswers(t *testing.T) {
	sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
		defer listen("z", true).Close() // it keeps its line there
		first := listen("a", true)
		led := 0
		c, _ := at(t, network, Config{Address: "z:1", Attempt: 2 * time.Second, Lead: func() { led++ }})
		defer c.Close()
		roster := &wire.Roster{Workers: make([]wire.Node, 5)}
		for rank := range roster.Workers {
			roster.Workers[rank].Standby = string(rune('a'+rank)) + ":1"
		}
		roster.Workers[3].Session = c.session
		roster.Gone = []wire.Lost{{Role: wire.RoleServer, Rank: 0}, {Role: wire.RoleWorker, Rank: 1}}
		c.mu.Lock()
		c.memory.roster = roster
		c.mu.Unlock()
		if p := c.places(); strings.Join(p.at, ",") != "a:1,c:1" || p.lead != "d:1" || strings.Join(p.above, ",") != "e:1" {
			t.Fatalf("asks at %v, leads at %q, and then asks at %v", p.at, p.lead, p.above)
		}
		look := func() string {
			start := time.Now()
			conn, err := c.look(t.Context())
			if err == nil {
				conn.Close()
			}
			return fmt.Sprintf("%v after %v", err == nil, time.Since(start).Round(time.Second))
		}
		if got := look(); got != "true after 0s" || c.at != "a:1" || led != 0 {
			t.Errorf("the lowest has the scheduler: %s at %s, led %d times", got, c.at, led)
		}
		first.Close()
		next := listen("c", false)
		defer listen("d", true).Close()
		if got := look(); got != "false after 0s" || led != 0 {
			t.Errorf("a lower one runs without a scheduler: %s, led %d times", got, led)
		}
		if err := network.Script("at 0s c stop\n"); err != nil {
			t.Fatal(err)
		}
		if got := look(); got != "true after 2s" || c.at != "d:1" || led != 1 {
			t.Errorf("the lower ones are over and stopped: %s at %s, led %d times", got, c.at, led)
		}
		c.mu.Lock()
		c.memory.reports(wire.Lost{Role: wire.RoleWorker, Rank: 2, Silent: true})
		c.mu.Unlock()
		if got := look(); got != "true after 0s" || c.at != "d:1" {
			t.Errorf("the lower one is stopped, as this node has found: %s at %s", got, c.at)
		}
		c.mu.Lock()
		c.memory.lost = nil
		c.mu.Unlock()
		led--
		defer listen("e", true).Close()
		if got := look(); got != "true after 2s" || c.at != "e:1" || led != 1 {
			t.Errorf("a higher one has taken over: %s at %s, led %d times", got, c.at, led)
		}
		if err := network.Script("at 0s c continue\n"); err != nil {
			t.Fatal(err)
		}
		if got := look(); got != "true after 0s" || c.at != "e:1" {
			t.Errorf("a lower one runs again, and has its line elsewhere: %s at %s", got, c.at)
		}
		next.Close()
	})
}

// TestSearchesAfterASilenceAreQuick: most of the peer timeout is over. They are so for a time alone, so that who answers slowly is found.
func TestSearchesAfterASilenceAreQuick(t *testing.T) {
	sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
		defer listen("z", true).Close() // it keeps its line there
		led := 0
		c, _ := at(t, network, Config{Address: "z:1", Attempt: 8 * time.Second, Lead: func() { led++ }})
		defer c.Close()
		sweep := c.sweep()
		roster := &wire.Roster{Workers: make([]wire.Node, 4)}
		for rank := range roster.Workers {
			roster.Workers[rank].Standby = string(rune('a'+rank)) + ":1"
		}
		roster.Workers[2].Session = c.session
		defer listen("a", false).Close()
		defer listen("b", false).Close()
		defer listen("c", true).Close()
		defer listen("d", false).Close()
		if err := network.Script("at 0s a stop\nat 0s b stop\nat 0s d stop\nat 100s a continue\nat 100s b continue\nat 100s d continue\n"); err != nil {
			t.Fatal(err)
		}
		look := func(quick time.Duration) time.Duration {
			c.mu.Lock()
			c.memory.roster, c.quick = roster, time.Now().Add(quick)
			c.mu.Unlock()
			start := time.Now()
			conn, err := c.look(t.Context())
			if err != nil || c.at != "c:1" {
				t.Fatalf("found at %s: %v", c.at, err)
			}
			conn.Close()
			return time.Since(start).Round(sweep / 2)
		}
		if got, want := look(sweep), (blindSweeps+aboveSweeps)*sweep; got != want || led != 1 {
			t.Errorf("leads after %v, %d times; want %v", got, led, want)
		}
		c.mu.Lock()
		for i := range roster.Workers {
			roster.Workers[i].Addresses = address.List{{Kind: "tcp", At: "h:1"}}
		}
		c.mu.Unlock()
		if got, want := look(sweep), (quickSweeps+aboveSweeps)*sweep; got != want || led != 2 {
			t.Errorf("where it would notice the silence of workers, leads after %v, %d times; want %v", got, led, want)
		}
		if got, want := look(0), 2*sweepsPerAttempt*sweep; got != want || led != 3 {
			t.Errorf("in a later search leads after %v, %d times; want %v", got, led, want)
		}
		time.AfterFunc(sweep/2, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, rank := range []int{0, 1, 3} {
				c.memory.reports(wire.Lost{Role: wire.RoleWorker, Rank: rank, Silent: true})
			}
		})
		if got, want := look(sweep), silentSweeps*sweep; got != want || led != 4 { // also of those that are found silent meanwhile
			t.Errorf("with silent ones leads after %v, %d times; want %v", got, led, want)
		}
	})
}

// TestAnAnswerEndsTheWaitForSilentPlaces: in quick searches, one that has the scheduler, or waits for it itself.
func TestAnAnswerEndsTheWaitForSilentPlaces(t *testing.T) {
	sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
		defer listen("z", true).Close()
		c, _ := at(t, network, Config{Address: "z:1", Attempt: 8 * time.Second})
		defer c.Close()
		defer listen("a", false).Close()
		next := listen("b", false)
		c.mu.Lock()
		c.memory.roster = &wire.Roster{Workers: []wire.Node{{Standby: "a:1"}, {Standby: "b:1"}}}
		c.memory.silent, c.quick = "a:1", time.Now().Add(quickSweeps*c.sweep())
		c.mu.Unlock()
		if err := network.Script("at 0s a stop\nat 60s a continue\n"); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := c.look(t.Context()); err == nil || !strings.Contains(err.Error(), errNoScheduler.Error()) {
			t.Errorf("found a scheduler where there is none: %v", err)
		}
		next.Close()
		defer listen("b", true).Close()
		conn, err := c.look(t.Context())
		if err != nil || c.at != "b:1" {
			t.Fatalf("found at %s: %v", c.at, err)
		}
		conn.Close()
		if took := time.Since(start); took >= c.sweep() {
			t.Errorf("two searches that a process has answered took %v, want less than for a silent place", took)
		}
	})
}

// TestASchedulerThatWasSilentAndRunsAgainIsFound: also where others, which have none, answer sooner, and it takes longer than a silent place has.
func TestASchedulerThatWasSilentAndRunsAgainIsFound(t *testing.T) {
	for _, late := range []float64{0.1, 1.2, 3} {
		sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
			defer listen("z", true).Close()
			c, _ := at(t, network, Config{Address: "z:1", Attempt: 8 * time.Second})
			defer c.Close()
			l, err := network.Node("a", []byte("secret")).Listen("a:1")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go answer(l, true, time.Duration(late*float64(c.sweep())))
			defer listen("b", false).Close()
			c.mu.Lock()
			c.memory.roster = &wire.Roster{Workers: []wire.Node{{Standby: "a:1"}, {Standby: "b:1"}}}
			c.memory.silent, c.quick = "a:1", time.Now().Add(quickSweeps*c.sweep())
			c.mu.Unlock()
			start := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			conn, err := c.find(ctx)
			if err != nil {
				t.Fatalf("%v sweeps late: %v", late, err)
			}
			conn.Close()
			if took, most := time.Since(start), time.Duration((late+0.5)*float64(c.sweep())); took > most {
				t.Errorf("%v sweeps late, it is found after %v, want %v at most", late, took, most)
			}
		})
	}
}

// TestANodeFindsASchedulerThatGoesOnElsewhereInTime: at whatever moment that one begins, it has waited for its nodes no longer than the peer timeout, which is two
// attempts, when a node comes that still waits for the silent place where the scheduler was.
func TestANodeFindsASchedulerThatGoesOnElsewhereInTime(t *testing.T) {
	const attempt = 5 * time.Second
	for begins := time.Millisecond; begins < 3*attempt; begins += 500 * time.Millisecond {
		sites(t, func(t *testing.T, network *transporttest.Network, listen func(string, bool) transport.Listener) {
			defer listen("a", true).Close()
			b := listen("b", false)
			c, _ := at(t, network, Config{Address: "a:1,b:1", Attempt: attempt})
			defer c.Close()
			if err := network.Script("at 0s a stop\n"); err != nil {
				t.Fatal(err)
			}
			start, begun := time.Now(), make(chan transport.Listener, 1)
			time.AfterFunc(begins, func() {
				b.Close()
				begun <- listen("b", true)
			})
			conn, err := c.find(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			defer (<-begun).Close()
			if late := time.Since(start) - begins; late > 2*attempt-attempt/2 {
				t.Errorf("a scheduler that begins after %v is found %v later", begins, late)
			}
			if err := network.Script("at 0s a continue\n"); err != nil {
				t.Fatal(err)
			}
		})
	}
}
