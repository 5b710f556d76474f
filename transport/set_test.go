package transport_test

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kinds are three networks between the same nodes, each a transport of its own kind.
type kinds map[string]*transporttest.Network

// withKinds runs a test in virtual time.
func withKinds(t *testing.T, test func(t *testing.T, k kinds)) {
	synctest.Test(t, func(t *testing.T) {
		k := kinds{}
		for _, kind := range []string{"shm", "fabric", "tcp"} {
			k[kind] = transporttest.NewNetwork(transporttest.Options{Kind: kind})
			t.Cleanup(k[kind].Close)
		}
		test(t, k)
	})
}

// set is a node's transports, in its order of preference.
func (k kinds) set(log *zap.Logger, node string, order ...string) *transport.Set {
	var all []transport.Transport
	for _, kind := range order {
		all = append(all, k[kind].Node(node, []byte("secret")))
	}
	return transport.NewSet(log, all...)
}

// server listens with some kinds and gives the addresses.
func (k kinds) server(t *testing.T, order ...string) address.List {
	t.Helper()
	listeners, err := k.set(nil, "server", order...).Listen("server:1")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range listeners {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close() // the dialler has what it wants to know
			}
		}()
	}
	t.Cleanup(func() { listeners.Close() })
	return listeners.Addresses()
}

// dial connects and says by which kind.
func dial(t *testing.T, s *transport.Set, to address.List) (kind string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := s.Dial(ctx, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return c.RemoteAddr().Network(), nil
}

func TestTheDiallersOrderAndTheServersAddressesChooseTheKind(t *testing.T) {
	for _, c := range []struct{ listens, dials, want string }{
		{"shm fabric tcp", "shm fabric tcp", "shm"},
		{"shm fabric tcp", "fabric shm tcp", "fabric"},
		{"fabric tcp", "shm fabric tcp", "fabric"},
		{"tcp", "shm fabric tcp", "tcp"},
		{"shm fabric tcp", "tcp", "tcp"},
	} {
		withKinds(t, func(t *testing.T, k kinds) {
			to := k.server(t, strings.Fields(c.listens)...)
			if err := to.Check(); err != nil {
				t.Error(err)
			}
			got, err := dial(t, k.set(nil, "worker", strings.Fields(c.dials)...), to)
			if got != c.want || err != nil {
				t.Errorf("a server with %s and a worker with %s: %q (%v), want %s", c.listens, c.dials, got, err, c.want)
			}
		})
	}
}

func TestADialFallsToTheNextKindAndSaysSoOnce(t *testing.T) {
	withKinds(t, func(t *testing.T, k kinds) {
		to := k.server(t, "shm", "fabric", "tcp")
		for _, kind := range []string{"shm", "fabric"} {
			if err := k[kind].Script("at 0s worker<->server freeze"); err != nil {
				t.Fatal(err)
			}
		}
		core, logged := observer.New(zap.InfoLevel)
		set, start := k.set(zap.New(core), "worker", "shm", "fabric", "tcp"), time.Now()
		for range 3 {
			if got, err := dial(t, set, to); got != "tcp" {
				t.Errorf("connected by %q (%v), want tcp", got, err)
			}
		}
		if took := time.Since(start); took > 11*time.Second { // 5 s for each kind, once
			t.Errorf("falling to the third kind three times took %v", took)
		}
		if n := logged.FilterMessageSnippet("the next one is tried").Len(); n != 2 || logged.Len() != 2 {
			t.Errorf("logged %v, want one line for each kind that failed", logged.All())
		}
	})
}

func TestAKindThatFailsWithEverythingElseIsTriedAgain(t *testing.T) {
	withKinds(t, func(t *testing.T, k kinds) {
		to := k.server(t, "shm", "tcp")
		for _, kind := range []string{"shm", "tcp"} {
			if err := k[kind].Script("at 0s worker<->server freeze\nat 2m worker<->server thaw"); err != nil {
				t.Fatal(err)
			}
		}
		set := k.set(nil, "worker", "shm", "tcp")
		if kind, err := dial(t, set, to); err == nil {
			t.Errorf("connected by %s to a server that is cut off", kind)
		}
		time.Sleep(time.Minute)
		if kind, err := dial(t, set, to); kind != "shm" {
			t.Errorf("connected by %q (%v), want shm", kind, err)
		}
	})
}

func TestADialWithLittleTimeLeavesSomeForTheRequiredKind(t *testing.T) {
	withKinds(t, func(t *testing.T, k kinds) {
		to := k.server(t, "shm", "tcp")
		if err := k["shm"].Script("at 0s worker<->server freeze"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c, err := k.set(nil, "worker", "shm", "tcp").Dial(ctx, to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if kind := c.RemoteAddr().Network(); kind != "tcp" {
			t.Errorf("connected by %s, want tcp", kind)
		}
	})
}

func TestADialThatNoKindServesNamesAllOfThem(t *testing.T) {
	withKinds(t, func(t *testing.T, k kinds) {
		_, err := dial(t, k.set(nil, "worker", "tcp"), k.server(t, "shm"))
		if err == nil || !strings.Contains(err.Error(), "shm server:1") || !strings.Contains(err.Error(), "connects by [tcp]") {
			t.Errorf("nothing in common: %v", err)
		}
		_, err = dial(t, k.set(nil, "worker", "shm", "tcp"), address.List{{Kind: "tcp", At: "server:7"}, {Kind: "shm", At: "server:8"}})
		if !errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), "server:7") || !strings.Contains(err.Error(), "server:8") {
			t.Errorf("nobody listens: %v", err)
		}
	})
}

func TestADialThatIsGivenUpTriesNoFurtherKind(t *testing.T) {
	withKinds(t, func(t *testing.T, k kinds) {
		to := k.server(t, "shm", "tcp")
		if err := k["shm"].Script("at 0s worker<->server freeze"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if c, err := k.set(nil, "worker", "shm", "tcp").Dial(ctx, to); err == nil {
			t.Errorf("connected by %s", c.RemoteAddr().Network())
		}
	})
}

func TestAnOptionalKindThatCannotListenIsLeftOut(t *testing.T) {
	withKinds(t, func(t *testing.T, k kinds) {
		k["shm"].Close()
		core, logged := observer.New(zap.InfoLevel)
		set := k.set(zap.New(core), "server", "shm", "tcp")
		l, err := set.Listen("server:1")
		if err != nil || l.Addresses().String() != "tcp server:1" || logged.Len() != 1 {
			t.Errorf("listens at [%v] (%v), logged %v", l.Addresses(), err, logged.All())
		}
		if _, err := set.Listen("server:1"); err == nil {
			t.Error("the required kind listens at an address that is taken")
		}
		l.Close()
	})
}
