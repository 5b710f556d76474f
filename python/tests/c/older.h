/* A part of paceline.h as a caller that was compiled long ago has it: its structures are shorter than today's. */
#include <stdint.h>

typedef struct pl_op {
  uint32_t size;
  uint32_t kind;
  uint32_t dtype;
  uint32_t reduce_op;
  uint32_t process_set;
  int32_t root;
  int32_t priority;
  uint32_t ndim;
  const int64_t *shape;
  const void *input;
  void *output;
  const int64_t *splits;
  uint32_t nsplits;
  double prescale;
  double postscale;
  const char *name;
} pl_op;

typedef struct pl_output {
  uint32_t size;
  void *data;
  uint64_t bytes;
  uint32_t nrows;
  const int64_t *rows;
} pl_output;

const char *pl_last_error(void);
int pl_init(const char *settings);
int pl_shutdown(void);
int pl_submit(const pl_op *ops, uint32_t count, int32_t *handles);
int pl_wait(int32_t handle, int64_t timeout_ms);
int pl_result(int32_t handle, pl_output *out);
int pl_release(int32_t handle);
void pl_free(void *data);
