package main

/*
#include "handles.h"
*/
import "C"

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// maxStruct bounds the size of a caller's structure, all of which is read.
const maxStruct = 4096

// The sizes of the first versions of the structures that have grown. A structure that grows for the first time needs one
// here, in place of its present size, where it is read.
const (
	leastOp     = unsafe.Offsetof(C.pl_op{}.sync)
	leastOutput = unsafe.Offsetof(C.pl_output{}.value)
)

// sizeOf checks the size that a caller's structure begins with. least is the size of its first version, known that of
// this release.
func sizeOf(from unsafe.Pointer, name string, least, known uintptr) (uintptr, error) {
	size := uintptr(*(*uint32)(from))
	if size < least || size > maxStruct || size%8 != 0 {
		return 0, fmt.Errorf("%s of %d bytes: its size is to be that of the caller's header, which is %d here and at least %d", name, size, known, least)
	}
	return size, nil
}

// sized copies a caller's structure to one of this release. Fields that a shorter one lacks become zero; bytes that a
// longer one adds must be zero.
func sized[T any](to, from *T, name string, least uintptr) error {
	known := unsafe.Sizeof(*to)
	size, err := sizeOf(unsafe.Pointer(from), name, least, known)
	if err != nil {
		return err
	}
	given := unsafe.Slice((*byte)(unsafe.Pointer(from)), size)
	for i := known; i < size; i++ {
		if given[i] != 0 {
			return fmt.Errorf("%s of %d bytes has something at byte %d, where this library, which knows %d, has no field: install the release that the caller was built for", name, size, i, known)
		}
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(to)), known)
	clear(b[copy(b, given):])
	return nil
}

// option is sized for options, which may be absent.
func option[T any](from *T, name string, least uintptr) (to T, err error) {
	if from != nil {
		err = sized(&to, from, name, least)
	}
	return to, err
}

// group is what one call submits. Its memory is used again.
type group struct {
	ops     []worker.Op
	dones   []done
	opened  []*entry
	handles []C.int32_t
	shapes  []int64
	one     [unsafe.Sizeof(C.pl_op{}) / 8]uint64 // not a pl_op, whose done_arg need not be a pointer
}

var groups = sync.Pool{New: func() any { return new(group) }}

// rest lets the group be used again.
func (g *group) rest() {
	clear(g.ops)
	clear(g.opened)
	groups.Put(g)
}

// read reads a group of operations, an array whose elements have the caller's size.
func (g *group) read(first *C.pl_op, count C.uint32_t, rank int) error {
	if count == 0 || count > limits.MaxHandles {
		return fmt.Errorf("group of %d operations, allowed are 1 to %d", count, limits.MaxHandles)
	}
	n := int(count)
	g.ops, g.dones, g.shapes = slices.Grow(g.ops[:0], n)[:n], slices.Grow(g.dones[:0], n)[:n], g.shapes[:0]
	g.opened, g.handles = slices.Grow(g.opened[:0], n)[:n], slices.Grow(g.handles[:0], n)[:n]
	c := (*C.pl_op)(unsafe.Pointer(&g.one))
	at := unsafe.Pointer(first)
	for i := range g.ops {
		op := (*C.pl_op)(at)
		if op.size != first.size {
			return fmt.Errorf("pl_op %d of a group has %d bytes, and the first one %d", i, op.size, first.size)
		}
		err := sized(c, op, "pl_op", leastOp)
		if err == nil {
			g.ops[i], err = g.opOf(c, rank)
		}
		if err != nil {
			return err
		}
		g.dones[i] = done{c.done, *(*C.uintptr_t)(unsafe.Pointer(&c.done_arg))}
		at = unsafe.Add(at, first.size)
	}
	return nil
}

// opOf reads one operation. The lengths of its memory follow from the shape.
func (g *group) opOf(c *C.pl_op, rank int) (worker.Op, error) {
	if c.ndim > 0 && c.shape == nil {
		return worker.Op{}, fmt.Errorf("%d dimensions without a shape", c.ndim)
	}
	if c.kind > math.MaxUint8 || c.dtype > math.MaxUint8 || c.reduce_op > math.MaxUint8 || c.ndim > limits.MaxDims || c.nsplits > limits.MaxRanks {
		return worker.Op{}, fmt.Errorf("kind %d, dtype %d, reduce_op %d, %d dimensions or %d splits are out of bounds", c.kind, c.dtype, c.reduce_op, c.ndim, c.nsplits)
	}
	if ms := int64(c.timeout_ms); ms < 0 || ms > math.MaxInt64/int64(time.Millisecond) {
		return worker.Op{}, fmt.Errorf("timeout_ms %d, allowed are 0 for none to %d", ms, math.MaxInt64/int64(time.Millisecond))
	}
	process.Lock()
	ranks, known := process.sets[uint32(c.process_set)]
	process.Unlock()
	if !known {
		return worker.Op{}, fmt.Errorf("process set %d does not exist", c.process_set)
	}
	at := len(g.shapes)
	for _, n := range unsafe.Slice(c.shape, c.ndim) {
		g.shapes = append(g.shapes, int64(n))
	}
	op := worker.Op{
		Kind: units.Kind(c.kind), DType: units.DType(c.dtype), ReduceOp: units.ReduceOp(c.reduce_op),
		Set: wire.ProcessSet{ID: uint32(c.process_set), Ranks: ranks}, Root: int(c.root), Priority: int(c.priority),
		Shape: g.shapes[at:], Prescale: float64(c.prescale), Postscale: float64(c.postscale),
		Name: text(c.name), Unnamed: c.unnamed != 0, Empty: c.empty != 0, AtOnce: c.at_once != 0, Tag: uint64(c.tag), Timeout: time.Duration(c.timeout_ms) * time.Millisecond,
	}
	if c.sequence != 0 {
		op.Name, op.Sequence = "", op.Name
	}
	if c.splits != nil {
		op.Splits = numbers(c.splits, c.nsplits)
	}
	if err := readOptions(&op, c); err != nil {
		return worker.Op{}, err
	}
	in, out, err := op.Lengths(rank)
	if err != nil {
		return worker.Op{}, err
	}
	if in > 0 && c.input == nil || out > 0 && c.output == nil {
		return worker.Op{}, fmt.Errorf("%v: no memory given for %d bytes of input or %d of output", op.Kind, in, out)
	}
	op.Input, op.Output = memory(c.input, in), memory(c.output, out)
	return op, nil
}

// readOptions reads the operation's options.
func readOptions(op *worker.Op, c *C.pl_op) error {
	sync, err := syncOf(c.sync)
	if err != nil {
		return err
	}
	codec, err := option(c.codec, "pl_codec", C.sizeof_pl_codec)
	if err != nil {
		return err
	}
	gate, err := option(c.pull_gate, "pl_gate", C.sizeof_pl_gate)
	if err != nil {
		return err
	}
	held, err := option(c.held, "pl_held", C.sizeof_pl_held)
	if err != nil {
		return err
	}
	if held.use > math.MaxUint8 {
		return fmt.Errorf("use %d is out of bounds", held.use)
	}
	op.Declared = options.Declared{
		Sync:     sync,
		Codec:    text(codec.codec),
		PullGate: options.Gate{Threshold: float64(gate.threshold), Decay: float64(gate.decay)},

		Authenticated: c.authenticated != 0,
	}
	op.Held = worker.Held{Use: units.Use(held.use), Significance: float32(held.significance), Group: text(held.group)}
	return nil
}

// syncOf reads a synchronisation model.
func syncOf(c *C.pl_sync) (options.Sync, error) {
	sync, err := option(c, "pl_sync", C.sizeof_pl_sync)
	return options.Sync{Model: text(sync.model), SoftPark: sync.soft_park != 0}, err
}

// writeOutput fills a caller's structure of size bytes.
func writeOutput(to *C.pl_output, size uintptr, full C.pl_output) {
	full.size = C.uint32_t(size)
	b := unsafe.Slice((*byte)(unsafe.Pointer(to)), size)
	clear(b[copy(b, unsafe.Slice((*byte)(unsafe.Pointer(&full)), unsafe.Sizeof(full))):])
}

func numbers(p *C.int64_t, n C.uint32_t) []int64 {
	return each.Of(unsafe.Slice(p, n), func(v C.int64_t) int64 { return int64(v) })
}

// maxTexts bounds the texts that are kept.
const maxTexts = 1 << 16

// texts are names and settings that operations have had, so that one which comes again is not copied again.
type texts map[string]string

func (t *texts) of(b []byte) string {
	s, known := (*t)[string(b)]
	if !known {
		if *t == nil || len(*t) >= maxTexts {
			*t = texts{}
		}
		s = string(b)
		(*t)[s] = s
	}
	return s
}

func text(c *C.char) string {
	if c == nil || *c == 0 {
		return ""
	}
	n := 1
	for *(*C.char)(unsafe.Add(unsafe.Pointer(c), n)) != 0 {
		n++
	}
	process.Lock()
	defer process.Unlock()
	return process.texts.of(unsafe.Slice((*byte)(unsafe.Pointer(c)), n))
}

// given checks what a caller says of its memory, before that is looked at.
func given(p unsafe.Pointer, bytes C.uint64_t) error {
	if bytes > limits.MaxTensor || p == nil && bytes > 0 {
		return fmt.Errorf("%w: %d bytes at %p, allowed are up to %d, and NULL only for none", worker.ErrInvalid, bytes, p, int64(limits.MaxTensor))
	}
	return nil
}

func memory(p unsafe.Pointer, n int64) []byte {
	if n == 0 {
		return nil // the caller's pointer may be anything
	}
	return unsafe.Slice((*byte)(p), n)
}

func alloc(n int) []byte {
	p := C.pl_alloc(C.uint64_t(n))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*byte)(p), n)
}
