/*
 * How a caller's thread hands work to the engine without entering Go: it queues a request and rings a doorbell, an
 * eventfd on which a goroutine of the engine sleeps. A thread that enters Go and leaves it keeps one of Go's processors
 * until the runtime's monitor thread takes it back, which costs dozens of wake-ups for each operation, and a small
 * exchange more time than it takes.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "doorbell.h"
#include "handles.h"

/* A request on the stack of the thread that waits for its answer. */
typedef struct pending {
  pl_request request;
  _Atomic int32_t status;
} pending;

static _Atomic(pl_request *) queue; /* the latest first */
static _Atomic int32_t flushes;     /* enum pl_flush */
static _Atomic int32_t rung;        /* the engine has still to look */
static _Atomic int bell = -1;

int pl_doorbell_open(void) {
  int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  atomic_store(&bell, fd);
  return fd;
}

void pl_doorbell_lost(void) { atomic_store(&bell, -1); }

/* Has the engine look, by a call into Go where a program has closed the descriptor, with all others that it did not
 * know. */
static void ring(int fd) {
  uint64_t one = 1;
  if (atomic_exchange(&rung, 1) || write(fd, &one, sizeof one) == sizeof one) return;
  atomic_store(&rung, 0);
  goServe();
}

int pl_ask(const pl_op *ops, uint32_t count, int32_t *handles) {
  int fd = atomic_load(&bell);
  if (fd < 0 || pl_within_done()) return PL_UNANSWERED; /* Go called this thread, and would wait for itself */
  pending p = {{.next = atomic_load(&queue), .ops = ops, .handles = handles, .count = count}, PL_UNANSWERED};
  while (!atomic_compare_exchange_weak(&queue, &p.request.next, &p.request)) {
  }
  ring(fd);
  return pl_await(&p.status, PL_UNANSWERED);
}

int pl_ask_to_flush(int waits) {
  int fd = atomic_load(&bell);
  if (fd < 0) return 0;
  atomic_fetch_or(&flushes, waits ? PL_FLUSH_AWAITED : PL_FLUSH);
  ring(fd);
  return 1;
}

pl_request *pl_asked(int32_t *flush) {
  atomic_store(&rung, 0);
  *flush = atomic_exchange(&flushes, 0);
  pl_request *r = atomic_exchange(&queue, NULL), *first = NULL;
  while (r) { /* the earliest first */
    pl_request *next = r->next;
    r->next = first;
    first = r;
    r = next;
  }
  return first;
}

void pl_answer(pl_request *r, int32_t status) {
  _Atomic int32_t *word = &((pending *)r)->status;
  atomic_store(word, status);
  pl_wake(word); /* by now the request may be gone: to wake a word that nobody sleeps on harms nothing */
}
