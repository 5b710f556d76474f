package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/limits"
)

// A segment begins with a page of counters; the two rings follow. Each counter has a cache line and its neighbour to itself,
// because processors fetch lines in pairs.
const (
	pageBytes    = 4096
	counterBytes = 128
)

// The counters of a ring, in the order in which they lie.
const (
	published = iota // bytes that the sender has put in since the beginning
	wanted           // at how many the reader asks for its doorbell; 0: not at all
	consumed         // bytes that the reader has taken out
	awaited          // at how many the sender asks for its doorbell; 0: not at all
	numCounters
)

// Who waits for the doorbells, in the order in which they are passed. The listener's are those of the end that made the segment.
const (
	listenerReads = iota
	listenerSends
	dialerReads
	dialerSends
	numBells
)

// seals keep the size: a peer that could shrink the memory could end this process by SIGBUS.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// segment is the memory of one connection, and the descriptors that belong to it.
type segment struct {
	memory []byte
	file   int // of the memory; -1 when both ends have mapped it
	bells  [numBells]int
	made   bool   // by this end, which is the listener
	closed func() // called by close; may be nil
}

// newSegment makes a segment with rings of so many bytes.
func newSegment(ring int) (*segment, error) {
	g := &segment{file: -1, made: true}
	for i := range g.bells {
		g.bells[i] = -1
	}
	err := g.make(ring)
	if err != nil {
		g.close()
		return nil, fmt.Errorf("no shared memory: %w", err)
	}
	return g, nil
}

func (g *segment) make(ring int) (err error) {
	if g.file, err = unix.MemfdCreate("paceline", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Ftruncate(g.file, pageBytes+2*int64(ring)); err != nil {
		return fmt.Errorf("memory of %d bytes: %w", 2*ring, err)
	}
	if _, err = unix.FcntlInt(uintptr(g.file), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("sealing it: %w", err)
	}
	for i := range g.bells {
		if g.bells[i], err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			return fmt.Errorf("eventfd: %w", err)
		}
	}
	return g.enter()
}

// openSegment maps what a peer has passed, and owns it also where it fails.
func openSegment(files []int) (*segment, error) {
	g := &segment{file: files[0], bells: [numBells]int(files[1:])}
	err := g.enter()
	if err != nil {
		g.close()
		return nil, err
	}
	g.forget()
	return g, nil
}

// enter checks the memory and maps it.
func (g *segment) enter() error {
	var file unix.Stat_t
	err := errors.Join(sealed(g.file), unix.Fstat(g.file, &file))
	if err != nil {
		return err
	}
	ring := (file.Size - pageBytes) / 2
	if ring < limits.MinRing || ring > limits.MaxRing || ring&(ring-1) != 0 || file.Size != pageBytes+2*ring {
		return fmt.Errorf("the memory has %d bytes, want two rings of a power of two from %d to %d", file.Size, limits.MinRing, limits.MaxRing)
	}
	g.memory, err = unix.Mmap(g.file, 0, int(file.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// sealed checks that memory stays as large as it is, and can be touched.
func sealed(file int) error {
	var system unix.Statfs_t
	has, err := unix.FcntlInt(uintptr(file), unix.F_GET_SEALS, 0)
	if err = errors.Join(err, unix.Fstatfs(file, &system)); err != nil {
		return err
	}
	switch {
	case has&seals != seals:
		return fmt.Errorf("the memory has the seals %#x, want %#x", has, seals)
	case system.Type != unix.TMPFS_MAGIC: // huge pages may be missing when they are touched
		return fmt.Errorf("the memory is of the file system %#x, want tmpfs", system.Type)
	}
	return nil
}

// files are the descriptors, as they are passed.
func (g *segment) files() []int { return append([]int{g.file}, g.bells[:]...) }

// forget closes the file of the memory, which lives as long as somebody maps it.
func (g *segment) forget() {
	_ = unix.Close(g.file)
	g.file = -1
}

// close gives everything back. Nobody uses it any more.
func (g *segment) close() {
	for _, fd := range append(g.bells[:], g.file) {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	if g.memory != nil {
		_ = unix.Munmap(g.memory)
	}
	if g.closed != nil {
		g.closed()
	}
}

// ring is one of the two: number 0 is what the listener sends.
func (g *segment) ring(number int) ring {
	size := (len(g.memory) - pageBytes) / 2
	r := ring{data: g.memory[pageBytes+number*size:][:size:size]}
	for i := range r.counters {
		r.counters[i] = (*atomic.Uint64)(unsafe.Pointer(&g.memory[(number*numCounters+i)*counterBytes]))
	}
	return r
}

const _ = uint(pageBytes - 2*numCounters*counterBytes) // the counters have room in their page
