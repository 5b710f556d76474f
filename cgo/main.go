// Command cgo is libpaceline.so: the C ABI of paceline.h over node.Worker. It holds the handle table
// and converts between values of C and Go, nothing else.
package main

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall
#include <stdlib.h>
#include "handles.h"
#include "paceline.h"
*/
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/shm"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

func main() {}

// process is the state of this process. There is one, because the C ABI is a set of functions without a context.
var process struct {
	sync.Mutex
	worker    *node.Worker
	place     *settings.Settings // without a worker: what it may expect to join as
	sets      map[uint32][]int
	warnings  []string                   // of the last init; each is shown once
	scheduler *node.Scheduler            // embedded in rank 0, of the last round that had one
	arena     *shm.Arena                 // nil before the first use, and where the machine has none
	embedded  map[string]*node.Scheduler // those that were started, by address; they live as long as the process, across rounds
	table     table
	texts     texts
}

var errInterrupted = errors.New("interrupted")
var errNotInitialized = errors.New("Paceline has not been initialized; call init() first") //nolint:staticcheck // read by Python users as a sentence

// settingsJSON is the argument of pl_init.
type settingsJSON struct {
	Env         map[string]string `json:"env"`
	Settings    map[string]any    `json:"settings"`
	ProcessSets [][]int           `json:"process_sets"`
	Expect      bool              `json:"expect"`
}

//export goInit
func goInit(text *C.char) C.int {
	process.Lock()
	defer process.Unlock()
	if process.worker != nil {
		return C.PL_OK
	}
	var in settingsJSON
	if err := json.Unmarshal([]byte(C.GoString(text)), &in); err != nil {
		return status(invalid(fmt.Errorf("settings: %w", err)))
	}
	return status(start(in))
}

// start joins the job. Ctrl-C ends its wait for the other ranks.
func start(in settingsJSON) error {
	s, warnings, err := settings.From(in.Env, in.Settings)
	if err != nil {
		return invalid(err)
	}
	if err := s.Complete(); err != nil {
		return invalid(err)
	}
	log, err := node.Logger(s.LogLevel, "worker", s.Rank)
	if err != nil {
		return invalid(err)
	}
	for _, w := range warnings {
		if s.Speaks() && !slices.Contains(process.warnings, w) {
			log.Warn(w)
		}
	}
	process.warnings = warnings
	if process.place = nil; in.Expect {
		process.place, process.arena = &s, arena(log)
		return nil
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	o := node.Options{Scheduler: s.Scheduler, Log: log, Alloc: alloc, Gathering: gathering, Tuned: mayLeave, Arena: arena(log)}
	if s.EmbedScheduler != "" {
		if err := embed(s); err != nil {
			return err
		}
		process.scheduler.Publish()
		o.Scheduler = process.scheduler.Address
	}
	process.table.forget()
	answer()
	share(false)
	w, err := node.StartWorker(ctx, s, o)
	if err != nil {
		return interrupted(ctx, err)
	}
	all := rankset.Range(len(w.Membership.Now().Workers)).Ranks()
	process.worker = w
	full, crowded := w.Full(), w.Crowded()
	atomic.StoreInt32(word(&shared.crowded), int32(number(full)))
	share(crowded)
	process.sets = map[uint32][]int{0: all}
	if err := started(ctx, in, s); err != nil {
		log.Error(fmt.Sprintf("rank %d leaves the job, because its init failed: %v", s.Rank, err)) // its server may stay for long
		w.Leave(ctx)
		process.worker = nil
		return interrupted(ctx, err)
	}
	mayLeave(!s.Autotune) // a search has submissions wait for other ranks, and those that were left have more behind them: until it is over
	return nil
}

// interrupted is the error of what Ctrl-C has ended, if it has.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", errInterrupted, err)
	}
	return err
}

// embed has the scheduler run that this process is to have. Jobs of one process that follow one another may differ in it. What they may differ
// in, and the scheduler hears from rank 0 as well, is not its own: ranks of the next job may come to it before this one does.
func embed(s settings.Settings) (err error) {
	s.NumServers, s.Placement = 0, ""
	key := s.EmbedScheduler
	if process.scheduler = process.embedded[key]; process.scheduler != nil && process.scheduler.Serves(&s) {
		return nil
	}
	if process.scheduler != nil { // nodes that have come to it find the next one, at the same address
		delete(process.embedded, key)
		_ = process.scheduler.Close()
	}
	if process.scheduler, err = node.StartScheduler(s, s.EmbedScheduler, node.Options{}); err != nil {
		return err
	}
	if process.embedded == nil {
		process.embedded = map[string]*node.Scheduler{}
	}
	process.embedded[key] = process.scheduler
	return nil
}

// share has the engine run on one core at a time where the job's processes have none to spare: more of its threads would only
// take turns with ranks that compute, and Go's monitor thread stays awake for milliseconds after each call from C unless that
// core is the only one. What the environment says stands.
func share(crowded bool) {
	switch {
	case os.Getenv("GOMAXPROCS") != "":
	case crowded:
		runtime.GOMAXPROCS(1)
	default:
		runtime.SetDefaultGOMAXPROCS()
	}
}

func number(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// started completes init once the job has formed: process sets and the timeline.
func started(ctx context.Context, in settingsJSON, s settings.Settings) error {
	for _, ranks := range in.ProcessSets {
		set, err := askSet(ctx, process.worker, ranks, (*control.Client).AddSet)
		if err != nil {
			return err
		}
		process.sets[set.ID] = set.Ranks
	}
	if s.Timeline != "" {
		return process.worker.Engine.StartTimeline(s.Timeline)
	}
	return nil
}

// arena is this process's, for another round; nil for none.
func arena(log *zap.Logger) *shm.Arena {
	var err error
	if process.arena == nil {
		process.arena, err = shm.NewArena()
	} else {
		err = process.arena.Renew()
	}
	if err != nil {
		log.Debug("no memory is lent to the servers of this host", zap.Error(err))
		return nil
	}
	return process.arena
}

//export goArenaAlloc
func goArenaAlloc(bytes C.uint64_t) unsafe.Pointer {
	process.Lock()
	defer process.Unlock()
	if process.arena == nil || uint64(bytes) > limits.Arena {
		return nil
	}
	b := process.arena.Alloc(int(bytes))
	if process.worker != nil {
		process.worker.Register(b)
	}
	return unsafe.Pointer(unsafe.SliceData(b))
}

//export goArenaFree
func goArenaFree(memory unsafe.Pointer) C.int {
	process.Lock()
	defer process.Unlock()
	if process.worker != nil {
		process.worker.Unregister(memory)
	}
	if process.arena == nil || !process.arena.Free(memory) {
		return status(fmt.Errorf("%w: %p is no memory of pl_arena_alloc", worker.ErrInvalid, memory))
	}
	return C.PL_OK
}

//export goShutdown
func goShutdown() C.int {
	mayLeave(false)
	takeLeft()
	process.Lock()
	w := process.worker
	process.worker, process.place = nil, nil
	process.Unlock()
	if w != nil {
		w.Shutdown()
	}
	mayLeave(false)               // a search may have ended with the engine
	gathering(worker.Gathering{}) // what other threads have left since ends as what was in flight does
	takeLeft()
	withdraw()
	process.table.calls.wait()
	return C.PL_OK
}

// withdraw has nobody look for a job that is over. The scheduler stays for the next round.
func withdraw() {
	process.Lock()
	defer process.Unlock()
	if process.scheduler != nil && process.worker == nil {
		process.scheduler.Withdraw()
	}
}

// running returns the worker, or an error for the user.
func running() (*node.Worker, error) {
	process.Lock()
	defer process.Unlock()
	if process.worker == nil {
		return nil, errNotInitialized
	}
	return process.worker, nil
}

//export goInfo
func goInfo(buf *C.char, room C.uint64_t) C.int64_t {
	process.Lock()
	w, s, warnings := process.worker, process.place, process.warnings
	sets := []wire.ProcessSet{}
	for id, ranks := range process.sets {
		sets = append(sets, wire.ProcessSet{ID: id, Ranks: ranks})
	}
	process.Unlock()
	info := map[string]any{}
	switch {
	case w != nil:
		s = &w.Settings
		n := w.Tally()
		info["tally"] = map[string]uint64{"admitted": n.Admitted, "dropped": n.Dropped, "duplicate": n.Duplicate, "delayed": n.Delayed, "withheld": n.Withheld}
		info["supersteps"], info["heap"], info["homogeneous"], info["process_sets"] = w.Engine.Supersteps(), heap(), w.Homogeneous, sets
		info["round"] = w.Membership.Now().Round
		if lost := w.Engine.Err(); lost != nil {
			info["failure"] = lost.Error()
		}
	case s == nil:
		return put(nil, errNotInitialized, buf, room)
	}
	maps.Copy(info, map[string]any{
		"rank": s.Rank, "size": s.Size, "local_rank": s.LocalRank, "local_size": s.LocalSize,
		"cross_rank": s.CrossRank, "cross_size": s.CrossSize, "settings": s, "warnings": warnings,
	})
	text, err := json.Marshal(info)
	return put(text, err, buf, room)
}

//export goSetAdd
func goSetAdd(ranks *C.int32_t, count C.uint32_t, id *C.uint32_t) C.int {
	return setOf(ranks, count, id, (*control.Client).AddSet)
}

//export goSetFind
func goSetFind(ranks *C.int32_t, count C.uint32_t, id *C.uint32_t) C.int {
	return setOf(ranks, count, id, (*control.Client).FindSet)
}

// setRequest asks the scheduler for a process set.
type setRequest = func(*control.Client, context.Context, []int) (wire.ProcessSet, error)

func setOf(ranks *C.int32_t, count C.uint32_t, id *C.uint32_t, ask setRequest) C.int {
	return with(func(w *node.Worker) error {
		if count > limits.MaxRanks || count > 0 && ranks == nil {
			return fmt.Errorf("%w: process set of %d ranks at %p, allowed are 1 to %d", worker.ErrInvalid, count, ranks, limits.MaxRanks)
		}
		set, err := askSet(context.Background(), w, each.Of(unsafe.Slice(ranks, count), func(r C.int32_t) int { return int(r) }), ask)
		if err != nil {
			return err
		}
		process.Lock()
		process.sets[set.ID] = set.Ranks
		process.Unlock()
		*id = C.uint32_t(set.ID)
		return nil
	})
}

func askSet(parent context.Context, w *node.Worker, ranks []int, ask setRequest) (wire.ProcessSet, error) {
	ctx, cancel := w.Engine.Within(w.Settings.StartTimeout)
	defer cancel()
	defer context.AfterFunc(parent, cancel)()
	set, err := ask(w.Control, ctx, ranks)
	return set, ofSets(w, err)
}

// ofSets is the error of a call on process sets: of its arguments, of a rank that does not make it, or of what has ended this engine.
func ofSets(w *node.Worker, err error) error {
	return setsError(w.Settings.Rank, w.Engine.Err(), err)
}

func setsError(rank int, broken, err error) error {
	var refused *control.RefusedError
	missed := errors.As(err, &refused) && refused.Missed
	switch {
	case err == nil:
		return nil
	case refused != nil && !missed:
		return invalid(err)
	case broken != nil: // the scheduler tells of a loss before it refuses the calls that wait for that rank
		return fmt.Errorf("a call on process sets on rank %d: %w", rank, broken)
	case missed, errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w on rank %d: %w", worker.ErrStall, rank, err)
	}
	return invalid(err)
}

//export goSetRemove
func goSetRemove(id C.uint32_t) C.int {
	return with(func(w *node.Worker) error {
		ctx, cancel := w.Engine.Within(w.Settings.StartTimeout)
		defer cancel()
		if err := w.RemoveSet(ctx, uint32(id)); err != nil {
			return ofSets(w, err)
		}
		process.Lock()
		delete(process.sets, uint32(id))
		process.Unlock()
		return nil
	})
}

//export goTimelineStart
func goTimelineStart(path *C.char) C.int {
	return with(func(w *node.Worker) error {
		return w.Engine.StartTimeline(settings.TimelinePath(C.GoString(path), w.Settings.Rank))
	})
}

//export goTimelineStop
func goTimelineStop() C.int {
	return with(func(w *node.Worker) error { w.Engine.StopTimeline(); return nil })
}

var versionText = C.CString(version.String())

//export goVersion
func goVersion() *C.char { return versionText }

// with calls f with the worker, after what callers have left, and returns the status.
func with(f func(*node.Worker) error) C.int {
	takeLeft()
	w, err := running()
	if err == nil {
		err = f(w)
	}
	return status(err)
}

// invalid makes an error, if it is one, the caller's.
func invalid(err error) error {
	if err == nil {
		return nil
	}
	return worker.Invalid(err)
}

// status is PL_OK, or that of an error, whose message it sets for pl_last_error.
func status(err error) C.int {
	if err != nil {
		text := C.CString(err.Error())
		C.pl_set_error(text)
		C.free(unsafe.Pointer(text))
	}
	return C.int(statusOf(err))
}

// statusOf never returns PL_PENDING or PL_ERR_TIMEOUT, by which a wait reports that an operation continues.
func statusOf(err error) C.int32_t {
	if err == nil {
		return C.PL_OK
	}
	for _, s := range []struct {
		err    error
		status C.int32_t
	}{
		{worker.ErrInvalid, C.PL_ERR_INVALID}, {worker.ErrDuplicate, C.PL_ERR_DUPLICATE}, {worker.ErrMismatch, C.PL_ERR_MISMATCH},
		{worker.ErrStall, C.PL_ERR_STALL}, {worker.ErrPeerLost, C.PL_ERR_PEER_LOST}, {worker.ErrShutdown, C.PL_ERR_SHUTDOWN},
		{worker.ErrMemory, C.PL_ERR_MEMORY}, {worker.ErrUnsupported, C.PL_ERR_UNSUPPORTED}, {errNotInitialized, C.PL_ERR_NOT_INITIALIZED},
		{errInterrupted, C.PL_ERR_INTERRUPTED}, {context.DeadlineExceeded, C.PL_ERR_STALL},
	} {
		if errors.Is(err, s.err) {
			return s.status
		}
	}
	return C.PL_ERR_INTERNAL
}

// put copies text with a final NUL to the caller's buffer, if it has room, and returns the length; or the status of an
// error.
func put(text []byte, err error, buf *C.char, room C.uint64_t) C.int64_t {
	if err != nil {
		return C.int64_t(status(err))
	}
	if buf != nil && uint64(len(text)) < uint64(room) {
		b := unsafe.Slice((*byte)(unsafe.Pointer(buf)), len(text)+1)
		copy(b, text)
		b[len(text)] = 0
	}
	return C.int64_t(len(text))
}
