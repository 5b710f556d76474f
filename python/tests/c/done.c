/* A rank of two that is called at the ends of its operations: argv[1] is pl_init's argument, argv[2] the rank. */
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "paceline.h"

#include "check.h"

enum { TIMES = 500, CHAIN = 100 };

static float data[TIMES][4], chained[4];
static const int64_t shape[] = {4};

/* What a call stores for the main thread. */
typedef struct ended {
  atomic_int calls;
  int32_t handle;
  int32_t status;
  char error[256];
  sem_t sem;
} ended;

static void prepare(ended *e) {
  memset(e, 0, sizeof *e);
  sem_init(&e->sem, 0, 0);
}

static pl_op sum(float *x, const char *name, pl_done_fn done, void *arg) {
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
                 .done = done,
                 .done_arg = arg};
}

/* Stores the end and releases the handle. */
static void note(void *arg, int32_t handle, int32_t status) {
  ended *e = arg;
  CHECK(pl_poll(handle) == status);
  e->handle = handle, e->status = status;
  if (status < 0) CHECK(pl_error(handle, e->error, sizeof e->error) > 0);
  OK(pl_release(handle));
  CHECK(pl_release(handle) == PL_ERR_INVALID);
  atomic_fetch_add(&e->calls, 1);
  sem_post(&e->sem);
}

static void wait_for(ended *e) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 600;
  CHECK(sem_timedwait(&e->sem, &until) == 0);
}

/* Leaves the handle to the main thread, which may have released it by now. */
static void count(void *arg, int32_t handle, int32_t status) {
  CHECK(handle >= 0 && status == PL_OK);
  atomic_fetch_add((atomic_int *)arg, 1);
}

static void each_end_is_one_call(void) {
  static ended ends[TIMES];
  static atomic_int counted[TIMES];
  pl_op ops[TIMES];
  int32_t handles[TIMES];
  char names[TIMES][16];
  for (int i = 0; i < TIMES; i++) {
    prepare(&ends[i]);
    data[i][3] = i;
    snprintf(names[i], sizeof names[i], "sum %d", i);
    ops[i] = i % 2 ? sum(data[i], names[i], note, &ends[i]) : sum(data[i], names[i], count, &counted[i]);
  }
  OK(pl_submit(ops, TIMES, handles));
  for (int i = 0; i < TIMES; i += 2) { /* in addition to pl_wait */
    OK(pl_wait(handles[i], -1));
    OK(pl_release(handles[i]));
  }
  for (int i = 1; i < TIMES; i += 2) {
    wait_for(&ends[i]);
    CHECK(ends[i].handle == handles[i] && ends[i].status == PL_OK && data[i][3] == 2 * i);
  }
  ended last; /* calls come in the order of the ends, so earlier ones have returned */
  prepare(&last);
  pl_op one = sum(chained, "last", note, &last);
  OK(pl_submit(&one, 1, handles));
  wait_for(&last);
  for (int i = 0; i < TIMES; i++) CHECK(i % 2 ? ends[i].calls == 1 : counted[i] == 1);
}

/* Submits the next operation from within the call, where functions that wait are refused. The argument is a number. */
static ended chain;

static void next(void *arg, int32_t handle, int32_t status) {
  ended *e = &chain;
  CHECK(arg == (void *)1);
  OK(status);
  OK(pl_release(handle));
  if (atomic_fetch_add(&e->calls, 1) + 1 == CHAIN) {
    CHECK(pl_shutdown() == PL_ERR_INVALID && strstr(pl_last_error(), "must not block"));
    CHECK(pl_init("{}") == PL_ERR_INVALID);
    int32_t last;
    CHECK(pl_end_iteration(0, "chained", &last) == PL_ERR_INVALID && strstr(pl_last_error(), "must not block"));
    sem_post(&e->sem);
    return;
  }
  pl_op op = sum(chained, "chained", next, arg);
  OK(pl_submit(&op, 1, &handle));
}

static void the_next_operation_is_submitted_within_a_call(void) {
  prepare(&chain);
  pl_op op = sum(chained, "chained", next, (void *)1);
  int32_t handle;
  OK(pl_submit(&op, 1, &handle));
  wait_for(&chain);
  CHECK(chain.calls == CHAIN);
}

static void a_failure_is_one_call(int rank) {
  ended e;
  prepare(&e);
  pl_op op = sum(data[0], "shapes differ", note, &e);
  int64_t mine[] = {2 + rank};
  op.shape = mine;
  int32_t handle;
  OK(pl_submit(&op, 1, &handle));
  wait_for(&e);
  CHECK(e.calls == 1 && e.status == PL_ERR_MISMATCH && strstr(e.error, "shapes differ"));
}

static void no_start_means_no_call(void) {
  ended e;
  prepare(&e);
  pl_op op = sum(data[0], "bad", note, &e);
  op.dtype = 99;
  int32_t handle = -7;
  CHECK(pl_submit(&op, 1, &handle) == PL_ERR_INVALID && handle == -7 && e.calls == 0);
}

static void a_newer_caller_is_taken_where_nothing_is_new(void) {
  struct {
    pl_op op;
    uint64_t newer[3];
  } ops[2] = {{.op = sum(data[0], "n0", NULL, NULL)}, {.op = sum(data[1], "n1", NULL, NULL)}};
  ops[0].op.size = ops[1].op.size = sizeof ops[0];
  int32_t handles[2];
  OK(pl_submit(&ops[0].op, 2, handles));
  for (int i = 0; i < 2; i++) {
    OK(pl_wait(handles[i], -1));
    OK(pl_release(handles[i]));
  }
  ops[1].newer[2] = 1;
  CHECK(pl_submit(&ops[0].op, 2, handles) == PL_ERR_INVALID && strstr(pl_last_error(), "has no field"));
  struct {
    pl_codec codec;
    uint64_t newer;
  } codec = {{.size = sizeof codec, .codec = "none"}, 0};
  pl_op op = sum(data[0], "option", NULL, NULL);
  op.codec = &codec.codec;
  OK(pl_submit(&op, 1, handles));
  OK(pl_wait(handles[0], -1));
  struct {
    pl_output out;
    uint64_t newer;
  } room = {{.size = sizeof room}, 99};
  OK(pl_result(handles[0], &room.out));
  CHECK(room.newer == 0);
  OK(pl_release(handles[0]));
  codec.newer = 1;
  CHECK(pl_submit(&op, 1, handles) == PL_ERR_INVALID && strstr(pl_last_error(), "pl_codec"));
}

static void a_child_is_not_called(void) {
  pid_t child = fork();
  if (child == 0) {
    ended e;
    prepare(&e);
    pl_op op = sum(data[0], "child", note, &e);
    int32_t handle;
    _exit(pl_submit(&op, 1, &handle) == PL_ERR_FORKED && e.calls == 0 ? 0 : 1);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void join_is_one_call(void) {
  ended e;
  prepare(&e);
  int32_t handle;
  OK(pl_join(note, &e, &handle));
  wait_for(&e);
  CHECK(e.calls == 1 && e.status == PL_OK);
}

/* The other rank never submits it. */
static void shutdown_tells_before_it_returns(int rank) {
  static ended ends[2];
  const char *names[] = {"only rank 0", "only rank 1"};
  int32_t handle;
  prepare(&ends[rank]);
  pl_op op = sum(data[0], names[rank], note, &ends[rank]);
  OK(pl_submit(&op, 1, &handle));
  OK(pl_shutdown());
  CHECK(ends[rank].calls == 1 && ends[rank].status < 0 && ends[rank].status != PL_ERR_TIMEOUT);
  CHECK(pl_submit(&op, 1, &handle) == PL_ERR_NOT_INITIALIZED && ends[rank].calls == 1);
}

int main(int argc, char **argv) {
  CHECK(argc == 3 && pl_abi_version() == PL_ABI_VERSION);
  int rank = atoi(argv[2]);
  OK(pl_init(argv[1]));
  each_end_is_one_call();
  the_next_operation_is_submitted_within_a_call();
  a_failure_is_one_call(rank);
  no_start_means_no_call();
  a_newer_caller_is_taken_where_nothing_is_new();
  a_child_is_not_called();
  join_is_one_call();
  shutdown_tells_before_it_returns(rank);
  return 0;
}
