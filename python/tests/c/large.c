/* An operation that is left rings while the engine holds others where it is so large that they leave with it. */
#include <stdlib.h>
#include <sys/eventfd.h>

#include "doorbell.c"

#include "check.h"

struct pl_shared pl_shared = {.bell = -1, .leaves = 1, .holding = 1, .gathers = 4096};

const char *pl_last_error(void) { return ""; }

int pl_within_done(void) { return 0; }

int32_t pl_await(pl_request *r) { return r->answer; }

void goServe(void) {}

static int rings(int fd, uint32_t dtype, uint32_t ndim, const int64_t *shape) {
  pl_op op = {.size = sizeof op, .kind = PL_ALLREDUCE, .dtype = dtype, .ndim = ndim, .shape = shape, .later = 1};
  int32_t handle;
  uint64_t rung;
  CHECK(pl_leave(&op, &handle));
  PL_SET(pl_shared.rung, 0);
  return read(fd, &rung, sizeof rung) == sizeof rung;
}

int main(void) {
  int fd = pl_shared.bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  CHECK(fd >= 0);
  for (int i = 0; i < PL_LEFT; i++) pl_shared.spares[i] = i;
  pl_shared.end = PL_LEFT;
  CHECK(rings(fd, PL_FLOAT32, 1, (int64_t[]){1024}) && rings(fd, PL_FLOAT64, 3, (int64_t[]){8, 2, 32}));
  CHECK(!rings(fd, PL_FLOAT32, 1, (int64_t[]){1023}) && !rings(fd, PL_BFLOAT16, 2, (int64_t[]){1, 1024}));
  CHECK(!rings(fd, PL_FLOAT32, 0, NULL) && !rings(fd, PL_FLOAT32, 2, (int64_t[]){0, 1 << 20}));
  CHECK(rings(fd, PL_UINT8, 3, (int64_t[]){INT64_MAX, INT64_MAX, 8})); /* which the engine refuses */
  CHECK(!rings(fd, 99, 1, (int64_t[]){4095}));
  pl_shared.holding = 0;
  CHECK(rings(fd, PL_FLOAT32, 1, (int64_t[]){1}));
  puts("large ones ring");
  return 0;
}
