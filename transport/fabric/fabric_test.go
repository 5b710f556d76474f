//go:build cgo

package fabric

import (
	"cmp"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/tcp"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// providers are those that work on a machine without adapters.
var providers = []string{"tcp;ofi_rxm", "shm"}

// over makes a transport of a provider, or skips the test where it is not there.
func over(t testing.TB, config Config) transport.Transport {
	t.Helper()
	config.Host = "127.0.0.1"
	f, err := New(config)
	if err != nil {
		t.Skipf("libfabric or its provider %s is not on this machine: %v", config.Provider, err)
	}
	return f
}

func TestConformance(t *testing.T) {
	for _, provider := range providers {
		for _, integrity := range []string{"control", "all"} {
			t.Run(provider+" with tags on "+integrity, func(t *testing.T) {
				over(t, Config{Provider: provider})
				transporttest.Conformance(t, transporttest.InRealTime, func(t *testing.T) transporttest.Backend {
					return transporttest.Backend{
						New: func(secret []byte, handshakeTimeout time.Duration) transport.Transport {
							return over(t, Config{Provider: provider, Secret: secret, HandshakeTimeout: handshakeTimeout, Integrity: integrity})
						},
						Address:     "127.0.0.1:0",
						MaxBuffered: 2 * credits * slotBytes,
						RawDial:     func(address string) (net.Conn, error) { return net.Dial("tcp", address) },
						RawListen:   func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") },
					}
				})
			})
		}
	}
}

// TestDeclarationsMatchLibfabric compiles our declarations beside libfabric's.
func TestDeclarationsMatchLibfabric(t *testing.T) {
	if _, err := os.Stat("/usr/include/rdma/fabric.h"); err != nil {
		t.Skipf("libfabric's headers are not on this machine: %v", err)
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skipf("no C compiler: %v", err)
	}
	if out, err := exec.Command(cc, "-std=gnu11", "-fsyntax-only", "testdata/layout.c").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// eachProvider runs a test over all.
func eachProvider(t *testing.T, test func(t *testing.T, config Config)) {
	for _, provider := range providers {
		t.Run(provider, func(t *testing.T) {
			test(t, Config{Provider: provider, Secret: []byte("secret"), PeerTimeout: 5 * time.Second}) // a crowded machine keeps a process from running for seconds
		})
	}
}

// TestChangedBytesEndTheConnection: tags cover what comes by messages and what is read from the peer's memory.
func TestChangedBytesEndTheConnection(t *testing.T) {
	eachProvider(t, func(t *testing.T, config Config) {
		config.Integrity = "all"
		for _, size := range []int{100, 100_000} {
			forger := over(t, config).(*network)
			carry := forger.stream.Carrier
			forger.stream.Carrier = func(nc net.Conn, s *auth.Session, accepted bool) (net.Conn, error) {
				c, err := carry(nc, s, accepted)
				if err != nil {
					return nil, err
				}
				return &forging{conn: c.(*conn)}, nil
			}
			x, y := transporttest.Connect(t, forger, over(t, config), "")
			h := wire.Header{Type: wire.TypePush, Length: uint32(size)}
			go func() { _ = x.Send(net.Buffers{h.Append(nil), make([]byte, size)}) }()
			err := y.ReadHeader(&h)
			if err == nil {
				err = y.ReadPayload(make([]byte, size))
			}
			if !errors.Is(err, transport.ErrIntegrity) {
				t.Errorf("a payload of %d bytes with one changed: error %v", size, err)
			}
			x.Close()
			y.Close()
		}
	})
}

// TestAPeerThatSendsMoreThanItsCreditIsCutOff, where nobody reads meanwhile.
func TestAPeerThatSendsMoreThanItsCreditIsCutOff(t *testing.T) {
	eachProvider(t, func(t *testing.T, config Config) {
		ends := make(chan *conn, 2)
		f := over(t, config).(*network)
		carry := f.stream.Carrier
		f.stream.Carrier = func(nc net.Conn, s *auth.Session, accepted bool) (net.Conn, error) {
			c, err := carry(nc, s, accepted)
			if err == nil {
				ends <- c.(*conn)
			}
			return c, err
		}
		transporttest.Connect(t, f, f, "")
		from, to := <-ends, <-ends
		for range credits {
			if _, err := from.Write([]byte{0}); err != nil {
				t.Fatal(err)
			}
		}
		from.mu.Lock()
		from.credit++
		from.mu.Unlock()
		_, _ = from.Write([]byte{0})
		hangs := time.AfterFunc(20*time.Second, func() { from.device.down() })
		defer hangs.Stop()
		to.mu.Lock()
		defer to.mu.Unlock()
		for to.cause == nil {
			to.readable.Wait()
		}
		if !strings.Contains(to.cause.Error(), "more than the 16 messages") {
			t.Error(to.cause)
		}
	})
}

// forging changes the first byte of payloads.
type forging struct{ *conn }

func (f *forging) WriteBuffers(buffers *net.Buffers) error {
	for i, b := range *buffers {
		if len(b) >= 100 {
			changed := append([]byte{}, b...)
			changed[0] ^= 1
			(*buffers)[i] = changed
		}
	}
	return f.conn.WriteBuffers(buffers)
}

// TestFramesTakeNoMemory: neither messages nor reads of the peer's memory leave anything to the collector.
func TestFramesTakeNoMemory(t *testing.T) {
	if invariant.On {
		t.Skip("the checks of this build take memory")
	}
	eachProvider(t, func(t *testing.T, config Config) {
		f := over(t, config)
		x, y := transporttest.Connect(t, f, f, "")
		for _, size := range []int{100, 300_000} {
			header := (&wire.Header{Type: wire.TypePush, Length: uint32(size)}).Append(nil)
			payload, into, out := registered(t, f, size), registered(t, f, size), make(net.Buffers, 2)
			var h wire.Header
			next := make(chan bool)
			done := make(chan error, 1)
			go func() {
				for range next {
					out[0], out[1] = header, payload
					done <- x.Send(out)
				}
			}()
			n := testing.AllocsPerRun(50, func() {
				next <- true
				if err := errors.Join(y.ReadHeader(&h), y.ReadPayload(into), <-done); err != nil {
					t.Fatal(err)
				}
			})
			close(next)
			if n > 0 {
				t.Errorf("%v allocations for a frame of %d bytes", n, size)
			}
		}
	})
}

// TestWhatIsRegisteredIsNotRegisteredAgain: a part of a region is lent to the peer, and read into, by the region's key; after its release the memory is as any other.
func TestWhatIsRegisteredIsNotRegisteredAgain(t *testing.T) {
	eachProvider(t, func(t *testing.T, config Config) {
		f := over(t, config)
		x, _ := transporttest.Connect(t, f, f, "")
		c := x.(interface{ NetConn() net.Conn }).NetConn().(*conn)
		r, err := f.(transport.Registrar).Register(make([]byte, 100_000))
		if err != nil {
			t.Fatal(err)
		}
		part := r.Memory()[1000:90_000]
		whole, inside := r.(*region).x, func() (exposed, bool) {
			x, own, err := c.expose(part)
			if err != nil {
				t.Fatal(err)
			}
			if own {
				x.hide()
			}
			return x, own
		}
		if x, own := inside(); own || x.key != whole.key || x.address != whole.address+1000 {
			t.Errorf("a part of %+v that begins at 1000 is exposed as %+v, registered for that: %v", whole, x, own)
		}
		r.Release()
		if _, own := inside(); !own {
			t.Error("memory is exposed by a registration that has ended")
		}
	})
}

// registered is registered memory, until the test ends.
func registered(t *testing.T, f transport.Transport, size int) []byte {
	t.Helper()
	r, err := f.(transport.Registrar).Register(make([]byte, size))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r.Memory()
}

func TestOtherProvidersAreNamed(t *testing.T) {
	listener := over(t, Config{Provider: providers[0], Secret: []byte("secret")})
	dialer := over(t, Config{Provider: providers[1], Secret: []byte("secret")})
	l, err := listener.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = dialer.Dial(t.Context(), l.Addr().String())
	if err == nil || !strings.Contains(err.Error(), "the fabric there is "+providers[0]) || !strings.Contains(err.Error(), "PACELINE_FABRIC") {
		t.Errorf("error %v, want both providers and the setting", err)
	}
}

// TestAFabricThatCarriesNothingIsNotChosen: ends that know each other's names may still be out of each other's reach, as where a firewall is between them. It
// takes real time: nothing says that a message will not come.
func TestAFabricThatCarriesNothingIsNotChosen(t *testing.T) {
	config := Config{Provider: providers[0], Secret: []byte("secret")}
	whole, cut, besides := over(t, config), over(t, config).(*network), tcp.New(tcp.Config{Secret: config.Secret})
	cut.stream.Carrier = cut.mute
	for name, ends := range map[string][2]transport.Transport{"dials": {cut, whole}, "listens": {whole, cut}} {
		l, err := transport.NewSet(nil, ends[1], besides).Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		byFabric := make(chan error, 1)
		go func() {
			_, err := l[0].Accept()
			byFabric <- err
		}()
		x, err := transport.NewSet(nil, ends[0], besides).Dial(t.Context(), l.Addresses())
		if err != nil {
			t.Fatal(err)
		}
		if kind := x.RemoteAddr().Network(); kind != besides.Kind() {
			t.Errorf("where the end that cannot be reached %s, a connection is over %s", name, kind)
		}
		x.Close()
		l.Close()
		if err := <-byFabric; !errors.Is(err, net.ErrClosed) {
			t.Errorf("where the end that cannot be reached %s, the other has accepted a connection over the fabric", name)
		}
	}
}

// mute is a carrier whose messages are lost, because no connection takes those with its key, and which sends none.
func (n *network) mute(side net.Conn, s *auth.Session, accepted bool) (net.Conn, error) {
	d, err := n.device()
	if err != nil {
		return nil, err
	}
	if err := newConn(side, d, n.patience).introduce(s, accepted); err != nil {
		return nil, err
	}
	_, err = io.Copy(io.Discard, side)
	return nil, cmp.Or(err, io.EOF)
}

func TestAnIntroductionIsTakenAsItWasSaidOrNotAtAll(t *testing.T) {
	said := intro{key: 1, protocol: 2, provider: "verbs;ofi_rxm", endpoint: []byte("somewhere")}
	b := said.append(nil)
	var heard intro
	if err := heard.decode(b); err != nil || heard.provider != said.provider || string(heard.endpoint) != "somewhere" || heard.key != 1 || heard.protocol != 2 || len(b) != introSize {
		t.Errorf("heard %+v of %d bytes, %v", heard, len(b), err)
	}
	for _, at := range []int{12, 12 + 1 + len(said.provider) + 1} { // the lengths of both names
		spoilt := append([]byte{}, b...)
		spoilt[at] = 0xff
		if err := heard.decode(spoilt); err == nil {
			t.Errorf("a name of %d bytes or more was taken", 0xff)
		}
	}
}

// TestAClosedEndpointEndsAllItsConnections: what is done where a peer neither answers nor ends.
func TestAClosedEndpointEndsAllItsConnections(t *testing.T) {
	eachProvider(t, func(t *testing.T, config Config) {
		f := over(t, config)
		l, err := f.Listen("")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		var ends []chan error
		for range 2 {
			dialed, err := f.Dial(t.Context(), l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			accepted, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { dialed.Close(); accepted.Close() })
			h := wire.Header{Type: wire.TypePush, Length: 1 << 20}
			sending, reading := make(chan error, 1), make(chan error, 1)
			go func() { sending <- accepted.Send(net.Buffers{h.Append(nil), make([]byte, h.Length)}) }()
			go func() { reading <- accepted.ReadHeader(new(wire.Header)) }()
			ends = append(ends, sending, reading)
		}
		d, err := f.(*network).device()
		if err != nil {
			t.Fatal(err)
		}
		d.down()
		for _, end := range ends {
			if err := <-end; !errors.Is(err, errDown) {
				t.Errorf("a send or read over a closed endpoint: %v", err)
			}
		}
		if _, err := f.Dial(t.Context(), l.Addr().String()); !errors.Is(err, errDown) {
			t.Errorf("a dial over a closed endpoint: %v", err)
		}
	})
}
