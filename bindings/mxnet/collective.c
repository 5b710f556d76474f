/*
 * paceline.mxnet in MXNet's dependency engine: an operation is pushed with the arrays that it reads and writes, so that
 * it begins when they are ready and what uses its result waits for its end, and no thread waits for other ranks.
 *
 *  1. pl_mxnet_push (the program's thread) copies the operation, has it join the line of its name, and has MXNet's
 * engine call run.
 *  2. run (a thread of MXNet) posts it to Paceline's engine when it is the first of its line, and returns. It fails if
 * the job in which it was pushed has ended.
 *  3. ended (a thread of Paceline's engine) has it leave its line, and completes it in MXNet's engine. An error becomes
 * MXNet's, which is raised where the program waits for the result.
 *  4. MXNet's engine frees it (forget). Where it has not called run, because an argument had failed, the other ranks'
 * operations fail too: see withdraw.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "post.h"

enum { MAX_DIMS = 32 };

/* mxnet::engine::CallbackOnComplete. What run gets is on the caller's stack, and small enough to be copied. */
typedef struct on_complete {
  void (*callback)(void *engine, void *param, const void *error);
  void *engine, *param;
} on_complete;

typedef struct call {
  post post; /* the first member: a post is its call */
  struct call *next; /* in its line */
  bool waits;     /* it is in a line */
  bool ready;     /* to be posted, when it is the first of its name */
  bool withdrawn; /* MXNet's engine no longer knows it */
  uint64_t job;   /* in which it was pushed */
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

/* The lines: calls that have not ended, in the order in which they were pushed, by a hash of their name. Those of one
 * name and process set run one after the other, whatever their ends. A line of MXNet's engine, an array that all of
 * them write, would hand the error of one on to those behind it. */
enum { LINES = 1024 };
static pthread_mutex_t lines_lock = PTHREAD_MUTEX_INITIALIZER;
static call *lines[LINES];
static uint64_t jobs; /* that have ended */

/* In a child after fork() MXNet's engine has no operations. */
static void lines_in_child(void) { pthread_mutex_init(&lines_lock, NULL); }

__attribute__((constructor)) static void lines_on_load(void) { pthread_atfork(NULL, NULL, lines_in_child); }

static call **line_of(const call *c) {
  uint32_t hash = 2166136261u; /* FNV-1a */
  for (const char *at = c->name; *at; at++) hash = (hash ^ (uint8_t)*at) * 16777619u;
  return &lines[hash % LINES];
}

/* The earliest call of the name and process set of c, or NULL. */
static call *first_like(const call *c) {
  call *at = *line_of(c);
  while (at && (at->op.process_set != c->op.process_set || strcmp(at->name, c->name))) at = at->next;
  return at;
}

static void join(call *c) {
  pthread_mutex_lock(&lines_lock);
  call **at = line_of(c);
  while (*at) at = &(*at)->next;
  *at = c;
  c->waits = true;
  c->job = jobs;
  pthread_mutex_unlock(&lines_lock);
}

/* Posts a call that is ready and the first of its line. Not one of an earlier job, which would match with an operation
 * of this one: returns false for it. lines_lock is held. drain: set to whether the caller submits what is posted. */
static bool post_first(call *c, bool *drain) {
  if (c->job != jobs) return false;
  *drain = post_add(&c->post);
  return true;
}

/* The call has ended: the next of its name begins, if it is ready. Returns that one if its job has ended, else NULL. */
static call *leave(call *c) {
  bool drain = false;
  pthread_mutex_lock(&lines_lock);
  call **at = line_of(c);
  while (*at != c) at = &(*at)->next;
  *at = c->next;
  c->waits = false;
  call *next = first_like(c);
  bool begins = next && next->ready;
  if (begins) next->ready = false;
  bool outdated = begins && !post_first(next, &drain);
  pthread_mutex_unlock(&lines_lock);
  if (drain) post_drain();
  return outdated ? next : NULL;
}

/* The job has ended: what was pushed in it and begins later fails. What has begun has ended, too, on return. */
EXPORT void pl_mxnet_end_job(void) {
  pthread_mutex_lock(&lines_lock);
  jobs++;
  pthread_mutex_unlock(&lines_lock);
  while (post_busy()) usleep(1000); /* the engine refuses it */
}

/* Whether every call that was pushed has ended. */
EXPORT int pl_mxnet_idle(void) {
  pthread_mutex_lock(&lines_lock);
  int line = 0;
  while (line < LINES && !lines[line]) line++;
  pthread_mutex_unlock(&lines_lock);
  return line == LINES;
}

static void free_arrays(call *c) {
  if (c->input) mxnet.free(c->input);
  if (c->output) mxnet.free(c->output);
  c->input = c->output = NULL;
}

static void discard(call *c) {
  free_arrays(c);
  free(c->name);
  free(c->model);
  free(c->codec_text);
  free(c->group);
  free(c);
}

static void finish(call *c, const char *failure) {
  on_complete to = c->complete;
  if (c->withdrawn) {
    discard(c);
  } else if (failure) {
    void *error[8]; /* larger than any std::runtime_error */
    mxnet.make_error(error, failure);
    to.callback(to.engine, to.param, error); /* which copies it */
    mxnet.end_error(error);
  } else {
    to.callback(to.engine, to.param, NULL);
  }
}

static const char of_earlier_job[] = "the operation had not begun when shutdown() was called";

/* Ends the call, which is gone then, and those behind it whose job has ended. */
static void complete(call *c, const char *failure) {
  for (call *next; c; c = next, failure = of_earlier_job) {
    next = leave(c);
    finish(c, failure);
  }
}

/* The call's arrays are ready: it begins, now or when those before it have ended. */
static void begin(call *c) {
  bool drain = false;
  pthread_mutex_lock(&lines_lock);
  c->ready = first_like(c) != c;
  bool outdated = !c->ready && !post_first(c, &drain);
  pthread_mutex_unlock(&lines_lock);
  if (drain) post_drain();
  if (outdated) complete(c, of_earlier_job);
}

static void ended(void *arg, int32_t handle, int32_t status) {
  char message[4096];
  bool said = status != PL_OK && engine_error(handle, message, sizeof message);
  engine.release(handle);
  complete(arg, status == PL_OK ? NULL : said ? message : "the operation failed");
}

static void refused(post *p, int status, const char *message) {
  (void)status;
  complete((call *)p, message);
}

static void run(void *context, void *completes, void *param) {
  (void)context;
  call *c = param;
  memcpy(&c->complete, completes, sizeof c->complete);
  void *input = NULL, *output = NULL;
  if ((c->input && mxnet.data(c->input, &input)) || (c->output && mxnet.data(c->output, &output))) {
    complete(c, mxnet.last_error());
    return;
  }
  c->op.input = c->input ? input : output;
  c->op.output = output;
  begin(c);
}

/* Of a call that MXNet has not run: it takes its turn as a barrier, with which the other ranks' operations disagree, so
 * that they fail instead of waiting for this rank's, or taking its next one of the name for it. */
static void withdraw(call *c) {
  free_arrays(c);
  c->withdrawn = true;
  c->shape[0] = 0;
  c->op = (pl_op){
      .size = sizeof(pl_op),
      .kind = PL_BARRIER,
      .process_set = c->op.process_set,
      .ndim = 1,
      .shape = c->shape,
      .prescale = 1,
      .postscale = 1,
      .name = c->name,
      .done = ended,
      .done_arg = c,
  };
  begin(c);
}

static void forget(void *param) {
  call *c = param;
  if (c->waits) withdraw(c);
  else discard(c);
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
  c->post = (post){NULL, &c->op, 1, refused};
  return true;
}

/* An array's own handle, in the layout that programs see: after the operations on it so far. */
static int hold(void *array, void **held) {
  if (!array) return 0;
  mxnet.reorder(array);
  return mxnet.copy(array, held);
}

/* Pushes an operation without its memory, which is that of input and output; they are the same array where input is
 * NULL. Operations of one name run in the order of their pushes. Returns 0, or -1. */
EXPORT int pl_mxnet_push(const pl_op *op, void *input, void *output) {
  call *c = calloc(1, sizeof *c);
  if (!c) return -1;
  struct {
    int32_t type, id;
  } cpu = {1, 0};
  int prioritized = 3; /* FnProperty::kCPUPrioritized: run waits for nothing, and other ranks wait for it */
  void *reads[] = {input}, *writes[] = {output};
  if (op->ndim > MAX_DIMS || !copy(c, op) || hold(input, &c->input) || hold(output, &c->output)) {
    discard(c);
    return -1;
  }
  join(c);
  return mxnet.push(run, c, forget, &cpu, reads, input != NULL, writes, 1, &prioritized, op->priority, c->name, false);
}
