package shm

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

func arena(t testing.TB) *Arena {
	t.Helper()
	a, err := NewArena()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Munmap(a.memory)
		_ = unix.Close(a.file)
	})
	return a
}

func at(b []byte) unsafe.Pointer { return unsafe.Pointer(&b[0]) }

// lending is a connection whose dialler lends an arena.
func lending(t testing.TB) (a *Arena, lender, borrower transport.Lender) {
	a = arena(t)
	x, y := connect(t, Config{Arena: a})
	return a, x.(*stream.Conn), y.(*stream.Conn)
}

func TestAnArenaNamesWhatIsInUse(t *testing.T) {
	a := arena(t)
	first, second, third := a.Alloc(pageBytes), a.Alloc(3*pageBytes), a.Alloc(100)
	a.Free(at(first))
	a.Abandon(at(third))
	if all := a.Blocks(); len(all) != 1 || at(all[0]) != at(second) || len(all[0]) != 3*pageBytes {
		t.Errorf("of three blocks the second is in use: %d", len(all))
	}
	if all := (*Arena)(nil).Blocks(); len(all) > 0 {
		t.Errorf("no arena has %d blocks", len(all))
	}
}

func TestAPeerReadsAndWritesWhatIsLent(t *testing.T) {
	a, lender, borrower := lending(t)
	a.Alloc(pageBytes)
	mine := a.Alloc(100_000)
	if lender.Lends() != a || borrower.Lends() != nil {
		t.Fatalf("the ends lend %v and %v", lender.Lends(), borrower.Lends())
	}
	copy(mine, "from the lender")
	offset := uint64(uintptr(at(mine)) - uintptr(at(a.Memory())))
	theirs, err := borrower.Borrow(offset, uint64(len(mine)))
	if err != nil || !bytes.Equal(theirs, mine) {
		t.Fatalf("%q, error %v", theirs[:20], err)
	}
	copy(theirs, "from the borrower")
	if !bytes.HasPrefix(mine, []byte("from the borrower")) {
		t.Errorf("the lender has %q", mine[:20])
	}
	borrower.Return()
}

func TestWhatIsBorrowedOutlivesTheConnection(t *testing.T) {
	a, lender, borrower := lending(t)
	copy(a.Alloc(1), "x")
	theirs, err := borrower.Borrow(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	lender.(*stream.Conn).Close()
	borrower.(*stream.Conn).Close()
	conn := borrower.(*stream.Conn).NetConn().(*conn)
	for conn.users.Load() > 0 { // the goroutine that watches the socket
		_ = conn.enter()
		conn.leave()
	}
	if theirs[0] != 'x' {
		t.Error("what was borrowed is gone")
	}
	borrower.Return()
	if _, err := borrower.Borrow(0, 1); err == nil {
		t.Error("memory was borrowed that is not mapped any more")
	}
}

func TestWhatLiesOutsideOfTheArenaIsNotLent(t *testing.T) {
	_, _, borrower := lending(t)
	for _, part := range [][2]uint64{{limits.Arena, 1}, {limits.Arena + 1, 0}, {0, limits.Arena + 1}, {1 << 63, 1 << 63}, {limits.Arena - 1, 2}} {
		if _, err := borrower.Borrow(part[0], part[1]); err == nil {
			t.Errorf("%d bytes at %d were lent", part[1], part[0])
		}
	}
	_, y := connect(t, Config{})
	if _, err := y.(transport.Lender).Borrow(0, 1); err == nil {
		t.Error("a peer without an arena lends memory")
	}
}

func TestAnArenaGivesEachByteOnceAndZeros(t *testing.T) {
	a := arena(t)
	first, second, third := a.Alloc(1), a.Alloc(2*pageBytes), a.Alloc(pageBytes+1)
	copy(second, "used")
	if !a.Free(at(second)) || a.Free(at(second)) || a.Free(at(third[pageBytes:])) {
		t.Error("memory was not taken back, or what is none was")
	}
	if again := a.Alloc(2 * pageBytes); at(again) != at(second) || again[0] != 0 {
		t.Errorf("the gap was not used, or holds %q", again[:4])
	}
	if between := a.Alloc(1); at(between) == at(first) || at(between) == at(third) || uintptr(at(between)) < uintptr(at(third)) {
		t.Error("two have one page")
	}
	for _, bytes := range []int{0, -1, limits.Arena, limits.Arena + 1} {
		if a.Alloc(bytes) != nil {
			t.Errorf("%d bytes were given", bytes)
		}
	}
}

// A server of an earlier round that still runs writes where nobody looks.
func TestARenewedArenaIsNotItsOldBorrowers(t *testing.T) {
	a, _, borrower := lending(t)
	mine := a.Alloc(100_000)
	copy(mine, "kept")
	old, err := borrower.Borrow(0, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer borrower.Return()
	if err := a.Renew(); err != nil {
		t.Fatal(err)
	}
	copy(old, "late")
	if !strings.HasPrefix(string(mine), "kept") || cap(mine) != 100_000 {
		t.Errorf("the arena holds %q", mine[:4])
	}
	x, y := connect(t, Config{Arena: a})
	copy(mine, "next")
	if now, err := y.(transport.Lender).Borrow(0, 4); err != nil || string(now) != "next" || transport.Lends(x) != a {
		t.Errorf("the next borrower reads %q, error %v", now, err)
	}
}

// A core dump writes what a memory file has no pages for as well, and takes a page for each.
func TestCoreDumpsLeaveArenasOut(t *testing.T) {
	a, _, borrower := lending(t)
	theirs := borrower.(*stream.Conn).NetConn().(*conn).borrowed
	for name, memory := range map[string][]byte{"the arena": a.memory, "a peer's arena": theirs.memory} {
		if !outOfDumps(t, memory) {
			t.Errorf("%s is in core dumps", name)
		}
	}
	if err := a.Renew(); err != nil {
		t.Fatal(err)
	}
	if !outOfDumps(t, a.memory) {
		t.Error("the arena is in core dumps when it was renewed")
	}
}

// outOfDumps looks up the kernel's flags of a mapping: dd is MADV_DONTDUMP.
func outOfDumps(t *testing.T, memory []byte) bool {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, mapping, found := strings.Cut(string(maps), fmt.Sprintf("\n%x-%x ", uintptr(at(memory)), uintptr(at(memory))+uintptr(len(memory))))
	_, flags, _ := strings.Cut(mapping, "VmFlags:")
	flags, _, _ = strings.Cut(flags, "\n")
	if !found || flags == "" {
		t.Fatal("no such mapping, or none with flags")
	}
	return slices.Contains(strings.Fields(flags), "dd")
}

func TestWhatIsAbandonedComesBackWhereTheArenaIsRenewed(t *testing.T) {
	a, _, _ := lending(t)
	late, mine := a.Alloc(1), a.Alloc(pageBytes)
	copy(late, "late")
	copy(mine, "kept")
	a.Abandon(at(late))
	if again := a.Alloc(1); at(again) == at(late) || a.Free(at(late)) {
		t.Error("memory that a peer may write was given to another")
	}
	if err := a.Renew(); err != nil {
		t.Fatal(err)
	}
	if again := a.Alloc(1); at(again) != at(late) || again[0] != 0 || string(mine[:4]) != "kept" {
		t.Errorf("the renewed arena holds %q and %q, and gives what was abandoned: %v", again[:4], mine[:4], at(again) == at(late))
	}
}

func TestAnArenaThatCouldShrinkIsRefused(t *testing.T) {
	for want, seal := range map[string]int{"seals": 0, "bytes": seals} {
		fd, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		if err = unix.Ftruncate(fd, limits.Arena-pageBytes); err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seal)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := borrow(fd); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one about %s", err, want)
		}
	}
}

// TestARenewedArenaTakesNoMoreMemoryThanItsContents: large blocks that are mostly empty are copied with their holes.
func TestARenewedArenaTakesNoMoreMemoryThanItsContents(t *testing.T) {
	a := arena(t)
	const length = 16 << 30
	for range 2 {
		b := a.Alloc(length)
		for _, i := range []int{0, length/2 + 1, length/2 + pageBytes, length - 1} {
			b[i] = byte(1 + i%7)
		}
	}
	unwritten := a.Alloc(pageBytes)
	before := slices.Clone(a.blocks)
	a.lend()
	if err := a.Renew(); err != nil {
		t.Fatal(err)
	}
	for k := range 2 {
		b := a.memory[k*length:][:length]
		for _, i := range []int{0, length/2 + 1, length/2 + pageBytes, length - 1} {
			if b[i] != byte(1+i%7) || b[i/2+100] != 0 {
				t.Errorf("block %d has %d at %d", k, b[i], i)
			}
		}
	}
	var is unix.Stat_t
	if err := unix.Fstat(a.file, &is); err != nil || is.Blocks*512 > 1<<20 {
		t.Errorf("the file takes %d bytes, error %v", is.Blocks*512, err)
	}
	if unwritten[0] != 0 || !slices.Equal(a.blocks, before) {
		t.Error("blocks have changed")
	}
}
