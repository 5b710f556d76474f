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

#include "_cgo_export.h"
#include "doorbell.h"
#include "handles.h"

enum { SPINS_NS = 30000, SLEEP_NS = 100000000, ERROR_BYTES = 8192 };

/* worker.Gathering */
static _Atomic int64_t gathers;
static _Atomic int32_t holding;
static _Atomic int32_t crowded; /* a thread that spins takes its core from a rank that computes */

typedef struct handle {
  _Atomic int32_t state; /* pl_status; free ones are PL_ERR_INVALID */
  _Atomic int32_t waiters;
  int32_t before; /* the one released before it, + 1, while the engine has not taken it back */
} handle;

static handle handles[PL_HANDLES];
static _Atomic int32_t used; /* handles from here on were never opened: their memory is not touched */
/* For waits for many handles, which sleep on the count: */
static _Atomic uint32_t finished; /* operations that have ended */
static _Atomic uint32_t wanted; /* the least count that somebody waits for */
static _Atomic int32_t all_waiters;
static _Atomic int32_t released; /* the last handle that the engine has not taken back, + 1 */
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

int pl_within_done(void) { return pthread_getspecific(in_done) != NULL; }

int pl_in_done(void) {
  if (!pl_within_done()) return 0;
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

void pl_set_gathering(int64_t bytes, int32_t holds) {
  atomic_store(&gathers, bytes);
  atomic_store(&holding, holds);
}

int64_t pl_gathers(void) { return atomic_load(&gathers); }

void pl_set_crowded(int32_t is) { atomic_store(&crowded, is); }

void pl_handle_open(int32_t h) {
  atomic_store(&handles[h].state, PL_PENDING);
  if (h >= atomic_load(&used)) atomic_store(&used, h + 1); /* the caller opens one at a time */
}

void pl_handle_close(int32_t h) { atomic_store(&handles[h].state, PL_ERR_INVALID); }

void pl_wake(void *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 20, NULL, NULL, 0); }

static void sleep_on(void *word, uint32_t value, int64_t ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, ns < 0 ? NULL : &t, NULL, 0);
}

void pl_handle_finish(int32_t h, int32_t status) {
  atomic_store(&handles[h].state, status);
  if (atomic_load(&handles[h].waiters) > 0) pl_wake(&handles[h].state);
  uint32_t count = atomic_fetch_add(&finished, 1) + 1;
  if (atomic_load(&all_waiters) > 0 && (int32_t)(count - atomic_load(&wanted)) >= 0) pl_wake(&finished);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int32_t pl_await(void *word, int32_t value) {
  _Atomic int32_t *w = word;
  int64_t start = now_ns(), spins = atomic_load(&crowded) ? 0 : SPINS_NS;
  int32_t now;
  while ((now = atomic_load(w)) == value) {
    if (now_ns() - start >= spins) sleep_on(word, (uint32_t)value, -1);
  }
  return now;
}

static int state_of(int32_t h) {
  if (h < 0 || h >= atomic_load(&used)) return PL_ERR_INVALID;
  return atomic_load(&handles[h].state);
}

static void pl_flush(int waits) {
  if (!pl_ask_to_flush(waits)) goFlush(waits);
}

int pl_poll(int32_t h) {
  if (atomic_load_explicit(&forked, memory_order_relaxed)) return pl_in_child(), PL_ERR_FORKED;
  int state = state_of(h);
  if (state == PL_PENDING && atomic_load(&holding)) pl_flush(0);
  return state;
}

uint32_t pl_handles_release(const int32_t *list, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    int32_t h = list[i], state = state_of(h), last = atomic_load(&released);
    if (state == PL_PENDING || state == PL_ERR_INVALID) return i;
    if (!atomic_compare_exchange_strong(&handles[h].state, &state, PL_ERR_INVALID)) return i;
    do {
      handles[h].before = last;
    } while (!atomic_compare_exchange_weak(&released, &last, h + 1));
  }
  return count;
}

int32_t pl_handle_released(int32_t h) { return (h < 0 ? atomic_exchange(&released, 0) : handles[h].before) - 1; }

/* How many of the handles are pending. *status is the first error of the others. */
static uint32_t pending(const int32_t *list, uint32_t count, int *status) {
  uint32_t n = 0;
  *status = PL_OK;
  for (uint32_t i = 0; i < count; i++) {
    int state = state_of(list[i]);
    if (state == PL_PENDING) n++;
    if (state < 0 && *status == PL_OK) *status = state;
  }
  return n;
}

/* Sleeps until none of the handles is pending, or the end. Wakes once where nobody else waits: when as many operations
 * have ended as were pending. Handles that stand in the list twice, of which too many are counted, are looked at again
 * after SLEEP_NS. */
static void sleep_until_all(const int32_t *list, uint32_t count, int64_t end) {
  atomic_fetch_add(&all_waiters, 1);
  for (int64_t now = now_ns(); now < end; now = now_ns()) {
    int status;
    uint32_t seen = atomic_load(&finished), left = pending(list, count, &status);
    if (left == 0) break;
    uint32_t until = seen + left, least = atomic_load(&wanted);
    for (;;) { /* another waiter's lower count stands; one that has passed does not */
      int passed = (int32_t)(least - seen) <= 0;
      if (!passed && (int32_t)(until - least) >= 0) break;
      if (!atomic_compare_exchange_weak(&wanted, &least, until)) continue;
      /* Who put a lower count here after another had slept with its own, and found it passed, has the other look again.
       */
      if (passed && atomic_load(&all_waiters) > 1) pl_wake(&finished);
      break;
    }
    if (atomic_load(&finished) == seen) sleep_on(&finished, seen, end - now < SLEEP_NS ? end - now : SLEEP_NS);
  }
  atomic_fetch_sub(&all_waiters, 1);
}

int pl_wait(int32_t h, int64_t timeout_ms) { return pl_wait_all(&h, 1, timeout_ms); }

int pl_wait_all(const int32_t *list, uint32_t count, int64_t timeout_ms) {
  if (atomic_load_explicit(&forked, memory_order_relaxed)) return pl_in_child(), PL_ERR_FORKED;
  if (count > PL_HANDLES || (count > 0 && !list)) {
    pl_set_error("pl_wait_all: a list of more handles than there are, or none");
    return PL_ERR_INVALID;
  }
  int status;
  uint32_t left = pending(list, count, &status);
  if (left == 0) return status;
  if (pl_in_done()) return PL_ERR_INVALID;
  if (atomic_load(&holding)) pl_flush(timeout_ms != 0);
  int64_t start = now_ns(), now = start;
  int forever = timeout_ms < 0 || timeout_ms > (INT64_MAX - start) / 1000000;
  int64_t end = forever ? INT64_MAX : start + timeout_ms * 1000000;
  int64_t spins = atomic_load(&crowded) ? 0 : SPINS_NS;
  while ((left = pending(list, count, &status)) > 0 && now - start < spins && now < end) now = now_ns();
  if (left == 1 && count == 1) {
    atomic_fetch_add(&handles[*list].waiters, 1);
    while (pending(list, count, &status) > 0 && (now = now_ns()) < end)
      sleep_on(&handles[*list].state, PL_PENDING, forever ? -1 : end - now);
    atomic_fetch_sub(&handles[*list].waiters, 1);
  } else if (left > 0) {
    sleep_until_all(list, count, end);
  }
  return pending(list, count, &status) > 0 ? PL_ERR_TIMEOUT : status;
}

void *pl_alloc(uint64_t bytes) {
  void *data = NULL;
  return posix_memalign(&data, 64, bytes) == 0 ? data : NULL;
}

void pl_free(void *data) { free(data); }
