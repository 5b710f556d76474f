package main

/*
#include "handles.h"
*/
import "C"

import (
	"context"
	"encoding/json"
	"fmt"
	"unsafe"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

//export goSubmit
func goSubmit(ops *C.pl_op, count C.uint32_t, handles *C.int32_t) C.int {
	w, err := running()
	if err != nil {
		return fail(err)
	}
	list, dones, err := opsOf(ops, count, w.Settings.Rank)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
	}
	opened, err := process.table.open(dones)
	if err != nil {
		return fail(err)
	}
	for i, h := range opened {
		list[i].Done = func(out worker.Output, err error) { process.table.finish(h, out, err) }
	}
	if err := w.Engine.Submit(list); err != nil {
		process.table.discard(opened)
		return fail(err)
	}
	for i, h := range opened {
		unsafe.Slice(handles, count)[i] = C.int32_t(h)
	}
	return C.PL_OK
}

//export goCheckSync
func goCheckSync(sync *C.char, softPark, accumulate, workers C.uint32_t) C.int {
	if err := node.CheckSync(C.GoString(sync), softPark != 0, accumulate != 0, int(workers)); err != nil {
		return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
	}
	return C.PL_OK
}

//export goSyncInfo
func goSyncInfo(sync, buf *C.char, room C.uint64_t) C.int64_t {
	text, err := node.SyncInfo(C.GoString(sync))
	if err != nil {
		return C.int64_t(fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err)))
	}
	return put(text, buf, room)
}

//export goCheckCodec
func goCheckCodec(codec *C.char) C.int {
	if err := node.CheckCodec(C.GoString(codec)); err != nil {
		return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
	}
	return C.PL_OK
}

//export goCodecInfo
func goCodecInfo(codec, buf *C.char, room C.uint64_t) C.int64_t {
	text, err := node.CodecInfo(C.GoString(codec))
	if err != nil {
		return C.int64_t(fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err)))
	}
	return put(text, buf, room)
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
func goJoin(call C.pl_done_fn, arg C.uintptr_t, handle *C.int32_t) C.int {
	w, err := running()
	if err != nil {
		return fail(err)
	}
	opened, err := process.table.open([]done{{call, arg}})
	if err != nil {
		return fail(err)
	}
	h := opened[0]
	if err := w.Engine.Join(func(out worker.Output, err error) { process.table.finish(h, out, err) }); err != nil {
		process.table.discard(opened)
		return fail(err)
	}
	*handle = C.int32_t(h)
	return C.PL_OK
}

//export goError
func goError(h C.int32_t, buf *C.char, room C.uint64_t) C.int64_t {
	f, err := process.table.get(h)
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
	f, err := process.table.get(h)
	if err != nil {
		return fail(err)
	}
	size, err := sizeOf(unsafe.Pointer(out), "pl_output", leastOutput, C.sizeof_pl_output)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", worker.ErrInvalid, err))
	}
	if f.err != nil {
		return fail(f.err)
	}
	if f.fetched {
		return fail(fmt.Errorf("%w: the output of handle %d was fetched before", worker.ErrInvalid, h))
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
	f.fetched = true
	writeOutput(out, size, C.pl_output{
		data: unsafe.Pointer(unsafe.SliceData(f.out.Data)), bytes: C.uint64_t(len(f.out.Data)),
		rows: f.crows, nrows: C.uint32_t(n), value: C.int32_t(f.out.Value),
	})
	return C.PL_OK
}

//export goRelease
func goRelease(h C.int32_t) C.int {
	if err := process.table.release(h); err != nil {
		return fail(err)
	}
	return C.PL_OK
}
