/*
 * paceline.jax in XLA programs: one handler submits the operations of a custom call to the engine and returns a future,
 * so that no thread of XLA waits for other ranks.
 *
 *  1. pl_jax_collective (a thread of XLA) makes a call of the frame, hands it to a finisher, and returns.
 *  2. finish (a finisher) submits the call as one group and waits for it, copies what the engine has allocated,
 * releases the handles, and completes the future.
 *
 * XLA continues the program on the thread that completes a future, and may wait there for the next collective. A
 * finisher is therefore a thread of its own, and there is always one that waits for nothing else. Calls do not overtake
 * each other, because XLA makes one when the one before it has ended: their tokens say so.
 *
 * Operands: a token, with `gated` a flag per tensor (1: this rank's tensor is zeros, which are not sent), the tensors.
 * Results: a token, the tensors. Attributes: `numbers` and `scales` as in the enumerations below, and `text`, which has
 * the tensors' names, the synchronisation model and the codec one after the other.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "xla_ffi.h"

#define UNKNOWN UINT32_MAX

enum {
  JOB,
  KIND,
  REDUCE_OP,
  PROCESS_SET,
  ROOT,
  SOFT_PARK,
  USE,
  GATED,
  SYNC_LENGTH,
  CODEC_LENGTH,
  HEADER
}; /* numbers */
enum { PRIORITY, NAME_LENGTH, PER_TENSOR }; /* of numbers, for each tensor, after the header */
enum { PRESCALE, POSTSCALE, GATE_THRESHOLD, GATE_DECAY, SCALES }; /* of scales */

typedef struct call {
  struct call *next;
  const xla_api *api;
  xla_future *future;
  uint32_t count;
  int32_t *handles;
  pl_op *ops;
  struct member *members;
  pl_sync sync;
  pl_codec codec;
  pl_gate gate;
  pl_held held;
} call;

typedef struct member { /* a tensor of a call */
  void *data; /* of the result */
  uint64_t bytes;
} member;

static int minor;   /* version of the ABI */
static int64_t job; /* of this process; a program has 0 where it fits any */

/* The number of this process's job: programs that have the size or the sets of another are refused. */
EXPORT void pl_jax_set_job(int64_t number) { __atomic_store_n(&job, number, __ATOMIC_RELAXED); }

/* The minor version of the header that jaxlib ships: early runtimes do not say theirs, and accept no other. */
EXPORT void pl_jax_set_minor(int its_minor) { minor = its_minor; }

/* The engine's library as dlopen has returned it. Returns 0, or -1 if it lacks a function. */
EXPORT int pl_jax_bind(void *library) { return engine_bind(library); }

static xla_error *failure(const xla_api *api, int code, const char *message) {
  xla_error_create create = {sizeof create, NULL, message, code};
  return api->error_create(&create);
}

/* The engine's error. That of a loss has its name outside of programs, by which elastic training knows it. */
static xla_error *engine_failure(const xla_api *api, int status, const char *message) {
  if (status == PL_ERR_INVALID || status == PL_ERR_DUPLICATE) return failure(api, XLA_INVALID_ARGUMENT, message);
  char named[4200];
  snprintf(named, sizeof named, "HorovodInternalError: %s", message);
  return failure(api, XLA_INTERNAL, named);
}

static uint32_t dtype_of(int xla) {
  static const uint32_t known[] = {
      [1] = PL_BOOL + 1,  [2] = PL_INT8 + 1,     [3] = PL_INT16 + 1,    [4] = PL_INT32 + 1,    [5] = PL_INT64 + 1,
      [6] = PL_UINT8 + 1, [10] = PL_FLOAT16 + 1, [11] = PL_FLOAT32 + 1, [12] = PL_FLOAT64 + 1, [16] = PL_BFLOAT16 + 1};
  return xla < 0 || (size_t)xla >= sizeof known / sizeof *known || known[xla] == 0 ? UNKNOWN : known[xla] - 1;
}

static uint64_t bytes_of(const xla_buffer *buffer) {
  static const uint8_t width[] = {[PL_UINT8] = 1,   [PL_INT8] = 1,    [PL_INT16] = 2,    [PL_INT32] = 4,
                                  [PL_INT64] = 8,   [PL_FLOAT16] = 2, [PL_BFLOAT16] = 2, [PL_FLOAT32] = 4,
                                  [PL_FLOAT64] = 8, [PL_BOOL] = 1};
  uint64_t bytes = width[dtype_of(buffer->dtype)];
  for (int64_t i = 0; i < buffer->rank; i++) bytes *= (uint64_t)buffer->dims[i];
  return bytes;
}

/* The finishers: threads that complete futures. A new one starts when more calls wait than finishers do. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t more;
  call *first, **last;
  uint32_t calls, idle;
} finishers = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0, 0};

/* Copies an allgather's or alltoall's rows into the result, whose size the program has been compiled with. Rows that a
 * lost rank lacks are the engine's error, of which elastic training recovers, and other rows are the program's. */
static int fetch(call *c, uint32_t i, char *message, size_t room) {
  pl_output output = {.size = sizeof output};
  int status = engine.result(c->handles[i], &output);
  if (status != PL_OK) {
    snprintf(message, room, "%s", engine.last_error());
    return status;
  }
  uint64_t expected = c->members[i].bytes;
  uint32_t lost = output.nrows - (uint32_t)output.value, place = 0; /* of an allgather */
  while (place < output.nrows && output.rows[place] > 0) place++;
  if (output.bytes == expected && expected > 0) memcpy(c->members[i].data, output.data, expected);
  engine.free(output.data);
  if (output.bytes == expected) return PL_OK;
  if (c->ops[i].kind == PL_ALLGATHER && lost) {
    snprintf(message, room,
             "%s: this elastic job has lost %u of the %u ranks of the process set, with the one at place %u, and the "
             "compiled program expects rows of all: call it outside of jit, or with a process set of the ranks that "
             "are left",
             c->ops[i].name ? c->ops[i].name : "allgather", lost, output.nrows, place);
    return PL_ERR_PEER_LOST;
  }
  snprintf(message, room,
           "%s: the ranks' rows have %llu bytes together and the compiled program expects %llu: under jit every rank "
           "gives as many rows as the others; call it outside of jit where ranks differ",
           c->ops[i].name ? c->ops[i].name : "allgather", (unsigned long long)output.bytes,
           (unsigned long long)expected);
  return PL_ERR_INVALID;
}

/* Does a call. Returns its status, and writes the message of one that fails. */
static int perform(call *c, char *message, size_t room) {
  int status = engine.submit(c->ops, c->count, c->handles);
  if (status != PL_OK) {
    snprintf(message, room, "%s", engine.last_error());
    return status;
  }
  status = engine.wait_all(c->handles, c->count, -1); /* of the first that failed; the engine bounds the wait */
  bool said = false;
  for (uint32_t i = 0; i < c->count; i++) {
    bool rows = c->ops[i].kind == PL_ALLGATHER || c->ops[i].kind == PL_ALLTOALL;
    if (status != PL_OK) {
      said = said || engine_error(c->handles[i], message, room);
    } else if (rows) {
      status = fetch(c, i, message, room);
      said = status != PL_OK;
    }
    engine.release(c->handles[i]);
  }
  if (status != PL_OK && !said) snprintf(message, room, "the engine failed with status %d", status);
  return status;
}

static void finish(call *c) {
  char message[4096];
  xla_future_call end = {offsetof(xla_future_call, error), NULL, c->future, NULL};
  int status = perform(c, message, sizeof message);
  if (status != PL_OK) {
    end.size = sizeof end;
    end.error = engine_failure(c->api, status, message);
  }
  const xla_api *api = c->api;
  free(c);
  status != PL_OK ? api->future_set_error(&end) : api->future_set_available(&end);
}

static void *finisher(void *unused) {
  pthread_mutex_lock(&finishers.lock);
  for (;;) {
    while (finishers.first == NULL) {
      finishers.idle++;
      pthread_cond_wait(&finishers.more, &finishers.lock);
      finishers.idle--;
    }
    call *c = finishers.first;
    finishers.first = c->next;
    finishers.calls--;
    pthread_mutex_unlock(&finishers.lock);
    finish(c);
    pthread_mutex_lock(&finishers.lock);
  }
  return unused;
}

static bool start_finisher(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, finisher, NULL) != 0) return false;
  pthread_detach(thread);
  return true;
}

static void hand_over(call *c) {
  c->next = NULL;
  pthread_mutex_lock(&finishers.lock);
  *(finishers.first == NULL ? &finishers.first : finishers.last) = c;
  finishers.last = &c->next;
  bool start = ++finishers.calls > finishers.idle;
  pthread_mutex_unlock(&finishers.lock);
  if (start) start_finisher(); /* without a new thread, the call waits for one of the others */
  pthread_cond_signal(&finishers.more);
}

static const void *attribute(const xla_call *frame, const char *name, int type) {
  for (int64_t i = 0; i < frame->attributes.count; i++) {
    const xla_span *given = frame->attributes.names[i];
    if (frame->attributes.types[i] == type && given->length == strlen(name) &&
        memcmp(given->text, name, given->length) == 0)
      return frame->attributes.values[i];
  }
  return NULL;
}

/* Copies length bytes of text, ended by a NUL, and moves both pointers on; NULL for a negative length. */
static const char *cut(const char **from, char **to, int64_t length) {
  if (length < 0) return NULL;
  char *text = *to;
  memcpy(text, *from, (size_t)length);
  text[length] = 0;
  *from += length;
  *to += length + 1;
  return text;
}

/* The call of a frame, in one piece of memory; NULL, with a reason, for one that no lowering of this release makes. */
static call *read_call(const xla_call *frame, const char **reason) {
  const xla_array *array = attribute(frame, "numbers", XLA_ATTRIBUTE_ARRAY);
  const xla_array *factors = attribute(frame, "scales", XLA_ATTRIBUTE_ARRAY);
  const xla_span *text = attribute(frame, "text", XLA_ATTRIBUTE_STRING);
  const int64_t *numbers = array ? array->data : NULL;
  const double *scales = factors ? factors->data : NULL;
  int64_t count = frame->outputs.count - 1;
  *reason = "the program was compiled for another release of Paceline: clear JAX's compilation cache";
  if (!numbers || !scales || !text || count < 1 || factors->count != SCALES ||
      array->count != HEADER + PER_TENSOR * (size_t)count || frame->inputs.count != 1 + !!numbers[GATED] + count)
    return NULL;
  int64_t length =
      (numbers[SYNC_LENGTH] > 0 ? numbers[SYNC_LENGTH] : 0) + (numbers[CODEC_LENGTH] > 0 ? numbers[CODEC_LENGTH] : 0);
  for (int64_t i = 0; i < count; i++) {
    int64_t name = numbers[HEADER + PER_TENSOR * i + NAME_LENGTH];
    length += name > 0 ? name : 0;
  }
  if ((size_t)length != text->length) return NULL;
  if (numbers[JOB] != 0 && numbers[JOB] != __atomic_load_n(&job, __ATOMIC_RELAXED)) {
    *reason = "the program was compiled for an earlier job, whose size or process sets it has: compile it again";
    return NULL;
  }

  xla_buffer **inputs = frame->inputs.buffers + 1 + !!numbers[GATED], **results = frame->outputs.buffers + 1;
  size_t each = sizeof(pl_op) + sizeof(member) + sizeof(int32_t), dimensions = 0;
  for (int64_t i = 0; i < count; i++) dimensions += (size_t)inputs[i]->rank;
  size_t size = (size_t)count * each + dimensions * sizeof(int64_t) + (size_t)length + (size_t)count + 2;
  call *c = calloc(1, sizeof *c + size);
  if (c == NULL) {
    *reason = "out of memory";
    return NULL;
  }
  c->api = frame->api;
  c->count = (uint32_t)count;
  c->ops = (pl_op *)(c + 1);
  c->members = (member *)(c->ops + count);
  int64_t *shape = (int64_t *)(c->members + count); /* XLA's own may end when the handler has returned */
  c->handles = (int32_t *)(shape + dimensions);
  char *room = (char *)(c->handles + count);
  const char *rest = text->text;
  const uint8_t *empty = numbers[GATED] ? frame->inputs.buffers[1]->data : NULL;
  bool allocates = numbers[KIND] == PL_ALLGATHER || numbers[KIND] == PL_ALLTOALL;
  for (int64_t i = 0; i < count; i++) {
    const int64_t *own = numbers + HEADER + PER_TENSOR * i;
    pl_op *op = &c->ops[i];
    op->size = sizeof *op;
    op->kind = (uint32_t)numbers[KIND];
    op->dtype = dtype_of(inputs[i]->dtype);
    op->reduce_op = (uint32_t)numbers[REDUCE_OP];
    op->process_set = (uint32_t)numbers[PROCESS_SET];
    op->root = (int32_t)numbers[ROOT];
    op->priority = (int32_t)own[PRIORITY];
    op->ndim = (uint32_t)inputs[i]->rank;
    op->shape = memcpy(shape, inputs[i]->dims, (size_t)inputs[i]->rank * sizeof *shape);
    shape += inputs[i]->rank;
    op->input = inputs[i]->data;
    op->output = allocates ? NULL : results[i]->data;
    op->prescale = scales[PRESCALE];
    op->postscale = scales[POSTSCALE];
    op->name = cut(&rest, &room, own[NAME_LENGTH]);
    op->empty = empty != NULL && empty[i];
    if (op->dtype == UNKNOWN || dtype_of(results[i]->dtype) != op->dtype) {
      free(c);
      *reason = "a tensor of a type that the engine does not have";
      return NULL;
    }
    c->members[i] = (member){results[i]->data, bytes_of(results[i])};
  }
  c->ops[count - 1].at_once = 1; /* the program waits for it before its next collective */
  c->sync = (pl_sync){sizeof c->sync, (uint32_t)numbers[SOFT_PARK], cut(&rest, &room, numbers[SYNC_LENGTH])};
  c->codec = (pl_codec){sizeof c->codec, 0, cut(&rest, &room, numbers[CODEC_LENGTH])};
  c->gate = (pl_gate){sizeof c->gate, 0, scales[GATE_THRESHOLD], scales[GATE_DECAY]};
  c->held = (pl_held){.size = sizeof c->held, .use = (uint32_t)numbers[USE]};
  for (int64_t i = 0; i < count; i++) {
    pl_op *op = &c->ops[i];
    op->sync = c->sync.model || c->sync.soft_park ? &c->sync : NULL;
    op->codec = c->codec.codec ? &c->codec : NULL;
    op->pull_gate = op->kind == PL_ACCUMULATE && (c->gate.threshold > 0 || c->gate.decay > 0) ? &c->gate : NULL;
    op->held = op->kind == PL_ACCUMULATE ? &c->held : NULL;
  }
  return c;
}

static void describe(const xla_call *frame, xla_metadata *metadata) {
  int theirs = frame->api ? frame->api->version.minor : minor;
  metadata->version.major = 0;
  metadata->version.minor = theirs < XLA_MINOR_TESTED ? theirs : XLA_MINOR_TESTED;
  metadata->traits = 0;
  if (metadata->size >= sizeof *metadata) metadata->state_type = 0;
}

/* The handler of the custom call "paceline_collective". */
EXPORT xla_error *pl_jax_collective(xla_call *frame) {
  if (frame->extensions != NULL && frame->extensions->type == XLA_EXTENSION_METADATA) {
    describe(frame, ((xla_metadata_extension *)frame->extensions)->metadata);
    return NULL;
  }
  if (frame->stage != XLA_STAGE_EXECUTE) return NULL;
  const char *reason;
  call *c = read_call(frame, &reason);
  if (c == NULL) return failure(frame->api, XLA_INVALID_ARGUMENT, reason);
  xla_future_call create = {offsetof(xla_future_call, error), NULL, NULL, NULL};
  xla_error *error = frame->api->future_create(&create);
  if (error != NULL) {
    free(c);
    return error;
  }
  frame->future = c->future = create.future;
  hand_over(c);
  return NULL;
}
