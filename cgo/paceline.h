/*
 * Paceline's C ABI: what libpaceline.so exports. Every function may be called from any thread.
 *
 * Conventions
 *  - Functions that can fail return 0 (PL_OK) or a negative pl_status. Outputs are set only on success.
 *  - Structures begin with their size in bytes, which the caller sets to that of its own header's. They grow at the
 *    end alone: in a shorter one, an older caller's, the missing fields have their defaults; a longer one, a newer
 *    caller's, is taken where all bytes beyond those known here are zero, else PL_ERR_INVALID says so. Of an output
 *    the fields that both know are written, and zeros beyond. Fields named reserved are zero.
 *  - Pointers to structures of options may be NULL, for the defaults, and several operations may share one. What an
 *    argument points to is read before the function returns, but for the memory of tensors and for done_arg.
 *  - Strings are UTF-8 and end with a NUL. Lengths are in bytes and times in milliseconds.
 *  - After a failure pl_last_error() gives the calling thread's message.
 *  - After fork() every function returns PL_ERR_FORKED in the child: the engine's threads stay with the parent, and
 *    no pl_done_fn is called in the child.
 */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rises when a function or the beginning of a structure changes, not when one grows: compare it with pl_abi_version().
 */
#define PL_ABI_VERSION 2

typedef enum pl_status {
  PL_OK = 0,
  PL_PENDING = 1,            /* a handle's operation is still under way */
  PL_ERR_INVALID = -1,       /* an argument is wrong; nothing was started */
  PL_ERR_NOT_INITIALIZED = -2,
  PL_ERR_DUPLICATE = -3,     /* an operation of that name is in flight on this rank */
  PL_ERR_MISMATCH = -4,      /* ranks brought different shapes, types or operations under one name */
  PL_ERR_STALL = -5,         /* other ranks or the scheduler did not come or answer in time */
  PL_ERR_PEER_LOST = -6,     /* a worker, server or the job is gone: shut down, then initialise again */
  PL_ERR_SHUTDOWN = -7,      /* the engine was shut down while the operation was in flight */
  PL_ERR_FORKED = -8,        /* called in a child after fork() */
  PL_ERR_TIMEOUT = -9,       /* pl_wait alone: its time has passed and the operation goes on */
  PL_ERR_MEMORY = -10,       /* a memory limit */
  PL_ERR_UNSUPPORTED = -11,  /* for example a broadcast whose root has joined */
  PL_ERR_INTERNAL = -12,
  PL_ERR_INTERRUPTED = -13 /* Ctrl-C while pl_init waited for the other ranks */
} pl_status;

typedef enum pl_dtype {
  PL_UINT8 = 0,
  PL_INT8,
  PL_INT16,
  PL_INT32,
  PL_INT64,
  PL_FLOAT16,
  PL_BFLOAT16,
  PL_FLOAT32,
  PL_FLOAT64,
  PL_BOOL
} pl_dtype;

typedef enum pl_reduce_op { PL_AVERAGE = 0, PL_SUM, PL_ADASUM, PL_MIN, PL_MAX, PL_PRODUCT } pl_reduce_op;

typedef enum pl_kind {
  PL_ALLREDUCE = 0,
  PL_ALLGATHER,
  PL_BROADCAST,
  PL_ALLTOALL,
  PL_REDUCESCATTER,
  PL_BARRIER,
  PL_ACCUMULATE /* a value that the servers hold; pl_held.use says what to do with it */
} pl_kind;

/* Uses of a held value. PL_ADD may come with PL_READ or PL_READ_NOW. */
typedef enum pl_use {
  PL_DECLARE = 1, /* every rank, once: the root's input becomes the value, and every rank's output */
  PL_ADD = 2,     /* adds the input, averaged over the ranks for PL_AVERAGE, and ends this rank's iteration */
  PL_READ = 4,    /* the value, as soon as the synchronisation model lets this rank go on */
  PL_READ_NOW = 8, /* the value as it is */
  PL_WITHIN = 16,  /* with PL_ADD and PL_READ_NOW: an iteration within a superstep, see pl_end_iteration */
  PL_EXACT = 32    /* with a read: the value itself, however the tensor is coded */
} pl_use;

/* Options: under which synchronisation model a tensor is exchanged. Allreduce, reducescatter, accumulate. */
typedef struct pl_sync {
  uint32_t size;     /* sizeof(pl_sync) */
  uint32_t soft_park; /* accumulate: 1 for the soft-barrier parking order, 0 for the lazy one */
  const char *model; /* "ssp:3"; NULL: BSP */
} pl_sync;

/* Options: how a tensor's bytes travel. Allreduce, reducescatter, accumulate, of floating-point types, by sum or
 * average. */
typedef struct pl_codec {
  uint32_t size;     /* sizeof(pl_codec) */
  uint32_t reserved;
  const char *codec; /* a codec ("topk:0.01"), or rules as PACELINE_COMPRESSION takes; NULL: those; "none": plain */
} pl_codec;

/* Options: what is not worth sending. A read of a held value gives what this rank's last one gave as long as
 * |change| / |value| (L2, by partition) is under threshold / iteration^decay. */
typedef struct pl_gate {
  uint32_t size;    /* sizeof(pl_gate) */
  uint32_t reserved;
  double threshold; /* 0: each read gives the value */
  double decay;
} pl_gate;

/* Options of PL_ACCUMULATE. */
typedef struct pl_held {
  uint32_t size;      /* sizeof(pl_held) */
  uint32_t use;       /* pl_use */
  float significance; /* PL_ADD: |gradient| / |weights| of this iteration, for models that ask */
  uint32_t reserved;
  const char *group;  /* PL_DECLARE, for models with supersteps: name of the first of the values that are stepped
                         together; NULL: none */
} pl_held;

/* Called once when an operation has ended, well or not: status is what pl_poll(handle) gives by then.
 *
 * Calls come one after the other, in the order in which the operations ended, on threads of the library's own, and may
 * come before pl_submit has returned. A call must not block, since while it runs no other comes; the engine itself goes
 * on. Within it every function may be called, pl_submit, pl_result and pl_release of this handle among them, but for
 * those that wait for other ranks: pl_init, pl_shutdown, pl_wait, pl_set_condition, pl_state, pl_set_state and
 * pl_process_set_* give PL_ERR_INVALID there. pl_release before or within the call frees what the operation left at
 * once, while its number is not used again before the call has returned.
 * pl_shutdown ends operations in flight with PL_ERR_SHUTDOWN, and returns after the last call; within these, pl_submit
 * gives PL_ERR_NOT_INITIALIZED. Where pl_submit or pl_join returns an error there is no call. */
typedef void (*pl_done_fn)(void *done_arg, int32_t handle, int32_t status);

/* One collective operation. The input and output memory, dense and in row-major order of elements,
 * must stay valid and untouched until the handle is done. */
typedef struct pl_op {
  uint32_t size;          /* sizeof(pl_op) */
  uint32_t kind;          /* pl_kind */
  uint32_t dtype;         /* pl_dtype */
  uint32_t reduce_op;     /* pl_reduce_op: allreduce, reducescatter, accumulate */
  uint32_t process_set;   /* 0: all ranks */
  int32_t root;           /* broadcast, PL_DECLARE: global rank that has the data */
  int32_t priority;       /* higher goes first; 0 by default */
  uint32_t ndim;
  const int64_t *shape;   /* of the input (alltoall, allgather: this rank's) */
  const void *input;      /* may equal output (allreduce, broadcast); NULL where there are no bytes */
  void *output;           /* allreduce, broadcast: bytes of the input; reducescatter: this rank's rows;
                             allgather, alltoall: NULL, the engine makes it (pl_result) */
  const int64_t *splits;  /* alltoall: rows for each rank of the set, or NULL for equal parts */
  uint32_t nsplits;
  double prescale;        /* allreduce, reducescatter: multiplies each input; 1.0 for none */
  double postscale;       /* multiplies the result after averaging; 1.0 for none */
  const char *name;       /* NULL: unnamed; such operations match in the order of their submission */
  /* A pl_op may end here. What follows is 0 or NULL by default. */
  const pl_sync *sync;      /* these three: in every use of a held value the same */
  const pl_codec *codec;
  const pl_gate *pull_gate; /* accumulate */
  const pl_held *held;      /* accumulate */
  uint32_t empty; /* 1: this rank's input is zeros, none of which are sent, and input may be NULL: allreduce,
                     reducescatter, accumulate with PL_ADD, by sum or average */
  uint32_t reserved;
  pl_done_fn done; /* called at the end, beside pl_poll and pl_wait; NULL: nobody is */
  void *done_arg;
} pl_op;

/* What a finished operation gives beyond its output memory. */
typedef struct pl_output {
  uint32_t size; /* sizeof(pl_output) */
  void *data; /* allgather, alltoall: rows of all sources in rank order; the caller owns it and
                 returns it by pl_free; NULL where there are no bytes */
  uint64_t bytes;
  uint32_t nrows; /* entries of rows */
  const int64_t *rows; /* allgather, alltoall: rows received from each rank of the set; valid until pl_release */
  /* A pl_output may end here. */
  int32_t value; /* join: the last rank that joined */
  uint32_t reserved;
} pl_output;

uint32_t pl_abi_version(void);
const char *pl_version(void);
const char *pl_last_error(void);

/* Starts the engine and joins the job: waits for the other ranks until the start timeout.
 * settings: JSON object {"env": {"NAME": "value", ...}, "settings": {"name": value, ...}, "process_sets": [[0, 1],
 * ...]}, env being the process's environment as far as it concerns Paceline. settings are those of the environment,
 * "sync" for PACELINE_SYNC and so on, as strings, numbers or booleans; they are checked as the variables are, count
 * before these and before those of other systems, and one that does not exist is an error. A second call while running
 * does nothing. */
int pl_init(const char *settings);
/* Leaves the job. Operations in flight end with PL_ERR_SHUTDOWN. A call when not running does nothing. */
int pl_shutdown(void);

/* Writes what is known of the job as JSON: {"rank", "size", "local_rank", "local_size", "cross_rank",
 * "cross_size", "process_sets": [{"id", "ranks"}], "settings": {...}, "warnings": [...], "tally": {"admitted",
 * "dropped", "duplicate", "delayed", "withheld"}, "supersteps": [{"value", "model", "superstep", "iterations", "s",
 * "w"}]}, the tally being of the server in this process. Returns the length, or a negative pl_status. Where the length
 * is cap or more, nothing is written: call again with more room. */
int64_t pl_info(char *buf, uint64_t cap);

/* Submits count operations as one group: all are queued together, or none and an error is returned. They are of one
 * size. handles receives count numbers >= 0. */
int pl_submit(const pl_op *ops, uint32_t count, int32_t *handles);
/* PL_OK where the text names a synchronisation model that the workers can run on a tensor that is reduced
 * (accumulate 0) or held by the servers (1); else PL_ERR_INVALID, and pl_last_error() says what is allowed. */
int pl_check_sync(const char *sync, uint32_t soft_park, uint32_t accumulate, uint32_t workers);
/* Writes the properties of the synchronisation model that the text names, as JSON: {"setting", "held": the servers
 * are to hold a tensor under it, since ranks may run ahead, "supersteps": they run freely between barriers,
 * "significance": pushes are to carry it}. Returns the length as pl_info does. */
int64_t pl_sync_info(const char *sync, char *buf, uint64_t cap);
/* PL_OK where the text names a codec, or is rules or the path of a file with rules, as PACELINE_COMPRESSION takes;
 * else PL_ERR_INVALID, and pl_last_error() says what is allowed. */
int pl_check_codec(const char *codec);
/* Writes the properties of the codecs that such a text names, as a JSON list with one for each rule: {"setting",
 * "unbiased", "precise": a message can stand for the tensor, "residual": bytes per element of float32, "momentum": a
 * factor that takes the place of the optimizer's, 0 for none}. Returns the length as pl_info does. */
int64_t pl_codec_info(const char *codec, char *buf, uint64_t cap);
/* Changes the synchronisation model of tensors while they are in use, from any one rank. change: JSON {"pull": model
 * whose pull condition to take, "push": the same for the push condition, "names": patterns of tensor names, "servers":
 * their indices}, all optional; without names every tensor that was declared with a model or is held, without servers
 * all. Keys change over when they have closed *at iterations. PL_ERR_INVALID where one cannot: then none does. */
int pl_set_condition(const char *change, uint64_t *at);
/* Under a model with supersteps (adaptive, elastic): tells the decider that this rank has ended an iteration with the
 * values of a group, name being that of its first. *last is 1 when it ends the superstep: then they are pushed by
 * PL_ADD with PL_READ, which waits for the other ranks, else by PL_ADD with PL_READ_NOW and PL_WITHIN. */
int pl_end_iteration(uint32_t process_set, const char *name, int32_t *last);
/* The rank begins to compute its next iteration; what lies between the two calls is not counted as its time. */
int pl_begin_iteration(uint32_t process_set, const char *name);
/* Says that this rank has no more data: it takes part in later reductions with zeros until every rank has
 * joined. The handle is done then, and its pl_output.value is the last rank that joined. done may be NULL. */
int pl_join(pl_done_fn done, void *done_arg, int32_t *handle);

/* PL_PENDING, PL_OK when done, or the error the operation ended with, which is never PL_ERR_TIMEOUT. */
int pl_poll(int32_t handle);
/* Waits until the operation ends or timeout_ms has passed (negative: no limit but the engine's own
 * deadlines). Returns as pl_poll, or PL_ERR_TIMEOUT. */
int pl_wait(int32_t handle, int64_t timeout_ms);
/* The message of an operation that ended with an error; returns the length as pl_info does. */
int64_t pl_error(int32_t handle, char *buf, uint64_t cap);
/* The output of an operation that is done. Hands pl_output.data over to the caller, once. */
int pl_result(int32_t handle, pl_output *out);
/* Forgets a handle that has ended; its number may be used again. */
int pl_release(int32_t handle);
void pl_free(void *data);

/* What coded tensors need to go on from a checkpoint, beside the model: their iterations so far, this worker's
 * residuals and its share of the servers'. Writes it to buf and returns its size in bytes, or a negative pl_status.
 * Where the size is more than cap, nothing is written: call again with more room. Every rank takes its own, at the
 * same place in the program, with no operation in flight. It waits for the servers, at most for the start timeout. */
int64_t pl_state(void *buf, uint64_t cap);
/* Takes in what pl_state gave on this rank, before or after the tensors' first use; every rank does so, at the same
 * place. What it does not name starts at zero. */
int pl_set_state(const void *state, uint64_t bytes);

/* Every rank calls these together, with the same ranks. A set with the same ranks keeps its number. */
int pl_process_set_add(const int32_t *ranks, uint32_t count, uint32_t *id);
int pl_process_set_remove(uint32_t id);

/* Writes a Chrome trace of this rank's operations to path. */
int pl_timeline_start(const char *path);
int pl_timeline_stop(void);

#ifdef __cplusplus
}
#endif
#endif
