package shm

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/forked"
	"github.com/paceline/paceline/internal/limits"
)

// Arena is memory of this process that the servers of its host map: what lies in it is read and written there, and does not
// travel. A process has one, which it passes to every server that it connects to. Its address stays the same for the life of the
// process; pages take memory when they are first written.
type Arena struct {
	mu     sync.Mutex
	memory []byte
	file   int
	lent   bool    // a peer may have mapped the file
	blocks []block // in use, in the order of their places
}

type block struct {
	from, to  int
	abandoned bool // only a peer may still use it
}

// NewArena reserves the addresses. It is an error where the machine has no memory files or not enough addresses.
func NewArena() (*Arena, error) {
	file, err := arenaFile()
	if err != nil {
		return nil, err
	}
	memory, err := unix.Mmap(file, 0, limits.Arena, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		_ = unix.Close(file)
		return nil, fmt.Errorf("no addresses for an arena of %d bytes: %w", limits.Arena, err)
	}
	leaveOutOfDumps(memory)
	forked.Share(memory, file)
	return &Arena{memory: memory, file: file}, nil
}

func arenaFile() (int, error) {
	file, err := unix.MemfdCreate("paceline-arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	err = unix.Ftruncate(file, limits.Arena)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(file), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		_ = unix.Close(file)
		return -1, fmt.Errorf("an arena of %d bytes: %w", limits.Arena, err)
	}
	return file, nil
}

// leaveOutOfDumps keeps a mapping of an arena out of core dumps. The kernel would write all of a memory file, and takes a page for each hole
// that it reads: the host's memory would be full before the dump is.
func leaveOutOfDumps(memory []byte) { _ = unix.Madvise(memory, unix.MADV_DONTDUMP) }

// Alloc gives zeros, whole pages; nil where the arena is full.
func (a *Arena) Alloc(bytes int) []byte {
	if bytes <= 0 || bytes > limits.Arena {
		return nil
	}
	size := (bytes + pageBytes - 1) &^ (pageBytes - 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	i, from := 0, 0
	for ; i < len(a.blocks) && a.blocks[i].from-from < size; i++ {
		from = a.blocks[i].to
	}
	if limits.Arena-from < size {
		return nil
	}
	a.blocks = slices.Insert(a.blocks, i, block{from: from, to: from + size})
	return a.memory[from:][:bytes:bytes]
}

// Blocks is what Alloc gave and somebody here uses. A nil arena has none.
func (a *Arena) Blocks() (all [][]byte) {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, b := range a.blocks {
		if !b.abandoned {
			all = append(all, a.memory[b.from:b.to:b.to])
		}
	}
	return all
}

// Free gives back what Alloc gave, which begins at that address. No server uses it any more. It reports whether there is such memory.
func (a *Arena) Free(at unsafe.Pointer) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := a.find(at)
	if i < 0 {
		return false
	}
	b := a.blocks[i]
	a.blocks = slices.Delete(a.blocks, i, i+1)
	// Where the pages cannot be given back, they are cleared.
	if unix.Fallocate(a.file, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(b.from), int64(b.to-b.from)) != nil {
		clear(a.memory[b.from:b.to])
	}
	return true
}

// Abandon implements transport.Arena: no other Alloc gets that memory before Renew.
func (a *Arena) Abandon(at unsafe.Pointer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := a.find(at); i >= 0 {
		a.blocks[i].abandoned = true
	}
}

// find is the block that begins at an address and that somebody here uses, -1 for none.
func (a *Arena) find(at unsafe.Pointer) int {
	from := int(uintptr(at) - uintptr(unsafe.Pointer(&a.memory[0])))
	return slices.IndexFunc(a.blocks, func(b block) bool { return b.from == from && !b.abandoned })
}

// Renew puts another file behind the memory if a peer may have mapped the present one, with the same contents but for what was abandoned. A server of an earlier round
// that still runs then writes where nobody looks. Nobody connects, or writes into the arena, meanwhile.
func (a *Arena) Renew() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lent {
		return nil
	}
	file, err := arenaFile()
	if err != nil {
		return err
	}
	used := slices.DeleteFunc(slices.Clone(a.blocks), func(b block) bool { return b.abandoned })
	for _, b := range used {
		if err = a.copyTo(file, b); err != nil {
			break
		}
	}
	if err == nil {
		forked.Share(a.memory, -1)
		_, err = unix.MmapPtr(file, 0, unsafe.Pointer(&a.memory[0]), limits.Arena, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE|unix.MAP_FIXED)
		leaveOutOfDumps(a.memory)
	}
	if err != nil {
		_ = unix.Close(file)
		file = a.file
	}
	forked.Share(a.memory, file)
	if err != nil {
		return fmt.Errorf("another file for the arena: %w", err)
	}
	_ = unix.Close(a.file)
	a.file, a.lent, a.blocks = file, false, used
	return nil
}

// copyTo writes what a block has into another file, at the same place. Pages that nobody has touched take no memory there either.
func (a *Arena) copyTo(file int, b block) error {
	for at := int64(b.from); at < int64(b.to); {
		from, err := unix.Seek(a.file, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no more in the file
			return nil
		}
		if err != nil {
			return err
		}
		to, err := unix.Seek(a.file, from, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for at = min(to, int64(b.to)); from < at; {
			n, err := unix.Pwrite(file, a.memory[from:at], from)
			if err != nil {
				return err
			}
			from += int64(n)
		}
	}
	return nil
}

// Memory implements transport.Arena.
func (a *Arena) Memory() []byte { return a.memory }

// lend is the file's descriptor for a peer; -1 of a nil arena.
func (a *Arena) lend() (file int) {
	if a == nil {
		return -1
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lent = true
	return a.file
}

// borrowed is a peer's arena. It stays mapped until the connection has ended and nobody uses what was taken of it.
type borrowed struct {
	memory []byte
	users  atomic.Int32
}

// borrow maps the file of a peer's arena, and closes it.
func borrow(file int) (*borrowed, error) {
	defer unix.Close(file)
	if err := checkFile(file); err != nil {
		return nil, err
	}
	memory, err := unix.Mmap(file, 0, limits.Arena, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("no addresses for the peer's arena: %w", err)
	}
	leaveOutOfDumps(memory)
	b := &borrowed{memory: memory}
	b.users.Store(1)
	return b, nil
}

// checkFile checks that memory of a peer's can neither shrink nor be of another kind.
func checkFile(file int) error {
	var s unix.Stat_t
	if err := errors.Join(sealed(file), unix.Fstat(file, &s)); err != nil {
		return err
	}
	if s.Size != limits.Arena {
		return fmt.Errorf("the peer's arena has %d bytes, want %d", s.Size, limits.Arena)
	}
	return nil
}

// take is a part of the memory, which stays until leave.
func (b *borrowed) take(offset, length uint64) ([]byte, error) {
	if offset > limits.Arena || length > limits.Arena-offset {
		return nil, fmt.Errorf("%d bytes at %d of an arena of %d", length, offset, limits.Arena)
	}
	for {
		n := b.users.Load()
		if n == 0 {
			return nil, errors.New("the peer's arena is not mapped any more")
		}
		if b.users.CompareAndSwap(n, n+1) {
			return b.memory[offset:][:length:length], nil
		}
	}
}

func (b *borrowed) leave() {
	if b != nil && b.users.Add(-1) == 0 {
		_ = unix.Munmap(b.memory)
	}
}
