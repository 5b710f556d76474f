package main

/*
#include "handles.h"
*/
import "C"

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"unsafe"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

//export goSubmit
func goSubmit(ops *C.pl_op, count C.uint32_t, handles *C.int32_t) C.int {
	takeLeft() // which this thread may have left before
	return status(submit(ops, count, handles))
}

func submit(ops *C.pl_op, count C.uint32_t, handles *C.int32_t) error {
	w, err := running()
	if err != nil {
		return err
	}
	g := groups.Get().(*group)
	defer g.rest()
	if err := g.read(ops, count, w.Settings.Rank); err != nil {
		return invalid(err)
	}
	if err := process.table.open(g.dones, g.opened); err != nil {
		return err
	}
	for i, e := range g.opened {
		g.handles[i] = C.int32_t(e.handle) // before it ends: then the entry may be another's
		g.ops[i].Unwaited, g.ops[i].Done = g.dones[i].call != nil, e.end
	}
	if err := w.Engine.Submit(g.ops); err != nil {
		process.table.discard(g.opened)
		return err
	}
	copy(unsafe.Slice(handles, count), g.handles)
	return nil
}

//export goCheckSync
func goCheckSync(sync *C.pl_sync, accumulate, workers C.uint32_t) C.int {
	o, err := syncOf(sync)
	if err == nil {
		err = node.CheckSync(cmp.Or(o.Model, condition.BSP().Name), o.SoftPark, accumulate != 0, int(workers))
	}
	return status(invalid(err))
}

//export goSyncInfo
func goSyncInfo(sync, buf *C.char, room C.uint64_t) C.int64_t {
	text, err := node.SyncInfo(C.GoString(sync))
	return put(text, invalid(err), buf, room)
}

//export goCheckCodec
func goCheckCodec(codec *C.char) C.int { return status(invalid(node.CheckCodec(C.GoString(codec)))) }

//export goCodecInfo
func goCodecInfo(codec, buf *C.char, room C.uint64_t) C.int64_t {
	text, err := node.CodecInfo(C.GoString(codec))
	return put(text, invalid(err), buf, room)
}

//export goState
func goState(buf unsafe.Pointer, room C.uint64_t) (bytes C.int64_t) {
	failed := with(func(w *node.Worker) error {
		room = min(room, limits.MaxTensor)
		if err := given(buf, room); err != nil {
			return err
		}
		n, err := w.Engine.State(memory(buf, int64(room)))
		bytes = C.int64_t(n)
		return err
	})
	return cmp.Or(C.int64_t(failed), bytes)
}

//export goSetState
func goSetState(state unsafe.Pointer, bytes C.uint64_t) C.int {
	return with(func(w *node.Worker) error {
		if err := given(state, bytes); err != nil {
			return err
		}
		return w.Engine.SetState(memory(state, int64(bytes)))
	})
}

//export goSetCondition
func goSetCondition(change *C.char, at *C.uint64_t) C.int {
	return with(func(w *node.Worker) error {
		var c struct {
			wire.Condition
			Servers []int `json:"servers"`
		}
		if err := json.Unmarshal([]byte(C.GoString(change)), &c); err != nil {
			return fmt.Errorf("%w: change of conditions: %w", worker.ErrInvalid, err)
		}
		n, err := w.Engine.SetCondition(context.Background(), c.Servers, c.Condition)
		if err == nil {
			*at = C.uint64_t(n)
		}
		return err
	})
}

//export goEndIteration
func goEndIteration(set C.uint32_t, name *C.char, last *C.int32_t) C.int {
	return with(func(w *node.Worker) error {
		ends, err := w.Engine.EndIteration(uint32(set), C.GoString(name))
		if err != nil {
			return err
		}
		*last = number(ends)
		return nil
	})
}

//export goBeginIteration
func goBeginIteration(set C.uint32_t, name *C.char) C.int {
	return with(func(w *node.Worker) error { return w.Engine.BeginIteration(uint32(set), C.GoString(name)) })
}

//export goJoin
func goJoin(call C.pl_done_fn, arg C.uintptr_t, handle *C.int32_t) C.int {
	return with(func(w *node.Worker) error {
		opened := make([]*entry, 1)
		if err := process.table.open([]done{{call, arg}}, opened); err != nil {
			return err
		}
		h := opened[0].handle
		if err := w.Engine.Join(opened[0].end); err != nil {
			process.table.discard(opened)
			return err
		}
		*handle = C.int32_t(h)
		return nil
	})
}

//export goError
func goError(h C.int32_t, buf *C.char, room C.uint64_t) C.int64_t {
	var text []byte
	f, err := process.table.get(h)
	if err == nil && f.err != nil {
		text = []byte(f.err.Error())
	}
	return put(text, err, buf, room)
}

//export goResult
func goResult(h C.int32_t, out *C.pl_output) C.int {
	f, err := process.table.get(h)
	if err != nil {
		return status(err)
	}
	size, err := sizeOf(unsafe.Pointer(out), "pl_output", leastOutput, C.sizeof_pl_output)
	if err != nil {
		return status(invalid(err))
	}
	if f.err != nil {
		return status(f.err)
	}
	if f.fetched {
		return status(fmt.Errorf("%w: the output of handle %d was fetched before", worker.ErrInvalid, h))
	}
	n := len(f.out.Rows)
	if n > 0 {
		if f.crows = (*C.int64_t)(C.pl_alloc(C.uint64_t(8 * n))); f.crows == nil {
			return status(fmt.Errorf("%w: no memory for %d numbers of rows", worker.ErrMemory, n))
		}
		for i, r := range f.out.Rows {
			unsafe.Slice(f.crows, n)[i] = C.int64_t(r)
		}
	}
	f.fetched = true
	if len(f.out.Data) == 0 && f.out.Data != nil { // the rows of ranks that were lost meanwhile
		C.pl_free(unsafe.Pointer(unsafe.SliceData(f.out.Data)))
		f.out.Data = nil
	}
	writeOutput(out, size, C.pl_output{
		data: unsafe.Pointer(unsafe.SliceData(f.out.Data)), bytes: C.uint64_t(len(f.out.Data)),
		rows: f.crows, nrows: C.uint32_t(n), value: C.int32_t(f.out.Value),
	})
	return C.PL_OK
}

//export goRelease
func goRelease(handles *C.int32_t, count C.uint32_t) C.int {
	if count > limits.MaxHandles || count > 0 && handles == nil {
		return status(fmt.Errorf("%w: %d handles at %p", worker.ErrInvalid, count, handles))
	}
	return status(process.table.release(unsafe.Slice(handles, count)))
}

//export goFlush
func goFlush(waits C.int) {
	takeLeft()
	flush(waits != 0)
}

func flush(waits bool) {
	if w, err := running(); err == nil {
		w.Engine.Flush(waits)
	}
}
