/* A wait for many operations whose last one ends just when somebody else begins to wait: nobody may sleep on. It has
 * handles.c itself, with a futex that knows who sleeps and never wakes by itself. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int sleepers, wakes;

static long futex(long number, void *word, int operation, uint32_t value, void *timeout, void *other, int bits) {
  (void)number, (void)timeout, (void)other, (void)bits;
  pthread_mutex_lock(&lock);
  if (operation == FUTEX_WAKE_PRIVATE) {
    wakes++;
  } else if (*(volatile uint32_t *)word == value) {
    sleepers++;
    pthread_cond_broadcast(&changed);
    for (int before = wakes; wakes == before;) pthread_cond_wait(&changed, &lock);
    sleepers--;
  }
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return 0;
}

#define syscall futex
#include "handles.c"
#undef syscall

#include "check.h"

void goFlush(int waits) { (void)waits; }
int pl_ask_to_flush(int waits) { return (void)waits, 1; }

/* The engine's side. */
static void open_handle(int32_t h) { pl_shared.handles[h].state = PL_PENDING, pl_shared.used = h + 1; }

static uint32_t ended(int32_t h) {
  PL_SET(pl_shared.handles[h].state, PL_OK);
  return PL_ADD(pl_shared.ended, 1);
}

static void finish(int32_t h) {
  uint32_t count = ended(h);
  if (PL_GET(pl_shared.waiters) > 0 && (int32_t)(count - PL_GET(pl_shared.wanted)) >= 0) wake(&pl_shared.ended);
}

static void *wait_for_two(void *first) {
  OK(pl_wait_all(first, 2, -1));
  return NULL;
}

int main(void) {
  int32_t list[] = {0, 1, 2, 3};
  for (int i = 0; i < 4; i++) open_handle(list[i]);
  pthread_t early, late;
  pthread_create(&early, NULL, wait_for_two, list);
  pthread_mutex_lock(&lock);
  while (sleepers < 1) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  finish(0);
  uint32_t count = ended(1); /* and asks for the least count later */
  pthread_create(&late, NULL, wait_for_two, list + 2);
  pthread_join(early, NULL);
  CHECK((int32_t)(count - PL_GET(pl_shared.wanted)) < 0); /* so that the end of operation 1 wakes nobody */
  finish(2);
  finish(3);
  pthread_join(late, NULL);
  puts("all woke up");
  return 0;
}
