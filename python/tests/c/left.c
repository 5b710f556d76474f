/* Operations that callers leave, by doorbell.c itself, with an engine that holds what it takes and lets it go: none is
 * forgotten however the two coincide, although nobody waits, and each thread's are taken in their order. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "doorbell.c"

#include "check.h"

enum { THREADS = 2, ROUNDS = 30000, EACH = 2 };

struct pl_shared pl_shared = {.bell = -1, .leaves = 1};
static int latest[THREADS]; /* of each thread's operations, by root */
static int served, round_of[THREADS + 1], done_of[THREADS];

const char *pl_last_error(void) { return ""; }

int pl_within_done(void) { return 0; }

int32_t pl_await(pl_request *r) {
  while (PL_GET(r->answer) == PL_UNANSWERED) sched_yield();
  return r->answer;
}

static void put_spare(pl_left *l) {
  uint32_t end = PL_GET(pl_shared.end);
  PL_SET(pl_shared.spares[end % PL_LEFT], (int32_t)(l - pl_shared.left));
  PL_SET(pl_shared.end, end + 1);
}

static void take(const pl_op *op) {
  int thread = (int)op->process_set;
  char name[32];
  snprintf(name, sizeof name, "%d/%d", thread, op->root);
  CHECK(op->root == latest[thread] + 1 && strcmp(op->name, name) == 0 && op->shape[0] == op->root);
  latest[thread] = op->root;
  served++;
}

/* What serve (doorbell.go) does: what is taken is held. */
void goServe(void) {
  PL_SET(pl_shared.rung, 0);
  pl_request *r = PL_SWAP(pl_shared.requests, NULL), *first = NULL, *next;
  for (; r; r = next) next = r->next, r->next = first, first = r;
  for (r = first; r; r = next) {
    next = r->next;
    take(r->ops);
    PL_SET(pl_shared.holding, 1);
    if (r->left) {
      PL_ADD(pl_shared.untaken, -1);
      put_spare(r->left);
    } else {
      PL_SET(r->answer, PL_OK);
    }
  }
}

/* What gathering (shared.go) does when what is held has left. */
static void let_go(void) {
  PL_SET(pl_shared.holding, 0);
  if (PL_GET(pl_shared.untaken) && !PL_SWAP(pl_shared.rung, 1)) goServe();
}

/* Where it cannot be left it is submitted, in the same order. */
static void submit(int thread, int number) {
  char name[32];
  int64_t shape[] = {number};
  int32_t handle = -1;
  snprintf(name, sizeof name, "%d/%d", thread, number);
  pl_op op = {.size = sizeof op,
              .kind = PL_ALLREDUCE,
              .process_set = (uint32_t)thread,
              .root = number,
              .ndim = 1,
              .shape = shape,
              .name = name,
              .later = number % 16 != 0};
  if (!pl_leave(&op, &handle)) CHECK(pl_ask(&op, 1, &handle) == PL_OK);
  memset(name, 'x', sizeof name);
  shape[0] = -1;
}

/* EACH operations in every round that the engine begins, then waits for the next one without a word to the engine. */
static void *call(void *arg) {
  int thread = (int)(intptr_t)arg;
  for (int round = 1; round <= ROUNDS; round++) {
    while (PL_GET(round_of[thread]) < round) sched_yield();
    for (int i = 1; i <= EACH; i++) submit(thread, (round - 1) * EACH + i);
    PL_SET(done_of[thread], round);
  }
  return NULL;
}

static int all_done(int round) {
  for (int i = 0; i < THREADS; i++)
    if (PL_GET(done_of[i]) < round) return 0;
  return 1;
}

/* Only a ring has the engine look. */
static void hear(int fd) {
  uint64_t rings;
  if (read(fd, &rings, sizeof rings) == sizeof rings) goServe();
}

int main(void) {
  pl_op op = {.size = sizeof op, .kind = PL_ALLREDUCE, .later = 1};
  int32_t handle;
  CHECK(!pl_leave(&op, &handle)); /* without a doorbell */
  int fd = pl_shared.bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  CHECK(fd >= 0 && !pl_leave(&op, &handle)); /* without a spare */
  for (int i = 0; i < PL_LEFT; i++) pl_shared.left[i].handle = i, put_spare(&pl_shared.left[i]);
  pthread_t callers[THREADS];
  for (intptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&callers[i], NULL, call, (void *)i) == 0);
  for (int round = 1; round <= ROUNDS; round++) {
    for (int i = 0; i < THREADS; i++) PL_SET(round_of[i], round);
    while (!all_done(round)) {
      hear(fd);
      if (PL_GET(pl_shared.holding)) let_go();
    }
    hear(fd);
    if (PL_GET(pl_shared.holding)) let_go();
    CHECK(served == round * THREADS * EACH && PL_GET(pl_shared.untaken) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(callers[i], NULL) == 0);
  puts("none was forgotten");
  return 0;
}
