/* A rank of two that submits operations which may be left for the engine (pl_op.later): argv[1] is pl_init's argument,
 * argv[2] the rank. */
#include <pthread.h>
#include <semaphore.h>
#include <time.h>
#include <unistd.h>

#include "paceline.h"

#include "check.h"

enum { THREADS = 4, TIMES = 60, MANY = 700, ALONE = 40, FEW = 3, ELEMENTS = 4 };

static const int64_t shape[] = {ELEMENTS};

static pl_op sum(float *x, float value, const char *name, uint32_t later) {
  for (int i = 0; i < ELEMENTS; i++) x[i] = value + (float)i;
  return (pl_op){.size = sizeof(pl_op),
                 .kind = PL_ALLREDUCE,
                 .dtype = PL_FLOAT32,
                 .reduce_op = PL_SUM,
                 .ndim = 1,
                 .shape = shape,
                 .input = x,
                 .output = x,
                 .prescale = 1,
                 .postscale = 1,
                 .name = name,
                 .later = later};
}

static void check_sum(const float *x, float value) {
  for (int i = 0; i < ELEMENTS; i++) CHECK(x[i] == 2 * (value + (float)i));
}

/* What the operation points to, but its tensors, is somebody else's at once. */
static int32_t leave(float *x, float value, const char *text) {
  char name[32];
  int64_t dims[] = {2, 2};
  int32_t handle = -1;
  snprintf(name, sizeof name, "%s", text);
  pl_op op = sum(x, value, name, 1);
  op.ndim = 2, op.shape = dims;
  OK(pl_submit(&op, 1, &handle));
  CHECK(handle >= 0);
  memset(name, 'x', sizeof name), memset(dims, 0xff, sizeof dims), memset(&op, 0xff, sizeof op);
  return handle;
}

/* More than the engine has room for, in turns with others that have to wait for it. */
static void many_in_a_row(int thread, int time) {
  static float x[THREADS][MANY][ELEMENTS];
  static int32_t handles[THREADS][MANY];
  int count = thread == 0 ? MANY : MANY / 10;
  for (int i = 0; i < count; i++) {
    char name[32];
    snprintf(name, sizeof name, "%d/%d", thread, i);
    if (i % 50 == 49) {
      pl_op op = sum(x[thread][i], (float)(thread + time + i), name, 0);
      OK(pl_submit(&op, 1, &handles[thread][i]));
    } else {
      handles[thread][i] = leave(x[thread][i], (float)(thread + time + i), name);
    }
  }
  for (int i = 0; i < count; i++) {
    if (i % 7 == 0)
      while (pl_poll(handles[thread][i]) == PL_PENDING) sched_yield();
    OK(pl_wait(handles[thread][i], -1));
    check_sum(x[thread][i], (float)(thread + time + i));
  }
  OK(pl_release_all(handles[thread], (uint32_t)count));
}

static void *work(void *arg) {
  for (int time = 0; time < TIMES; time++) many_in_a_row((int)(intptr_t)arg, time);
  return NULL;
}

/* Unnamed operations match in the order of their submission, however each is submitted. */
static void order_is_that_of_submission(void) {
  static float x[MANY][ELEMENTS];
  int32_t handles[MANY];
  for (int i = 0; i < MANY; i++) {
    pl_op op = sum(x[i], (float)(i * 3), NULL, i % 5 != 0);
    OK(pl_submit(&op, 1, &handles[i]));
  }
  OK(pl_wait_all(handles, MANY, -1));
  for (int i = 0; i < MANY; i++) check_sum(x[i], (float)(i * 3));
  OK(pl_release_all(handles, MANY));
  CHECK(pl_release_all(handles, MANY) == PL_ERR_INVALID);
}

static void on_end(void *arg, int32_t handle, int32_t status) {
  OK(status);
  OK(pl_release(handle));
  sem_post(arg);
}

/* So that the engine may hold the first one when the next one comes, or may not. */
static void leave_few(float x[FEW][ELEMENTS], int32_t *handles, int time) {
  for (int i = 0; i < FEW; i++) {
    char name[32];
    snprintf(name, sizeof name, "alone %d", i);
    handles[i] = leave(x[i], (float)(time + i), name);
    if (time % 2) usleep(200);
  }
}

/* Rank 0 leaves operations and asks for nothing more. Rank 1 waits for them, and only then lets rank 0 go on. */
static void nobody_has_to_wait(int rank) {
  float x[FEW][ELEMENTS], y[ELEMENTS];
  sem_t sem;
  sem_init(&sem, 0, 0);
  for (int i = 0; i < ALONE; i++) {
    int32_t alone[FEW], handle;
    pl_op go = sum(y, (float)i, "go on", 0);
    if (rank == 0) {
      go.done = on_end, go.done_arg = &sem;
      OK(pl_submit(&go, 1, &handle));
      leave_few(x, alone, i);
      struct timespec until;
      clock_gettime(CLOCK_REALTIME, &until);
      until.tv_sec += 600;
      CHECK(sem_timedwait(&sem, &until) == 0);
      OK(pl_wait_all(alone, FEW, -1));
    } else {
      leave_few(x, alone, i);
      OK(pl_wait_all(alone, FEW, -1));
      OK(pl_submit(&go, 1, &handle));
      OK(pl_wait(handle, -1));
      OK(pl_release(handle));
    }
    for (int j = 0; j < FEW; j++) check_sum(x[j], (float)(i + j));
    OK(pl_release_all(alone, FEW));
  }
}

static void ends_with(int32_t handle, int status, const char *text) {
  char error[512];
  CHECK(pl_wait(handle, -1) == status && pl_poll(handle) == status);
  CHECK(pl_error(handle, error, sizeof error) > 0 && strstr(error, text));
  OK(pl_release(handle));
}

static void wait_for(pl_op op) {
  int32_t handle;
  OK(pl_submit(&op, 1, &handle));
  OK(pl_wait(handle, -1));
  OK(pl_release(handle));
}

static void what_is_refused_is_said_at_the_end(int rank) {
  float x[ELEMENTS], y[ELEMENTS];
  int32_t handles[2];
  pl_op op = sum(x, 0, "bad", 1);
  op.dtype = 99;
  OK(pl_submit(&op, 1, handles));
  ends_with(handles[0], PL_ERR_INVALID, "99");
  op = sum(x, 0, "no set", 1);
  op.process_set = 77;
  OK(pl_submit(&op, 1, handles));
  ends_with(handles[0], PL_ERR_INVALID, "process set 77");
  pl_op first = sum(x, 1, "twice", 1), seen = sum(y, 1, "was refused", 0);
  if (rank == 1) wait_for(seen); /* so that rank 0's first one is in flight until then */
  OK(pl_submit(&first, 1, &handles[0]));
  if (rank == 0) {
    float z[ELEMENTS];
    pl_op second = sum(z, 1, "twice", 1);
    OK(pl_submit(&second, 1, &handles[1]));
    ends_with(handles[1], PL_ERR_DUPLICATE, "twice");
    wait_for(seen);
  }
  OK(pl_wait(handles[0], -1));
  check_sum(x, 1);
  OK(pl_release(handles[0]));
}

/* What has to wait for the engine is refused at once. */
static void what_cannot_be_left_is_submitted(void) {
  float x[ELEMENTS];
  char name[600];
  int32_t handle = -7;
  memset(name, 'n', sizeof name);
  name[sizeof name - 1] = 0;
  pl_op op = sum(x, 3, name, 1);
  op.dtype = 99;
  CHECK(pl_submit(&op, 1, &handle) == PL_ERR_INVALID && handle == -7);
  op = sum(x, 3, "at once", 1);
  op.at_once = 1;
  OK(pl_submit(&op, 1, &handle));
  OK(pl_wait(handle, -1));
  check_sum(x, 3);
  OK(pl_release(handle));
}

/* The other rank never submits it. */
static void shutdown_ends_what_is_left(int rank) {
  float x[2][ELEMENTS];
  int32_t handles[2];
  for (int i = 0; i < 2; i++) {
    char name[32];
    snprintf(name, sizeof name, "only rank %d, %d", rank, i);
    handles[i] = leave(x[i], 0, name);
  }
  OK(pl_shutdown());
  for (int i = 0; i < 2; i++) { /* by this shutdown, or because the other rank has left before */
    int status = pl_poll(handles[i]);
    CHECK(status == PL_ERR_SHUTDOWN || status == PL_ERR_PEER_LOST || status == PL_ERR_UNSUPPORTED);
  }
  pl_op op = sum(x[0], 0, "after", 1);
  CHECK(pl_submit(&op, 1, handles) == PL_ERR_NOT_INITIALIZED);
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  int rank = atoi(argv[2]);
  OK(pl_init(argv[1]));
  pthread_t threads[THREADS];
  for (intptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  order_is_that_of_submission();
  nobody_has_to_wait(rank);
  what_is_refused_is_said_at_the_end(rank);
  what_cannot_be_left_is_submitted();
  shutdown_ends_what_is_left(rank);
  return 0;
}
