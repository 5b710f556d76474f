/* Requests at the doorbell, which is doorbell.c itself with an engine that only counts: they come in order, and a
 * program that closes the descriptor waits for nobody. */
#include <pthread.h>
#include <stdlib.h>

#include "doorbell.c"

#include "check.h"

enum { THREADS = 4, TIMES = 2000 };

static atomic_int served, flushed;

int pl_within_done(void) { return 0; }
void pl_wake(void *word) { (void)word; }

int32_t pl_await(void *word, int32_t value) {
  int32_t now;
  while ((now = atomic_load((_Atomic int32_t *)word)) == value) {
  }
  return now;
}

/* Answers with the number of operations, and checks that each thread's requests come in its order. */
void goServe(void) {
  int32_t flush;
  for (pl_request *r = pl_asked(&flush), *next; r; r = next) {
    next = r->next;
    atomic_fetch_add(&served, 1);
    pl_answer(r, (int32_t)r->count);
  }
  if (flush) atomic_fetch_add(&flushed, 1);
}

static void *ask(void *arg) {
  (void)arg;
  for (uint32_t i = 0; i < TIMES; i++) CHECK(pl_ask(NULL, i, NULL) == (int32_t)i);
  return NULL;
}

static void *hear(void *fd) {
  uint64_t rings;
  while (served < THREADS * TIMES)
    if (read(*(int *)fd, &rings, sizeof rings) == sizeof rings) goServe();
  return NULL;
}

int main(void) {
  CHECK(pl_ask(NULL, 1, NULL) == PL_UNANSWERED && !pl_ask_to_flush(1));
  int fd = pl_doorbell_open();
  pthread_t engine, callers[THREADS];
  CHECK(fd >= 0 && pthread_create(&engine, NULL, hear, &fd) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&callers[i], NULL, ask, NULL) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(callers[i], NULL) == 0);
  CHECK(pthread_join(engine, NULL) == 0 && flushed == 0);

  uint64_t rings; /* of what the engine had seen before it read them */
  if (read(fd, &rings, sizeof rings) > 0) goServe();
  CHECK(close(fd) == 0);
  CHECK(pl_ask(NULL, 7, NULL) == 7 && served == THREADS * TIMES + 1);
  CHECK(pl_ask_to_flush(1) && flushed == 1);
  pl_doorbell_lost();
  CHECK(pl_ask(NULL, 1, NULL) == PL_UNANSWERED);
  puts("all were answered");
  return 0;
}
