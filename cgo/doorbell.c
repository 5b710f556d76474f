/*
 * How a caller's thread hands work to the engine without entering Go: it queues a request and rings a doorbell, an
 * eventfd on which a goroutine of the engine sleeps. A thread that enters Go and leaves it keeps one of Go's processors
 * until the runtime's monitor thread takes it back, which costs dozens of wake-ups for each operation, and a small
 * exchange more time than it takes.
 */
#include <unistd.h>

#include "_cgo_export.h"
#include "handles.h"

/* Has the engine look, by a call into Go where a program has closed the descriptor, with all others that it did not
 * know. */
static void ring(int fd) {
  uint64_t one = 1;
  if (PL_SWAP(pl_shared.rung, 1) || write(fd, &one, sizeof one) == sizeof one) return;
  PL_SET(pl_shared.bell, -1);
  goServe();
}

/* Whether the caller waits for the operations next: one sleep does for the answer and for them. */
static int waits_for(const pl_op *ops, uint32_t count) {
  if (count == 0 || !ops || ops->size != sizeof *ops) return 0;
  return ops[count - 1].at_once && !ops[count - 1].done;
}

int pl_ask(const pl_op *ops, uint32_t count, int32_t *handles) {
  int fd = PL_GET(pl_shared.bell);
  if (fd < 0 || pl_within_done()) return PL_UNANSWERED; /* Go called this thread, and would wait for itself */
  pl_request r = {.next = PL_GET(pl_shared.requests),
                  .ops = ops,
                  .handles = handles,
                  .count = count,
                  .ended = PL_GET(pl_shared.ended),
                  .waits = waits_for(ops, count),
                  .answer = PL_UNANSWERED};
  while (!PL_SWAP_IF(pl_shared.requests, &r.next, &r)) {
  }
  ring(fd);
  return pl_await(&r);
}

int pl_ask_to_flush(int waits) {
  int fd = PL_GET(pl_shared.bell);
  if (fd < 0) return 0;
  __atomic_fetch_or(&pl_shared.flushes, waits ? PL_FLUSH_AWAITED : PL_FLUSH, __ATOMIC_SEQ_CST);
  ring(fd);
  return 1;
}
