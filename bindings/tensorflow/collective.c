/*
 * paceline.tensorflow's operations: kernels that submit their tensors to the engine as one group.
 *
 *  1. start (a thread of TensorFlow) makes a call of the kernel's inputs, posts it and returns.
 *  2. ended (the engine's thread) keeps each result; the last one finishes the call.
 *  3. finish sets the outputs, and calls TensorFlow's done, which hands what is ready to TensorFlow's threads.
 *
 * Where TensorFlow has no asynchronous kernels, or not those that are known, step 1 waits for step 2.
 */
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "function.h"
#include "kernel.h"
#include "post.h"
#include "tf.h"

enum { MAX_DIMS = 254 }; /* TensorFlow's own limit */

typedef struct member { /* a tensor of a call */
  struct call *call;
  int64_t shape[MAX_DIMS + 1]; /* one more where elements travel as their bytes */
  char *name;
  int type, dims; /* TensorFlow's */
  int32_t handle, status;
  pl_output out;
} member;

typedef struct call {
  post post; /* the first member: a post is its call */
  TF_Context *ctx;
  function done;
  sem_t ended; /* without `done` */
  atomic_int left; /* operations that have not ended, and one while they are submitted */
  int count;
  pl_op *ops;
  int64_t *splits;
  pl_sync sync;
  pl_gate gate;
  pl_codec codec;
  pl_held held;
  uint8_t *empty;
  const kernel *kernel;
  bool async;
  char error[1024];
  int error_code;
  member members[];
} call;

static atomic_llong round_now, generation_now;

/* The job of this process, which counts inits, and its generation, which counts joins too; 0 for none. */
EXPORT void pl_tensorflow_set_job(int64_t number, int64_t generation) {
  atomic_store(&round_now, number);
  atomic_store(&generation_now, generation);
}

/* The engine's library as dlopen has returned it. Returns 0, or -1 if it lacks a function. */
EXPORT int pl_tensorflow_bind(void *library) { return engine_bind(library); }

/* TensorFlow's element type as the engine's, -1 for none. Where elements only travel, others than these are bytes. */
static int dtype_of(int type) {
  static const struct {
    int tf, pl;
  } known[] = {{1, PL_FLOAT32}, {2, PL_FLOAT64}, {3, PL_INT32}, {4, PL_UINT8},     {5, PL_INT16},
               {6, PL_INT8},    {9, PL_INT64},   {10, PL_BOOL}, {14, PL_BFLOAT16}, {19, PL_FLOAT16}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (known[i].tf == type) return known[i].pl;
  }
  return -1;
}

/* The name of a type that `dtype_of` does not have. */
static const char *name_of(int type) {
  static const struct {
    int type;
    const char *name;
  } known[] = {{7, "string"},    {8, "complex64"}, {17, "uint16"}, {18, "complex128"},
               {20, "resource"}, {21, "variant"},  {22, "uint32"}, {23, "uint64"}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (known[i].type == type) return known[i].name;
  }
  return "that the engine does not have";
}

static double number_of(int64_t bits) {
  double number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

static void fail(call *c, int code, const char *message) {
  if (c->error_code) return;
  c->error_code = code;
  snprintf(c->error, sizeof c->error, "%s", message);
}

static void free_tensor(void *data, size_t bytes, void *unused) {
  (void)bytes, (void)unused;
  engine.free(data);
}

/* An output that the engine has allocated: rows of all ranks. */
static void give(call *c, member *m, int index, TF_Status *status) {
  int64_t rows = 0;
  for (uint32_t i = 0; i < m->out.nrows; i++) rows += m->out.rows[i];
  m->shape[0] = rows;
  TF_Tensor *tensor;
  if (m->out.data) {
    tensor = TF_NewTensor(m->type, m->shape, m->dims, m->out.data, m->out.bytes, free_tensor, NULL);
    m->out.data = NULL;
    TF_SetOutput(c->ctx, index, tensor, status);
  } else {
    tensor = TF_AllocateOutput(c->ctx, index, m->type, m->shape, m->dims, 0, status);
  }
  if (tensor) TF_DeleteTensor(tensor);
  if (c->kernel->numbers[KIND] != PL_ALLTOALL || TF_GetCode(status) != TF_OK) return;
  int64_t count = m->out.nrows;
  tensor = TF_AllocateOutput(c->ctx, 1, 9, &count, 1, (size_t)count * sizeof(int64_t), status);
  if (!tensor) return;
  memcpy(TF_TensorData(tensor), m->out.rows, (size_t)count * sizeof(int64_t));
  TF_DeleteTensor(tensor);
}

static void finish(call *c) {
  TF_Status *status = TF_NewStatus();
  bool gives = c->kernel->numbers[KIND] == PL_ALLGATHER || c->kernel->numbers[KIND] == PL_ALLTOALL;
  for (int i = 0; i < c->count; i++) {
    member *m = &c->members[i];
    if (gives && !c->error_code && TF_GetCode(status) == TF_OK) give(c, m, i, status);
    if (m->out.data) engine.free(m->out.data);
    if (m->handle >= 0) engine.release(m->handle);
    free(m->name);
  }
  if (c->error_code) TF_SetStatus(status, c->error_code, c->error);
  if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(c->ctx, status);
  TF_DeleteStatus(status);
  function done = c->done;
  bool calls = c->async;
  if (!calls) sem_destroy(&c->ended);
  free(c->splits);
  free(c->empty);
  free(c->ops);
  free(c);
  if (calls) function_end(&done);
}

static void leave(call *c) {
  if (atomic_fetch_sub(&c->left, 1) != 1) return;
  if (c->async) finish(c);
  else sem_post(&c->ended);
}

static void ended(void *arg, int32_t handle, int32_t status) {
  member *m = arg;
  call *c = m->call;
  m->handle = handle;
  if (status != PL_OK) {
    char message[sizeof c->error] = "";
    bool said = engine_error(handle, message, sizeof message);
    fail(c, status == PL_ERR_INVALID ? TF_INVALID_ARGUMENT : TF_UNKNOWN, said ? message : "the operation failed");
  } else if (!c->ops[m - c->members].output) {
    m->out.size = sizeof m->out;
    engine.result(handle, &m->out);
  }
  leave(c);
}

static void refused(post *p, int status, const char *message) {
  call *c = (call *)p;
  bool wrong = status == PL_ERR_INVALID || status == PL_ERR_DUPLICATE;
  fail(c, wrong ? TF_INVALID_ARGUMENT : TF_UNKNOWN, message && message[0] ? message : "the engine is not initialized");
  atomic_fetch_sub(&c->left, c->count - 1);
  leave(c);
}

/* The memory of an output of the operation, and its shape in the member where that differs from the input's. */
static void *output_of(call *c, member *m, int index, TF_Status *status) {
  pl_op *op = &c->ops[index];
  const int64_t *numbers = c->kernel->numbers;
  if (op->kind == PL_ALLGATHER || op->kind == PL_ALLTOALL) return NULL;
  TF_Tensor *output;
  if (op->kind == PL_REDUCESCATTER) {
    int64_t shape[MAX_DIMS], elements = 1;
    memcpy(shape, m->shape, sizeof(int64_t) * op->ndim);
    shape[0] = m->shape[0] / numbers[SIZE] + (numbers[RANK] < m->shape[0] % numbers[SIZE]);
    for (uint32_t i = 0; i < op->ndim; i++) elements *= shape[i];
    static const uint8_t sizes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
    output =
        TF_AllocateOutput(c->ctx, index, m->type, shape, (int)op->ndim, (size_t)elements * sizes[op->dtype], status);
  } else {
    int forwarded, input = c->kernel->flags + index;
    output = TF_ForwardInputOrAllocateOutput(c->ctx, &input, 1, index, m->shape, m->dims, &forwarded, status);
  }
  if (!output) return NULL;
  void *data = TF_TensorData(output);
  TF_DeleteTensor(output);
  return data;
}

/* A line of a text, in memory of its own. */
static char *line_of(const char *text, int line) {
  for (; line > 0 && *text; text++) line -= *text == '\n';
  return strndup(text, strcspn(text, "\n"));
}

/* Makes the operation of an input. Returns whether it can be submitted. */
static bool prepare(call *c, int index, TF_Status *status) {
  member *m = &c->members[index];
  pl_op *op = &c->ops[index];
  const int64_t *numbers = c->kernel->numbers;
  TF_Tensor *input = NULL;
  TF_GetInput(c->ctx, c->kernel->flags + index, &input, status);
  if (TF_GetCode(status) != TF_OK) return false;
  m->call = c;
  m->handle = -1;
  m->type = TF_TensorType(input);
  int dtype = dtype_of(m->type), dims = m->dims = TF_NumDims(input);
  for (int i = 0; i < dims && i < MAX_DIMS; i++) m->shape[i] = TF_Dim(input, i);
  const void *data = TF_TensorData(input);
  TF_DeleteTensor(input); /* before the output, which may take its memory; the context has its own reference */
  size_t width = TF_DataTypeSize(m->type);
  bool moves = numbers[KIND] == PL_ALLGATHER || numbers[KIND] == PL_ALLTOALL || numbers[KIND] == PL_BROADCAST;
  if (dtype < 0 && moves && width > 0 && dims <= MAX_DIMS) {
    dtype = PL_UINT8;
    m->shape[dims++] = (int64_t)width;
  }
  if (dtype < 0 || m->dims > MAX_DIMS) {
    char message[80];
    snprintf(message, sizeof message, "tensors of type %s cannot be %s: cast it first", name_of(m->type),
             width > 0 ? "reduced" : "sent");
    TF_SetStatus(status, TF_INVALID_ARGUMENT, message);
    return false;
  }
  *op = (pl_op){.size = sizeof *op,
                .kind = (uint32_t)numbers[KIND],
                .dtype = (uint32_t)dtype,
                .reduce_op = (uint32_t)numbers[REDUCE_OP],
                .process_set = (uint32_t)numbers[PROCESS_SET],
                .root = (int32_t)numbers[ROOT],
                .priority = (int32_t)numbers[PRIORITY] - (c->kernel->flags ? index : 0),
                .ndim = (uint32_t)dims,
                .shape = m->shape,
                .input = data,
                .prescale = number_of(numbers[PRESCALE]),
                .postscale = number_of(numbers[POSTSCALE]),
                .held = numbers[KIND] == PL_ACCUMULATE ? &c->held : NULL,
                .empty = c->empty && c->empty[index],
                .done = ended,
                .done_arg = m,
                .unnamed = (uint32_t)numbers[UNNAMED]};
  op->output = output_of(c, m, index, status);
  if (TF_GetCode(status) != TF_OK) return false;
  if (c->kernel->flags) {
    m->name = line_of(c->kernel->label, index);
    op->name = m->name;
  } else if (c->kernel->label[0]) {
    size_t room = strlen(c->kernel->label) + 12;
    m->name = malloc(room);
    snprintf(m->name, room, c->count > 1 ? "%s.%d" : "%s", c->kernel->label, index);
    op->name = m->name;
  }
  return true;
}

/* The second input of alltoall: rows for each rank. An empty one stands for equal parts. */
static bool splits_of(call *c, TF_Status *status) {
  TF_Tensor *input = NULL;
  TF_GetInput(c->ctx, 1, &input, status);
  if (TF_GetCode(status) != TF_OK) return false;
  size_t bytes = TF_TensorByteSize(input);
  if (bytes) {
    c->splits = malloc(bytes);
    memcpy(c->splits, TF_TensorData(input), bytes);
    c->ops[0].splits = c->splits;
    c->ops[0].nsplits = (uint32_t)(bytes / sizeof(int64_t));
  }
  TF_DeleteTensor(input);
  return true;
}

/* The inputs of PacelineChange before its tensors. */
static bool flags_of(call *c, TF_Status *status) {
  static const size_t widths[FLAGS] = {1, sizeof(float), 1};
  TF_Tensor *inputs[FLAGS] = {NULL, NULL, NULL};
  bool ready = true;
  for (int i = 0; i < FLAGS && ready; i++) {
    size_t bytes = widths[i] * (i == EMPTY ? (size_t)c->count : 1);
    TF_GetInput(c->ctx, i, &inputs[i], status);
    ready = TF_GetCode(status) == TF_OK;
    if (ready && TF_TensorByteSize(inputs[i]) != bytes) {
      TF_SetStatus(status, TF_INVALID_ARGUMENT, "the flags of PacelineChange are one for each tensor, and two scalars");
      ready = false;
    }
  }
  if (ready) {
    const int64_t *numbers = c->kernel->numbers;
    bool within = *(const uint8_t *)TF_TensorData(inputs[WITHIN]) != 0;
    c->empty = malloc((size_t)c->count + 1);
    memcpy(c->empty, TF_TensorData(inputs[EMPTY]), (size_t)c->count);
    c->held.use = within ? PL_ADD | PL_READ_NOW | PL_WITHIN : (uint32_t)numbers[USE];
    memcpy(&c->held.significance, TF_TensorData(inputs[SIGNIFICANCE]), sizeof(float));
  }
  for (int i = 0; i < FLAGS; i++) {
    if (inputs[i]) TF_DeleteTensor(inputs[i]);
  }
  return ready;
}

/* Whether the operation is made for this process's job. */
static bool current(const kernel *k, TF_Status *status) {
  int64_t number = k->numbers[ROUND], generation = k->numbers[GENERATION];
  if ((number == 0 || number == atomic_load(&round_now)) &&
      (generation == 0 || generation == atomic_load(&generation_now)))
    return true;
  TF_SetStatus(status, TF_INVALID_ARGUMENT,
               "the function was traced for an earlier job, or before a join, whose size, process sets or held "
               "parameters it has: make the tf.function anew; for model.fit set model.train_function = None");
  return false;
}

static call *start(const kernel *k, TF_Context *ctx, void *done) {
  bool alltoall = k->numbers[KIND] == PL_ALLTOALL;
  int count = alltoall ? 1 : TF_NumInputs(ctx) - k->flags;
  call *c = calloc(1, sizeof *c + sizeof(member) * (size_t)count);
  *c = (call){.ctx = ctx,
              .count = count,
              .kernel = k,
              .async = done != NULL,
              .sync = {.size = sizeof(pl_sync), .soft_park = (uint32_t)k->numbers[SOFT_PARK], .model = k->sync},
              .gate = {.size = sizeof(pl_gate),
                       .threshold = number_of(k->numbers[THRESHOLD]),
                       .decay = number_of(k->numbers[DECAY])},
              .codec = {.size = sizeof(pl_codec), .codec = k->codec},
              .held = {.size = sizeof(pl_held), .use = PL_READ}};
  c->ops = calloc((size_t)count + 1, sizeof *c->ops);
  atomic_init(&c->left, count + 1);
  if (done) c->done = function_move(done);
  else sem_init(&c->ended, 0, 0);
  TF_Status *status = TF_NewStatus();
  bool ready = engine.submit != NULL;
  if (!ready) TF_SetStatus(status, TF_UNKNOWN, "the glue has no engine");
  for (int i = 0; i < count; i++) c->members[i].handle = -1;
  ready = ready && current(k, status) && (!k->flags || flags_of(c, status));
  for (int i = 0; ready && i < count; i++) {
    ready = prepare(c, i, status);
    c->ops[i].sync = k->sync[0] ? &c->sync : NULL;
    c->ops[i].codec = k->codec[0] ? &c->codec : NULL;
    c->ops[i].pull_gate = c->gate.threshold > 0 || c->gate.decay > 0 ? &c->gate : NULL;
  }
  ready = ready && (!alltoall || splits_of(c, status));
  if (!ready) fail(c, TF_GetCode(status), TF_Message(status));
  TF_DeleteStatus(status);
  if (count) c->ops[count - 1].at_once = (uint32_t)k->numbers[AT_ONCE];
  c->post = (post){NULL, c->ops, (uint32_t)count, refused};
  if (ready && count) post_submit(&c->post);
  else atomic_fetch_sub(&c->left, count);
  leave(c);
  return c;
}

void compute_async(void *k, TF_Context *ctx, void *done) { start(k, ctx, done); }

void compute(void *k, TF_Context *ctx) {
  call *c = start(k, ctx, NULL);
  while (sem_wait(&c->ended) != 0) {
  }
  finish(c);
}
