/*
 * How a caller's thread hands work to the engine without entering Go: it queues a request and rings a doorbell, an
 * eventfd on which a goroutine of the engine sleeps. A thread that enters Go and leaves it keeps one of Go's processors
 * until the runtime's monitor thread takes it back, which costs dozens of wake-ups for each operation, and a small
 * exchange more time than it takes.
 */
#include <string.h>
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

/* Queues a request. Those of one thread are served in their order, whatever they are. */
static void queue(pl_request *r) {
  r->next = PL_GET(pl_shared.requests);
  while (!PL_SWAP_IF(pl_shared.requests, &r->next, r)) {
  }
}

int pl_ask(const pl_op *ops, uint32_t count, int32_t *handles) {
  int fd = PL_GET(pl_shared.bell);
  if (fd < 0 || pl_within_done()) return PL_UNANSWERED; /* Go called this thread, and would wait for itself */
  pl_request r = {.ops = ops,
                  .handles = handles,
                  .count = count,
                  .ended = PL_GET(pl_shared.ended),
                  .waits = waits_for(ops, count),
                  .answer = PL_UNANSWERED};
  queue(&r);
  ring(fd);
  return pl_await(&r);
}

/* Whether the operation is one that may be left: it asks for a copy of nothing but a name and a shape. */
static int may_be_left(const pl_op *op) {
  if (op->size != sizeof *op || !op->later || op->at_once || op->done || op->kind != PL_ALLREDUCE) return 0;
  if (op->sync || op->codec || op->pull_gate || op->held || op->splits || op->nsplits) return 0;
  if (op->ndim > PL_LEFT_DIMS || (op->ndim > 0 && !op->shape)) return 0;
  return !op->name || strnlen(op->name, PL_LEFT_NAME) < PL_LEFT_NAME;
}

/* Whether the operation alone has as many bytes as the engine holds: all that it holds leaves with it. */
static int is_large(const pl_op *op) {
  static const double item_bytes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1}; /* by pl_dtype */
  double bytes = op->dtype < sizeof item_bytes / sizeof *item_bytes ? item_bytes[op->dtype] : 1;
  for (uint32_t i = 0; i < op->ndim; i++) bytes *= (double)op->shape[i];
  return bytes >= (double)PL_GET(pl_shared.gathers);
}

/* Takes a spare, NULL where there is none. The engine puts one in the place of another only when that was taken: what
 * is read of a place is another's only if the count has moved, and then the swap fails. */
static pl_left *spare(void) {
  uint32_t first = PL_GET(pl_shared.first);
  int32_t number;
  do {
    if (first == PL_GET(pl_shared.end)) return NULL;
    number = PL_GET(pl_shared.spares[first % PL_LEFT]);
  } while (!PL_SWAP_IF(pl_shared.first, &first, first + 1));
  return &pl_shared.left[number];
}

/* Why no operation is forgotten. The caller, in this order: counts the operation in `untaken`, queues it, reads
 * `holding`. The engine, wherever it ceases to hold operations (gathering, shared.go): clears `holding`, reads
 * `untaken`. All are sequentially consistent, so there is one order of them all. If the caller reads 0, it rings. If it
 * reads 1, its read comes before the engine clears it, so the engine then reads a count with the operation, and looks
 * through a queue that has it. `rung` spares a ring only until the engine begins to look, and it clears `rung` before
 * it takes the queue. An engine that holds something ceases to within worker.gatherFor.
 *
 * Who waits for the operation reads `untaken`, then `holding`, and has both leave if either is set (handles.c). The
 * engine lowers `untaken` only after it has submitted, and with that has set `holding` where it holds the operation: so
 * a waiter that finds neither waits for an operation that is under way. */
int pl_leave(const pl_op *op, int32_t *handle) {
  int fd = PL_GET(pl_shared.bell);
  if (fd < 0 || !PL_GET(pl_shared.leaves) || !may_be_left(op) || pl_within_done()) return 0;
  pl_left *l = spare();
  if (!l) return 0;
  l->op = *op;
  if (op->ndim > 0) l->op.shape = memcpy(l->shape, op->shape, op->ndim * sizeof *op->shape);
  if (op->name) l->op.name = strcpy(l->name, op->name);
  l->request = (pl_request){.ops = &l->op, .handles = &l->handle, .count = 1, .left = l};
  *handle = l->handle;
  PL_SET(pl_shared.handles[l->handle].state, PL_PENDING);
  PL_ADD(pl_shared.untaken, 1);
  queue(&l->request);
  if (!PL_GET(pl_shared.holding) || is_large(op)) ring(fd);
  return 1;
}

int pl_ask_to_flush(int waits) {
  int fd = PL_GET(pl_shared.bell);
  if (fd < 0) return 0;
  __atomic_fetch_or(&pl_shared.flushes, waits ? PL_FLUSH_AWAITED : PL_FLUSH, __ATOMIC_SEQ_CST);
  ring(fd);
  return 1;
}
