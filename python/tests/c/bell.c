/* Requests at the doorbell, which is doorbell.c itself with an engine that only counts: all are answered, and a
 * program that closes the descriptor waits for nobody. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "doorbell.c"

#include "check.h"

enum { THREADS = 4, TIMES = 2000 };

struct pl_shared pl_shared = {.bell = -1};
static int served, flushed;

int pl_within_done(void) { return 0; }

int32_t pl_await(pl_request *r) {
  while (PL_GET(r->answer) == PL_UNANSWERED) {
  }
  return r->answer;
}

/* Answers with the number of operations. */
void goServe(void) {
  PL_SET(pl_shared.rung, 0);
  if (PL_SWAP(pl_shared.flushes, 0)) flushed++;
  for (pl_request *r = PL_SWAP(pl_shared.requests, NULL), *next; r; r = next) {
    next = r->next;
    PL_ADD(served, 1);
    PL_SET(r->answer, (int32_t)r->count);
  }
}

static void *ask(void *arg) {
  (void)arg;
  for (uint32_t i = 0; i < TIMES; i++) CHECK(pl_ask(NULL, i, NULL) == (int32_t)i);
  return NULL;
}

static void *hear(void *fd) {
  uint64_t rings;
  while (PL_GET(served) < THREADS * TIMES)
    if (read(*(int *)fd, &rings, sizeof rings) == sizeof rings) goServe();
  return NULL;
}

int main(void) {
  CHECK(pl_ask(NULL, 1, NULL) == PL_UNANSWERED && !pl_ask_to_flush(1));
  int fd = pl_shared.bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  pthread_t engine, callers[THREADS];
  CHECK(fd >= 0 && pthread_create(&engine, NULL, hear, &fd) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&callers[i], NULL, ask, NULL) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(callers[i], NULL) == 0);
  CHECK(pthread_join(engine, NULL) == 0 && flushed == 0);

  uint64_t rings; /* of what the engine had seen before it read them */
  if (read(fd, &rings, sizeof rings) > 0) goServe();
  CHECK(close(fd) == 0);
  CHECK(pl_ask(NULL, 7, NULL) == 7 && served == THREADS * TIMES + 1);
  CHECK(pl_ask(NULL, 1, NULL) == PL_UNANSWERED && !pl_ask_to_flush(1));
  puts("all were answered");
  return 0;
}
