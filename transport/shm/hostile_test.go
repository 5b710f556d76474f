package shm

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/stream"
	"github.com/paceline/paceline/transport/tcp"
	"github.com/paceline/paceline/transport/wire"
)

// memoryOf is the shared memory of a connection.
func memoryOf(c transport.Conn) *conn { return c.(*stream.Conn).NetConn().(*conn) }

func TestCountersThatNoRingCanHaveEndTheConnection(t *testing.T) {
	for _, value := range []uint64{1<<20 + 1, 1 << 63} {
		x, y := connect(t, Config{Ring: 1 << 20})
		hostile := memoryOf(x)
		hostile.out.counters[published].Store(value)
		hostile.out.reader.ring()
		var h wire.Header
		if err := y.ReadHeader(&h); !errors.Is(err, errRing) {
			t.Errorf("%d bytes published: %v, want errRing", value, err)
		}
		x, y = connect(t, Config{Ring: 1 << 20})
		memoryOf(x).in.counters[consumed].Store(value)
		if err := y.Send(net.Buffers{(&wire.Header{Type: wire.TypePush}).Append(nil)}); !errors.Is(err, errRing) {
			t.Errorf("%d bytes consumed of none: %v, want errRing", value, err)
		}
	}
}

func TestMemoryOfAnotherShapeIsRefused(t *testing.T) {
	bells := func() (fds []int) {
		for range numBells {
			fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK)
			if err != nil {
				t.Fatal(err)
			}
			fds = append(fds, fd)
		}
		return fds
	}
	file := func(size int64, sealed int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, size)
		}
		if err == nil && sealed != 0 {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealed)
		}
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	const good = pageBytes + 2*limits.MinRing
	for want, fd := range map[string]int{
		"":              file(good, seals),
		"seals 0x0":     file(good, 0),
		"seals 0x4":     file(good, unix.F_SEAL_GROW),
		"has 4096 byte": file(pageBytes, seals),
		"has 135169":    file(good+1, seals),
		"has 139264":    file(good+4096*2-4096, seals),
		"has 0 bytes":   file(0, seals),
		"has 268439552": file(pageBytes+4*limits.MaxRing, seals),
	} {
		g, err := openSegment(append([]int{fd}, bells()...))
		if want == "" && err == nil {
			g.close()
		} else if err == nil || want == "" || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	plain, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	fd, err := unix.Dup(int(plain.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openSegment(append([]int{fd}, bells()...)); err == nil {
		t.Error("a file on a disk was taken for memory")
	}
}

// TestAPeerThatPassesSomethingElseIsRefusedAtOnce: it knows the secret, and passes nothing, or too few descriptors.
func TestAPeerThatPassesSomethingElseIsRefusedAtOnce(t *testing.T) {
	for _, count := range []int{0, 2} {
		ours := start(t, Config{Secret: []byte("secret")})
		theirs := start(t, Config{Secret: []byte("secret")})
		theirs.stream.Carrier = func(nc net.Conn, _ *auth.Session, _ bool) (net.Conn, error) {
			_, _, err := nc.(*socket).WriteMsgUnix([]byte{1}, unix.UnixRights([]int{0, 1}[:count]...), nil)
			return nc, err
		}
		l, err := theirs.Listen("")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ours.Dial(t.Context(), l.Addr().String()); err == nil || !strings.Contains(err.Error(), "descriptors, want 5") {
			t.Errorf("error %v, want one about the descriptors", err)
		}
		l.Close()
	}
}

func TestAnAddressOfAnotherHostIsElsewhere(t *testing.T) {
	n := start(t, Config{Secret: []byte("secret")})
	for _, address := range []string{"0123456789ab/name", "/name"} {
		if _, err := n.Dial(t.Context(), address); !errors.Is(err, transport.ErrElsewhere) {
			t.Errorf("%q: %v, want transport.ErrElsewhere", address, err)
		}
	}
	var bad *net.AddrError
	if _, err := n.Dial(t.Context(), "name"); !errors.As(err, &bad) {
		t.Errorf("an address without a host: %v", err)
	}
}

// TestWhoSharesNoMemoryIsReachedOverTCP, without a wait: another host, of which nobody has to hear, and another container of this
// machine, of which the log says so once.
func TestWhoSharesNoMemoryIsReachedOverTCP(t *testing.T) {
	over := tcp.New(tcp.Config{Secret: []byte("secret")})
	l, err := over.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	here := start(t, Config{Secret: []byte("secret")})
	kernel, _, _ := strings.Cut(here.host, ".")
	for at, warnings := range map[string]int{"0123456789ab.0123456789ab/name": 0, kernel + ".0123456789ab/name": 1} {
		core, logged := observer.New(zap.DebugLevel)
		set := transport.NewSet(zap.New(core), here, over)
		for range 3 {
			c, err := set.Dial(t.Context(), address.List{{Kind: Kind, At: at}, {Kind: tcp.Kind, At: l.Addr().String()}})
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			if c.RemoteAddr().Network() != tcp.Kind {
				t.Errorf("connected by %v", c.RemoteAddr().Network())
			}
		}
		if said := logged.FilterMessageSnippet("reach").Len(); said != 1 || logged.FilterLevelExact(zap.WarnLevel).Len() != warnings {
			t.Errorf("%s: logged %v, want one line, %d of them a warning", at, logged.All(), warnings)
		}
	}
}

// childAddress names the variable with the address to which a process that a test starts connects, to send for ever.
const childAddress = "PACELINE_TEST_SHM"

func sendForEver(address string) {
	made, err := New(Config{Secret: []byte("secret")})
	if err != nil {
		panic(err)
	}
	c, err := made.Dial(context.Background(), address)
	if err != nil {
		panic(err)
	}
	h, payload := wire.Header{Type: wire.TypePush, Length: 8 << 20}, make([]byte, 8<<20)
	for err == nil {
		err = c.Send(net.Buffers{h.Append(nil), payload})
	}
}

// TestAProcessKilledWhileItWritesLeavesNothing: its peer reads what it published, then its end, and nothing is left.
func TestAProcessKilledWhileItWritesLeavesNothing(t *testing.T) {
	before := traces(t)
	n := start(t, Config{Secret: []byte("secret"), Ring: 1 << 20})
	l, err := n.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		child := exec.Command(os.Args[0])
		child.Env, child.Stderr = append(os.Environ(), childAddress+"="+l.Addr().String()), os.Stderr
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		var h wire.Header
		err = c.ReadHeader(&h)
		for piece := make([]byte, 100_003); err == nil; {
			if i > 0 {
				i--
			} else if child.Process != nil {
				child.Process.Kill() // amid a payload, most probably amid a copy
				child.Process = nil
			}
			err = c.ReadPayload(piece[:min(len(piece), int(h.Length))])
			if h.Length -= min(h.Length, uint32(len(piece))); h.Length == 0 && err == nil {
				err = c.ReadHeader(&h)
			}
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
			t.Errorf("%v, want the peer's end", err)
		}
		c.Close()
		_ = child.Wait()
	}
	l.Close()
	for deadline := time.Now().Add(20 * time.Second); traces(t) != before; runtime.Gosched() { // the watchers of the sockets still end
		if time.Now().After(deadline) {
			t.Fatalf("left: %+v, before: %+v", traces(t), before)
		}
	}
	if lent := n.lent.Load(); lent != 0 {
		t.Errorf("%d bytes of shared memory are accounted to nobody", lent)
	}
}

// traces is what this process and the host hold of shared memory.
func traces(t *testing.T) (found struct{ mapped, files, named int }) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	found.mapped = strings.Count(string(maps), "memfd:paceline")
	for dir, count := range map[string]*int{"/proc/self/fd": &found.files, "/dev/shm": &found.named} {
		entries, err := os.ReadDir(dir)
		if err != nil && dir != "/dev/shm" {
			t.Fatal(err)
		}
		*count = len(entries)
	}
	return found
}
