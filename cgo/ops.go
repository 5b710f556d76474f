package main

/*
#include "handles.h"
#include "paceline.h"
*/
import "C"

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// table holds what finished operations leave for the caller. Handles are used again in the order in
// which they were released, so that a stale one is noticed rather than taken for another.
type table struct {
	sync.Mutex
	next    int32   // never used from here on
	free    []int32 // released, oldest first
	results map[int32]*finished
}

type finished struct {
	out   worker.Output
	err   error
	crows *C.int64_t // out.Rows for the caller
	taken bool
}

func (t *table) open(n int) ([]int32, error) {
	t.Lock()
	defer t.Unlock()
	if len(t.free)+C.PL_HANDLES-int(t.next) < n {
		return nil, fmt.Errorf("%w: %d handles are in use; synchronise and release some", worker.ErrMemory, C.PL_HANDLES)
	}
	handles := make([]int32, n)
	for i := range handles {
		if t.next < C.PL_HANDLES {
			handles[i] = t.next
			t.next++
		} else {
			handles[i] = t.free[0]
			t.free = t.free[1:]
		}
		C.pl_handle_open(C.int32_t(handles[i]))
	}
	return handles, nil
}

func (t *table) finish(h int32, out worker.Output, err error) {
	status := C.int32_t(C.PL_OK)
	t.Lock()
	if err != nil {
		status = statusOf(err)
	}
	if t.results == nil {
		t.results = map[int32]*finished{}
	}
	t.results[h] = &finished{out: out, err: err}
	t.Unlock()
	C.pl_handle_finish(C.int32_t(h), status)
}

func (t *table) close(handles ...int32) {
	t.Lock()
	defer t.Unlock()
	for _, h := range handles {
		delete(t.results, h)
		C.pl_handle_close(C.int32_t(h))
		t.free = append(t.free, h)
	}
}

func (t *table) get(h C.int32_t) (*finished, error) {
	t.Lock()
	defer t.Unlock()
	return t.find(h)
}

func (t *table) find(h C.int32_t) (*finished, error) {
	if f := t.results[int32(h)]; f != nil {
		return f, nil
	}
	return nil, fmt.Errorf("%w: handle %d has no finished operation", worker.ErrInvalid, h)
}

// release gives back what a finished operation left and its handle, once.
func (t *table) release(h C.int32_t) error {
	t.Lock()
	f, err := t.find(h)
	delete(t.results, int32(h))
	t.Unlock()
	if err != nil {
		return err
	}
	if !f.taken {
		C.pl_free(unsafe.Pointer(unsafe.SliceData(f.out.Data)))
	}
	C.pl_free(unsafe.Pointer(f.crows))
	t.close(int32(h))
	return nil
}

//export goSubmit
func goSubmit(ops *C.pl_op, count C.uint32_t, handles *C.int32_t) C.int {
	w, err := running()
	if err != nil {
		return fail(err)
	}
	if count == 0 || count > limits.MaxHandles {
		return fail(fmt.Errorf("%w: group of %d operations, allowed are 1 to %d", worker.ErrInvalid, count, limits.MaxHandles))
	}
	list := make([]worker.Op, count)
	for i := range list {
		if list[i], err = opOf(&unsafe.Slice(ops, count)[i], w.Settings.Rank); err != nil {
			return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
		}
	}
	opened, err := engine.table.open(len(list))
	if err != nil {
		return fail(err)
	}
	for i := range list {
		h := opened[i]
		list[i].Done = func(out worker.Output, err error) { engine.table.finish(h, out, err) }
	}
	if err := w.Engine.Submit(list); err != nil {
		engine.table.close(opened...)
		return fail(err)
	}
	for i, h := range opened {
		unsafe.Slice(handles, count)[i] = C.int32_t(h)
	}
	return C.PL_OK
}

// opOf reads one operation from C. Lengths follow from the shape.
func opOf(c *C.pl_op, rank int) (worker.Op, error) {
	if c.size != C.sizeof_pl_op {
		return worker.Op{}, fmt.Errorf("pl_op of %d bytes, this library's has %d", c.size, C.sizeof_pl_op)
	}
	if c.ndim > 0 && c.shape == nil {
		return worker.Op{}, fmt.Errorf("%d dimensions without a shape", c.ndim)
	}
	if c.kind > math.MaxUint8 || c.dtype > math.MaxUint8 || c.reduce_op > math.MaxUint8 || c.ndim > limits.MaxDims || c.nsplits > limits.MaxRanks {
		return worker.Op{}, fmt.Errorf("kind %d, dtype %d, reduce_op %d, %d dimensions or %d splits are out of bounds", c.kind, c.dtype, c.reduce_op, c.ndim, c.nsplits)
	}
	engine.Lock()
	ranks, known := engine.sets[uint32(c.process_set)]
	engine.Unlock()
	if !known {
		return worker.Op{}, fmt.Errorf("process set %d does not exist", c.process_set)
	}
	op := worker.Op{
		Kind: units.Kind(c.kind), DType: units.DType(c.dtype), ReduceOp: units.ReduceOp(c.reduce_op),
		Set: wire.ProcessSet{ID: uint32(c.process_set), Ranks: ranks}, Root: int(c.root), Priority: int(c.priority),
		Shape: numbers(c.shape, c.ndim), Prescale: float64(c.prescale), Postscale: float64(c.postscale),
	}
	if c.splits != nil {
		op.Splits = numbers(c.splits, c.nsplits)
	}
	if c.name != nil {
		op.Name = C.GoString(c.name)
	}
	if c.use > math.MaxUint8 {
		return worker.Op{}, fmt.Errorf("use %d is out of bounds", c.use)
	}
	op.Use, op.Significance = units.Use(c.use), float32(c.significance)
	if c.group != nil {
		op.Group = C.GoString(c.group)
	}
	op.Empty = c.empty != 0
	op.PullGate = options.Gate{Threshold: float64(c.pull_threshold), Decay: float64(c.pull_decay)}
	if c.codec != nil {
		op.Codec = C.GoString(c.codec)
	}
	if c.sync != nil || c.soft_park != 0 {
		op.Sync = options.Sync{Model: C.GoString(c.sync), SoftPark: c.soft_park != 0}
		// Later uses of a held value need a declaration under the same model, so that is the one to look at:
		// a model may be an expression, which is compiled each time that it is checked.
		if held := op.Kind == units.Accumulate; !held || op.Use == units.Declare {
			if err := node.CheckSync(op.Sync.Model, op.Sync.SoftPark, held, len(ranks)); err != nil {
				return worker.Op{}, err
			}
		}
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

func numbers(p *C.int64_t, n C.uint32_t) []int64 {
	list := make([]int64, n)
	for i, v := range unsafe.Slice(p, n) {
		list[i] = int64(v)
	}
	return list
}

func memory(p unsafe.Pointer, n int64) []byte { return unsafe.Slice((*byte)(p), n) }

func alloc(n int) []byte {
	p := C.pl_alloc(C.uint64_t(n))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*byte)(p), n)
}

//export goCheckSync
func goCheckSync(sync *C.char, softPark, accumulate, workers C.uint32_t) C.int {
	if err := node.CheckSync(C.GoString(sync), softPark != 0, accumulate != 0, int(workers)); err != nil {
		return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
	}
	return C.PL_OK
}

//export goCheckCodec
func goCheckCodec(codec *C.char) C.int {
	if err := node.CheckCodec(C.GoString(codec)); err != nil {
		return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
	}
	return C.PL_OK
}

//export goState
func goState(buf unsafe.Pointer, room C.uint64_t) C.int64_t {
	w, err := running()
	if err != nil {
		return C.int64_t(fail(err))
	}
	n, err := w.Engine.State(memory(buf, int64(min(room, limits.MaxTensor))))
	if err != nil {
		return C.int64_t(fail(err))
	}
	return C.int64_t(n)
}

//export goSetState
func goSetState(state unsafe.Pointer, bytes C.uint64_t) C.int {
	w, err := running()
	if err == nil {
		err = w.Engine.SetState(memory(state, int64(bytes)))
	}
	if err != nil {
		return fail(err)
	}
	return C.PL_OK
}

//export goSetCondition
func goSetCondition(change *C.char, at *C.uint64_t) C.int {
	w, err := running()
	if err != nil {
		return fail(err)
	}
	var c struct {
		wire.Condition
		Servers []int `json:"servers"`
	}
	if err := json.Unmarshal([]byte(C.GoString(change)), &c); err != nil {
		return fail(fmt.Errorf("%w: change of conditions: %w", worker.ErrInvalid, err))
	}
	n, err := w.Engine.SetCondition(context.Background(), c.Servers, c.Condition)
	if err != nil {
		return fail(err)
	}
	*at = C.uint64_t(n)
	return C.PL_OK
}

//export goEndIteration
func goEndIteration(set C.uint32_t, name *C.char, last *C.int32_t) C.int {
	w, err := running()
	if err != nil {
		return fail(err)
	}
	ends, err := w.Engine.EndIteration(uint32(set), C.GoString(name))
	if err != nil {
		return fail(err)
	}
	*last = C.int32_t(0)
	if ends {
		*last = 1
	}
	return C.PL_OK
}

//export goBeginIteration
func goBeginIteration(set C.uint32_t, name *C.char) C.int {
	w, err := running()
	if err == nil {
		err = w.Engine.BeginIteration(uint32(set), C.GoString(name))
	}
	if err != nil {
		return fail(err)
	}
	return C.PL_OK
}

//export goJoin
func goJoin(handle *C.int32_t) C.int {
	w, err := running()
	if err != nil {
		return fail(err)
	}
	opened, err := engine.table.open(1)
	if err != nil {
		return fail(err)
	}
	h := opened[0]
	if err := w.Engine.Join(func(out worker.Output, err error) { engine.table.finish(h, out, err) }); err != nil {
		engine.table.close(h)
		return fail(err)
	}
	*handle = C.int32_t(h)
	return C.PL_OK
}

//export goError
func goError(h C.int32_t, buf *C.char, room C.uint64_t) C.int64_t {
	f, err := engine.table.get(h)
	if err != nil {
		return C.int64_t(fail(err))
	}
	if f.err == nil {
		return put(nil, buf, room)
	}
	return put([]byte(f.err.Error()), buf, room)
}

//export goResult
func goResult(h C.int32_t, out *C.pl_output) C.int {
	f, err := engine.table.get(h)
	if err != nil {
		return fail(err)
	}
	if out.size != C.sizeof_pl_output {
		return fail(fmt.Errorf("%w: pl_output of %d bytes, this library's has %d", worker.ErrInvalid, out.size, C.sizeof_pl_output))
	}
	if f.err != nil {
		return fail(f.err)
	}
	if f.taken {
		return fail(fmt.Errorf("%w: the output of handle %d was taken before", worker.ErrInvalid, h))
	}
	n := len(f.out.Rows)
	if n > 0 {
		if f.crows = (*C.int64_t)(C.pl_alloc(C.uint64_t(8 * n))); f.crows == nil {
			return fail(fmt.Errorf("%w: no memory for %d numbers of rows", worker.ErrMemory, n))
		}
		for i, r := range f.out.Rows {
			unsafe.Slice(f.crows, n)[i] = C.int64_t(r)
		}
	}
	f.taken = true
	out.data, out.bytes = unsafe.Pointer(unsafe.SliceData(f.out.Data)), C.uint64_t(len(f.out.Data))
	out.rows, out.nrows = f.crows, C.uint32_t(n)
	out.value = C.int32_t(f.out.Value)
	return C.PL_OK
}

//export goRelease
func goRelease(h C.int32_t) C.int {
	if err := engine.table.release(h); err != nil {
		return fail(err)
	}
	return C.PL_OK
}
