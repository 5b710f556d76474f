/* A rank of two that was compiled with an older header: argv[1] is pl_init's argument, argv[2] the rank. */
#include "older.h"

#include "check.h"

enum { ALLREDUCE = 0, ALLGATHER = 1, FLOAT32 = 7, SUM = 1 };

int main(int argc, char **argv) {
  CHECK(argc == 3);
  OK(pl_init(argv[1]));

  int64_t shape[] = {3};
  float x[3] = {1, 2, 3}, y[3] = {4, 5, 6};
  pl_op ops[2] = {{.size = sizeof(pl_op),
                   .kind = ALLREDUCE,
                   .dtype = FLOAT32,
                   .reduce_op = SUM,
                   .ndim = 1,
                   .shape = shape,
                   .input = x,
                   .output = x,
                   .prescale = 1,
                   .postscale = 0.5,
                   .name = "x"}};
  ops[1] = ops[0];
  ops[1].input = ops[1].output = y;
  ops[1].name = "y";
  int32_t handles[2];
  OK(pl_submit(ops, 2, handles));
  for (int i = 0; i < 2; i++) {
    OK(pl_wait(handles[i], -1));
    OK(pl_release(handles[i]));
  }
  CHECK(x[0] == 1 && x[2] == 3 && y[0] == 4 && y[2] == 6);

  ops[0].kind = ALLGATHER;
  ops[0].output = NULL;
  ops[0].name = "gathered";
  OK(pl_submit(ops, 1, handles));
  OK(pl_wait(handles[0], -1));
  struct {
    pl_output out;
    uint64_t behind;
  } room = {{.size = sizeof(pl_output)}, 0x1234567890abcdef};
  OK(pl_result(handles[0], &room.out));
  CHECK(room.out.size == sizeof(pl_output) && room.behind == 0x1234567890abcdef);
  CHECK(room.out.bytes == 24 && room.out.nrows == 2 && room.out.rows[1] == 3 && ((float *)room.out.data)[5] == 3);
  pl_free(room.out.data);
  OK(pl_release(handles[0]));

  ops[0].size = sizeof(pl_op) - 8;
  CHECK(pl_submit(ops, 1, handles) == -1 && strstr(pl_last_error(), "pl_op of 88 bytes"));
  OK(pl_shutdown());
  return 0;
}
