/*
 * The part of the C ABI that never enters Go: handles, polling, waiting and the fork guard. Polling is
 * one load. A wait spins for SPINS_NS, because waking a sleeping thread takes longer than a small exchange,
 * then sleeps on the handle's state.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "handles.h"

enum { SPINS_NS = 30000, ERROR_BYTES = 8192 };

typedef struct handle {
  _Atomic int32_t state; /* pl_status; free ones are PL_ERR_INVALID */
  _Atomic int32_t waiters;
} handle;

static handle handles[PL_HANDLES];
static _Atomic int32_t used; /* handles from here on were never opened: their memory is not touched */
static _Atomic int forked;
/* A key, not _Thread_local: Go's libraries use the static TLS block, which is small. */
static pthread_key_t last_error;
static pthread_key_t in_done; /* not NULL while the thread is within a pl_done_fn */

static void in_child(void) { atomic_store(&forked, 1); }

__attribute__((constructor)) static void on_load(void) {
  pthread_key_create(&last_error, free);
  pthread_key_create(&in_done, NULL);
  pthread_atfork(NULL, NULL, in_child);
}

int pl_in_child(void) {
  if (!atomic_load(&forked)) return 0;
  pl_set_error("Paceline's engine does not survive fork(): it was started in the parent of this process. "
               "Start workers by spawn, or call init() in the child only.");
  return 1;
}

int pl_in_done(void) {
  if (!pthread_getspecific(in_done)) return 0;
  pl_set_error("this function waits for other ranks, and is not for a pl_done_fn, which must not block");
  return 1;
}

void pl_handle_done(pl_done_fn done, uintptr_t done_arg, int32_t h, int32_t status) {
  pthread_setspecific(in_done, &in_done);
  done((void *)done_arg, h, status);
  pthread_setspecific(in_done, NULL);
}

void pl_set_error(const char *text) {
  char *buf = pthread_getspecific(last_error);
  if (!buf && (buf = malloc(ERROR_BYTES))) pthread_setspecific(last_error, buf);
  if (buf) snprintf(buf, ERROR_BYTES, "%s", text);
}

const char *pl_last_error(void) {
  const char *text = pthread_getspecific(last_error);
  return text ? text : "";
}

void pl_handle_open(int32_t h) {
  atomic_store(&handles[h].state, PL_PENDING);
  if (h >= atomic_load(&used)) atomic_store(&used, h + 1); /* the caller opens one at a time */
}

void pl_handle_close(int32_t h) { atomic_store(&handles[h].state, PL_ERR_INVALID); }

void pl_handle_finish(int32_t h, int32_t status) {
  atomic_store(&handles[h].state, status);
  if (atomic_load(&handles[h].waiters) > 0)
    syscall(SYS_futex, &handles[h].state, FUTEX_WAKE_PRIVATE, 1 << 20, NULL, NULL, 0);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int pl_poll(int32_t h) {
  if (atomic_load_explicit(&forked, memory_order_relaxed)) return pl_in_child(), PL_ERR_FORKED;
  if (h < 0 || h >= atomic_load(&used)) return PL_ERR_INVALID;
  return atomic_load(&handles[h].state);
}

int pl_wait(int32_t h, int64_t timeout_ms) {
  int state = pl_poll(h);
  if (state != PL_PENDING) return state;
  if (pl_in_done()) return PL_ERR_INVALID;
  int64_t start = now_ns(), now = start;
  int forever = timeout_ms < 0 || timeout_ms > (INT64_MAX - start) / 1000000;
  int64_t end = forever ? INT64_MAX : start + timeout_ms * 1000000;
  while (now - start < SPINS_NS && now < end) {
    for (int i = 0; i < 64; i++) {
      if ((state = atomic_load(&handles[h].state)) != PL_PENDING) return state;
    }
    now = now_ns();
  }
  atomic_fetch_add(&handles[h].waiters, 1);
  while ((state = atomic_load(&handles[h].state)) == PL_PENDING && (now = now_ns()) < end) {
    int64_t left = end - now;
    struct timespec t = {left / 1000000000, left % 1000000000};
    syscall(SYS_futex, &handles[h].state, FUTEX_WAIT_PRIVATE, PL_PENDING, forever ? NULL : &t, NULL, 0);
  }
  atomic_fetch_sub(&handles[h].waiters, 1);
  return state == PL_PENDING ? PL_ERR_TIMEOUT : state;
}

void *pl_alloc(uint64_t bytes) {
  void *data = NULL;
  return posix_memalign(&data, 64, bytes) == 0 ? data : NULL;
}

void pl_free(void *data) { free(data); }
