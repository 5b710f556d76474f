/*
 * The part of the C ABI that never enters Go: handles, polling, waiting and the fork guard. Polling is
 * one load. A wait spins for SPINS_NS, because waking a sleeping thread takes longer than a small exchange,
 * then sleeps on the handle's state. Where waits take longer than that, few spin.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "handles.h"

enum { SPINS_NS = 30000, IN_VAIN = 4, TRIES = 16, SLEEP_NS = 100000000, ERROR_BYTES = 8192 };

struct pl_shared pl_shared = {.bell = -1};
struct pl_socket pl_sockets[PL_SOCKETS];
struct pl_memory pl_memory;

static int forked;
/* A key, not _Thread_local: Go's libraries use the static TLS block, which is small. */
static pthread_key_t last_error;
static pthread_key_t in_done; /* not NULL while the thread is within a pl_done_fn */

static void in_child(void) {
  PL_SET(forked, 1);
  int before = errno, file = PL_GET(pl_memory.file) - 1;
  if (file >= 0) {
    /* First without writing, of which memory may be limited: where that is refused, a write ends the child alone. */
    void *at = mmap(pl_memory.at, pl_memory.bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0);
    if (at != MAP_FAILED) {
      mprotect(at, pl_memory.bytes, PROT_READ | PROT_WRITE);
      madvise(at, pl_memory.bytes, MADV_DONTDUMP); /* a core dump of the child would fill the parent's file as well */
    }
    PL_SET(pl_memory.file, 0); /* fork copies it from now on */
  }
#ifdef SO_COOKIE
  for (int i = 0; i < PL_SOCKETS; i++) {
    int fd = PL_GET(pl_sockets[i].fd) - 1;
    uint64_t cookie;
    socklen_t size = sizeof cookie;
    if (fd >= 0 && !getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) && cookie == pl_sockets[i].cookie) close(fd);
  }
#endif
  errno = before;
}

__attribute__((constructor)) static void on_load(void) {
  pthread_key_create(&last_error, free);
  pthread_key_create(&in_done, NULL);
  pthread_atfork(NULL, NULL, in_child);
}

int pl_in_child(void) {
  if (!PL_GET(forked)) return 0;
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

const int64_t *pl_gathers(void) { return &pl_shared.gathers; }

static void wake(void *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 20, NULL, NULL, 0); }

static void sleep_on(void *word, uint32_t value, int64_t ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, ns < 0 ? NULL : &t, NULL, 0);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int state_of(int32_t h) {
  if (h < 0 || h >= PL_GET(pl_shared.used)) return PL_ERR_INVALID;
  return PL_GET(pl_shared.handles[h].state);
}

/* Has all leave that the engine holds, or has still to take: doorbell.c says why in this order. */
static void pl_flush(int waits) {
  if (!PL_GET(pl_shared.untaken) && !PL_GET(pl_shared.holding)) return;
  if (!pl_ask_to_flush(waits)) goFlush(waits);
}

int pl_poll(int32_t h) {
  if (__atomic_load_n(&forked, __ATOMIC_RELAXED)) return pl_in_child(), PL_ERR_FORKED;
  int state = state_of(h);
  if (state == PL_PENDING) pl_flush(0);
  return state;
}

uint32_t pl_handles_release(const int32_t *list, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    int32_t h = list[i], state = state_of(h), last = PL_GET(pl_shared.released);
    if (state == PL_PENDING || state == PL_ERR_INVALID) return i;
    if (!PL_SWAP_IF(pl_shared.handles[h].state, &state, PL_ERR_INVALID)) return i;
    do {
      pl_shared.handles[h].before = last;
    } while (!PL_SWAP_IF(pl_shared.released, &last, h + 1));
  }
  return count;
}

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

/* As pending, of the operations of a request that the engine may have to answer yet. What it refuses has none. */
static uint32_t pending_of(const pl_request *r) {
  int status = PL_GET(r->answer);
  if (status == PL_UNANSWERED) return r->count;
  return status == PL_OK ? pending(r->handles, r->count, &status) : 0;
}

/* Sleeps until none of a request's operations is pending, or the end. Wakes once where nobody else waits: when as many
 * operations have ended as were pending. Handles that stand in the list twice, of which too many are counted, are
 * looked at again after SLEEP_NS. */
static void sleep_until_all(const pl_request *r, int64_t end) {
  PL_ADD(pl_shared.waiters, 1);
  for (int64_t now = now_ns(); now < end; now = now_ns()) {
    uint32_t seen = PL_GET(pl_shared.ended), left = pending_of(r);
    if (left == 0) break;
    uint32_t until = seen + left, least = PL_GET(pl_shared.wanted);
    for (;;) { /* another waiter's lower count stands; one that has passed does not */
      int passed = (int32_t)(least - seen) <= 0;
      if (!passed && (int32_t)(until - least) >= 0) break;
      if (!PL_SWAP_IF(pl_shared.wanted, &least, until)) continue;
      /* Who put a lower count here after another had slept with its own, and found it passed, has the other look again.
       */
      if (passed && PL_GET(pl_shared.waiters) > 1) wake(&pl_shared.ended);
      break;
    }
    if (PL_GET(pl_shared.ended) == seen) sleep_on(&pl_shared.ended, seen, end - now < SLEEP_NS ? end - now : SLEEP_NS);
  }
  PL_ADD(pl_shared.waiters, -1);
}

/* Spins a little where a core is free, until none of a request's operations is pending, or the end. After IN_VAIN waits
 * in a row that were longer, only each of TRIES is tried. Threads that wait at the same time may miscount. */
static void spin_until_all(const pl_request *r, int64_t end) {
  static uint32_t in_vain;
  uint32_t before = PL_GET(in_vain);
  if (PL_GET(pl_shared.crowded)) return;
  if (before >= IN_VAIN && before % TRIES != 0) {
    PL_SET(in_vain, before + 1);
    return;
  }
  int64_t start = now_ns(), now = start;
  while (now - start < SPINS_NS && now < end && pending_of(r) > 0) now = now_ns();
  if (pending_of(r) == 0) {
    PL_SET(in_vain, 0);
  } else if (now < end) { /* a shorter wait says nothing */
    PL_SET(in_vain, before + 1);
  }
}

int32_t pl_await(pl_request *r) {
  int32_t answer;
  int64_t start = now_ns();
  if (r->waits) {
    spin_until_all(r, INT64_MAX);
    do {
      sleep_until_all(r, now_ns() + SLEEP_NS);
    } while (PL_GET(r->answer) == PL_UNANSWERED);
  }
  while ((answer = PL_GET(r->answer)) == PL_UNANSWERED) {
    if (PL_GET(pl_shared.crowded) || now_ns() - start >= SPINS_NS) sleep_on(&r->answer, (uint32_t)PL_UNANSWERED, -1);
  }
  return answer;
}

int pl_wait(int32_t h, int64_t timeout_ms) { return pl_wait_all(&h, 1, timeout_ms); }

int pl_wait_all(const int32_t *list, uint32_t count, int64_t timeout_ms) {
  if (__atomic_load_n(&forked, __ATOMIC_RELAXED)) return pl_in_child(), PL_ERR_FORKED;
  if (count > PL_HANDLES || (count > 0 && !list)) {
    pl_set_error("pl_wait_all: a list of more handles than there are, or none");
    return PL_ERR_INVALID;
  }
  int status;
  uint32_t left = pending(list, count, &status);
  if (left == 0) return status;
  if (pl_in_done()) return PL_ERR_INVALID;
  pl_flush(timeout_ms != 0);
  int64_t start = now_ns(), now;
  pl_request r = {.handles = (int32_t *)list, .count = count, .answer = PL_OK};
  int forever = timeout_ms < 0 || timeout_ms > (INT64_MAX - start) / 1000000;
  int64_t end = forever ? INT64_MAX : start + timeout_ms * 1000000;
  spin_until_all(&r, end);
  left = pending(list, count, &status);
  if (left == 1 && count == 1) {
    PL_ADD(pl_shared.handles[*list].waiters, 1);
    while (pending(list, count, &status) > 0 && (now = now_ns()) < end)
      sleep_on(&pl_shared.handles[*list].state, PL_PENDING, forever ? -1 : end - now);
    PL_ADD(pl_shared.handles[*list].waiters, -1);
  } else if (left > 0) {
    sleep_until_all(&r, end);
  }
  return pending(list, count, &status) > 0 ? PL_ERR_TIMEOUT : status;
}

void *pl_alloc(uint64_t bytes) {
  void *data = NULL;
  return posix_memalign(&data, 64, bytes) == 0 ? data : NULL;
}

void pl_free(void *data) { free(data); }
