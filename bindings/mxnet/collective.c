/*
 * paceline.mxnet in MXNet's dependency engine: an operation is pushed with the arrays that it reads and writes, so that
 * it begins when they are ready and what uses its result waits for its end, and no thread waits for other ranks.
 *
 *  1. pl_mxnet_push (the program's thread) copies the operation and has MXNet's engine call run.
 *  2. run (a thread of MXNet) submits it to Paceline's engine and returns.
 *  3. ended (a thread of Paceline's engine) completes it in MXNet's. An error becomes MXNet's, which is raised where
 * the program waits for the result.
 *  4. MXNet's engine frees it (forget), also where it has not called run because an argument had failed.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { MAX_DIMS = 32 };

/* mxnet::engine::CallbackOnComplete. What run gets is on the caller's stack, and small enough to be copied. */
typedef struct on_complete {
  void (*callback)(void *engine, void *param, const void *error);
  void *engine, *param;
} on_complete;

typedef struct call {
  on_complete complete;
  void *input, *output; /* MXNet's handles of the arrays, owned; NULL where there is none */
  char *name, *model, *codec_text, *group;
  int64_t shape[MAX_DIMS];
  pl_op op;
  pl_sync sync;
  pl_codec codec;
  pl_gate pull_gate;
  pl_held held;
} call;

static struct {
  int (*push)(void (*)(void *, void *, void *), void *, void (*)(void *), void *, void **, int, void **, int, void *,
              int, const char *, bool);
  int (*copy)(void *, void **);
  int (*free)(void *);
  int (*data)(void *, void **);
  const char *(*last_error)(void);
  void (*reorder)(const void *); /* mxnet::NDArray::Reorder2DefaultAsync */
  void (*make_error)(void *, const char *); /* std::runtime_error, which dmlc::Error is but for its name */
  void (*end_error)(void *);
} mxnet;

EXPORT int pl_mxnet_bind(void *library) { return engine_bind(library); }

/* MXNet's library as dlopen has returned it. Returns the name of a symbol that it lacks, or NULL. */
EXPORT const char *pl_mxnet_use(void *library) {
  struct {
    const char *name;
    void **to;
  } symbols[] = {
      {"MXEnginePushAsyncND", (void **)&mxnet.push},
      {"MXShallowCopyNDArray", (void **)&mxnet.copy},
      {"MXNDArrayFree", (void **)&mxnet.free},
      {"MXNDArrayGetData", (void **)&mxnet.data},
      {"MXGetLastError", (void **)&mxnet.last_error},
      {"_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", (void **)&mxnet.reorder},
      {"_ZNSt13runtime_errorC1EPKc", (void **)&mxnet.make_error},
      {"_ZNSt13runtime_errorD1Ev", (void **)&mxnet.end_error},
  };
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
    if (!(*symbols[i].to = dlsym(library, symbols[i].name))) return symbols[i].name;
  return NULL;
}

static void forget(void *param) {
  call *c = param;
  if (c->input) mxnet.free(c->input);
  if (c->output) mxnet.free(c->output);
  free(c->name);
  free(c->model);
  free(c->codec_text);
  free(c->group);
  free(c);
}

static int64_t failed; /* operations */

EXPORT int64_t pl_mxnet_failures(void) { return __atomic_load_n(&failed, __ATOMIC_SEQ_CST); }

/* Completes the operation, which is gone then. */
static void complete(call *c, const char *failure) {
  on_complete to = c->complete;
  if (!failure) {
    to.callback(to.engine, to.param, NULL);
    return;
  }
  __atomic_add_fetch(&failed, 1, __ATOMIC_SEQ_CST); /* before the program can hear of it */
  void *error[8]; /* larger than any std::runtime_error */
  mxnet.make_error(error, failure);
  to.callback(to.engine, to.param, error); /* which copies it */
  mxnet.end_error(error);
}

static void ended(void *arg, int32_t handle, int32_t status) {
  char message[4096] = "";
  if (status != PL_OK) engine.error(handle, message, sizeof message);
  engine.release(handle);
  complete(arg, status == PL_OK ? NULL : message[0] ? message : "the operation failed");
}

static void run(void *context, void *completes, void *param) {
  (void)context;
  call *c = param;
  memcpy(&c->complete, completes, sizeof c->complete);
  void *input = NULL, *output = NULL;
  int32_t handle;
  if ((c->input && mxnet.data(c->input, &input)) || (c->output && mxnet.data(c->output, &output))) {
    complete(c, mxnet.last_error());
    return;
  }
  c->op.input = c->input ? input : output;
  c->op.output = output;
  if (engine.submit(&c->op, 1, &handle) != PL_OK) complete(c, engine.last_error());
}

/* Copies a text, if there is one. Returns whether there was memory. */
static bool own(const char *text, char **copy) { return !text || (*copy = strdup(text)); }

static bool copy(call *c, const pl_op *op) {
  c->op = *op;
  memcpy(c->shape, op->shape, sizeof(int64_t) * op->ndim);
  c->op.shape = c->shape;
  if (!own(op->name, &c->name)) return false;
  c->op.name = c->name;
  if (op->sync) {
    if (!own(op->sync->model, &c->model)) return false;
    c->sync = *op->sync;
    c->sync.model = c->model;
    c->op.sync = &c->sync;
  }
  if (op->codec) {
    if (!own(op->codec->codec, &c->codec_text)) return false;
    c->codec = *op->codec;
    c->codec.codec = c->codec_text;
    c->op.codec = &c->codec;
  }
  if (op->pull_gate) {
    c->pull_gate = *op->pull_gate;
    c->op.pull_gate = &c->pull_gate;
  }
  if (op->held) {
    if (!own(op->held->group, &c->group)) return false;
    c->held = *op->held;
    c->held.group = c->group;
    c->op.held = &c->held;
  }
  c->op.done = ended;
  c->op.done_arg = c;
  return true;
}

/* An array's own handle, in the layout that programs see: after the operations on it so far. */
static int hold(void *array, void **held) {
  if (!array) return 0;
  mxnet.reorder(array);
  return mxnet.copy(array, held);
}

/* Pushes an operation without its memory, which is that of input and output; they are the same array where input is
 * NULL. order is an array that the operation waits for as if it wrote it, so that operations of one name have the order
 * of their pushes. Returns 0, or -1. */
EXPORT int pl_mxnet_push(const pl_op *op, void *input, void *output, void *order) {
  call *c = calloc(1, sizeof *c);
  if (!c) return -1;
  struct {
    int32_t type, id;
  } cpu = {1, 0};
  int prioritized = 3; /* FnProperty::kCPUPrioritized: run waits for nothing, and other ranks wait for it */
  void *reads[] = {input}, *writes[] = {output, order};
  if (op->ndim > MAX_DIMS || !copy(c, op) || hold(input, &c->input) || hold(output, &c->output)) {
    forget(c);
    return -1;
  }
  return mxnet.push(run, c, forget, &cpu, reads, input != NULL, writes, 2, &prioritized, op->priority, c->name, false);
}
