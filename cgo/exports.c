/* The exported functions that enter Go, each behind the fork guard. */
#include "_cgo_export.h"
#include "handles.h"
#include "paceline.h"

#define GUARD                             \
  if (pl_in_child()) return PL_ERR_FORKED
/* For functions that wait for other ranks, or for what a running pl_done_fn delays. */
#define GUARD_WAITS                       \
  GUARD;                                  \
  if (pl_in_done()) return PL_ERR_INVALID

uint32_t pl_abi_version(void) { return PL_ABI_VERSION; }

const char *pl_version(void) { return goVersion(); }

int pl_init(const char *settings) {
  GUARD_WAITS;
  return goInit((char *)settings);
}

int pl_shutdown(void) {
  GUARD_WAITS;
  return goShutdown();
}

int64_t pl_seat(const char *request, char *buf, uint64_t cap) {
  GUARD_WAITS;
  return goSeat((char *)request, buf, cap);
}

int64_t pl_info(char *buf, uint64_t cap) {
  GUARD;
  return goInfo(buf, cap);
}

int pl_submit(const pl_op *ops, uint32_t count, int32_t *handles) {
  GUARD;
  if (count == 1 && ops && handles && pl_leave(ops, handles)) return PL_OK;
  int status = pl_ask(ops, count, handles);
  return status == PL_OK ? status
                         : goSubmit((pl_op *)ops, count, handles); /* which says on this thread what is wrong */
}

void *pl_arena_alloc(uint64_t bytes) { return pl_in_child() ? 0 : goArenaAlloc(bytes); }

int pl_arena_free(void *memory) {
  GUARD;
  return goArenaFree(memory);
}

int pl_check_sync(const pl_sync *sync, uint32_t accumulate, uint32_t workers) {
  GUARD;
  return goCheckSync((pl_sync *)sync, accumulate, workers);
}

int64_t pl_sync_info(const char *sync, char *buf, uint64_t cap) {
  GUARD;
  return goSyncInfo((char *)sync, buf, cap);
}

int pl_check_codec(const char *codec) {
  GUARD;
  return goCheckCodec((char *)codec);
}

int64_t pl_codec_info(const char *codec, char *buf, uint64_t cap) {
  GUARD;
  return goCodecInfo((char *)codec, buf, cap);
}

int pl_set_condition(const char *change, uint64_t *at) {
  GUARD_WAITS;
  return goSetCondition((char *)change, at);
}

int pl_end_iteration(uint32_t process_set, const char *name, int32_t *last) {
  GUARD_WAITS;
  return goEndIteration(process_set, (char *)name, last);
}

int pl_begin_iteration(uint32_t process_set, const char *name) {
  GUARD;
  return goBeginIteration(process_set, (char *)name);
}

int pl_join(pl_done_fn done, void *done_arg, int32_t *handle) {
  GUARD;
  return goJoin(done, (uintptr_t)done_arg, handle);
}

int64_t pl_error(int32_t handle, char *buf, uint64_t cap) {
  GUARD;
  return goError(handle, buf, cap);
}

int pl_result(int32_t handle, pl_output *out) {
  GUARD;
  return goResult(handle, out);
}

int pl_release(int32_t handle) { return pl_release_all(&handle, 1); }

int pl_release_all(const int32_t *handles, uint32_t count) {
  GUARD;
  uint32_t done = handles ? pl_handles_release(handles, count) : 0;
  return done == count ? PL_OK : goRelease((int32_t *)handles + done, count - done);
}

int64_t pl_state(void *buf, uint64_t cap) {
  GUARD_WAITS;
  return goState(buf, cap);
}

int pl_set_state(const void *state, uint64_t bytes) {
  GUARD_WAITS;
  return goSetState((void *)state, bytes);
}

int pl_process_set_add(const int32_t *ranks, uint32_t count, uint32_t *id) {
  GUARD_WAITS;
  return goSetAdd((int32_t *)ranks, count, id);
}

int pl_process_set_find(const int32_t *ranks, uint32_t count, uint32_t *id) {
  GUARD_WAITS;
  return goSetFind((int32_t *)ranks, count, id);
}

int pl_process_set_remove(uint32_t id) {
  GUARD_WAITS;
  return goSetRemove(id);
}

int pl_timeline_start(const char *path) {
  GUARD;
  return goTimelineStart((char *)path);
}

int pl_timeline_stop(void) {
  GUARD;
  return goTimelineStop();
}
