/* A rank of two whose threads submit, wait and release side by side: argv[1] is pl_init's argument. */
#include <pthread.h>

#include "paceline.h"

#include "check.h"

enum { THREADS = 8, TIMES = 200, GROUP = 3, ELEMENTS = 64 };

static const int64_t shape[] = {ELEMENTS};

/* The sum of both ranks' x; every third group is one that its caller waits for at once. */
static void sum(int thread, int time, float x[GROUP][ELEMENTS]) {
  pl_op ops[GROUP];
  int32_t handles[GROUP];
  char names[GROUP][32];
  for (int i = 0; i < GROUP; i++) {
    for (int j = 0; j < ELEMENTS; j++) x[i][j] = (float)(thread * 1000 + time + i + j);
    snprintf(names[i], sizeof names[i], "%d/%d", thread, i);
    ops[i] = (pl_op){.size = sizeof(pl_op),
                     .kind = PL_ALLREDUCE,
                     .dtype = PL_FLOAT32,
                     .reduce_op = PL_SUM,
                     .ndim = 1,
                     .shape = shape,
                     .input = x[i],
                     .output = x[i],
                     .prescale = 1,
                     .postscale = 1,
                     .name = names[i],
                     .at_once = i == GROUP - 1 && time % 3 == 0};
  }
  OK(pl_submit(ops, GROUP, handles));
  if (time % 2) {
    OK(pl_wait_all(handles, GROUP, -1));
  } else {
    while (pl_poll(handles[0]) == PL_PENDING || pl_poll(handles[1]) == PL_PENDING ||
           pl_poll(handles[2]) == PL_PENDING) {
    }
  }
  for (int i = 0; i < GROUP; i++)
    for (int j = 0; j < ELEMENTS; j++) CHECK(x[i][j] == 2 * (float)(thread * 1000 + time + i + j));
  OK(pl_release_all(handles, GROUP));
  CHECK(pl_release_all(handles, GROUP) == PL_ERR_INVALID);
  CHECK(pl_poll(handles[0]) == PL_ERR_INVALID || pl_poll(handles[0]) >= 0); /* another thread's by now, perhaps */
}

/* What is refused is said to the thread that asked for it. */
static void be_refused(int thread) {
  float x[ELEMENTS];
  char expected[32];
  pl_op op = {.size = sizeof op,
              .kind = PL_ALLREDUCE,
              .dtype = 100 + thread,
              .ndim = 1,
              .shape = shape,
              .input = x,
              .output = x};
  int32_t handle = -7;
  CHECK(pl_submit(&op, 1, &handle) == PL_ERR_INVALID && handle == -7);
  snprintf(expected, sizeof expected, "%d", 100 + thread);
  CHECK(strstr(pl_last_error(), expected));
}

static void *work(void *arg) {
  int thread = (int)(intptr_t)arg;
  static float x[THREADS][GROUP][ELEMENTS];
  for (int time = 0; time < TIMES; time++) {
    sum(thread, time, x[thread]);
    be_refused(thread);
  }
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  OK(pl_init(argv[1]));
  pthread_t threads[THREADS];
  for (intptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  OK(pl_shutdown());
  return 0;
}
