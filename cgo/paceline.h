/*
 * Paceline's C ABI: the functions that libpaceline.so exports. Any thread may call any of them.
 *
 * Conventions
 *  - Functions that can fail return 0 (PL_OK) or a negative pl_status. Outputs are set only on success.
 *  - A structure begins with its size in bytes, which the caller sets to the size in its own header. Structures grow
 *    only at the end. In a shorter one, from an older caller, the missing fields have their defaults. A longer one,
 *    from a newer caller, is accepted if all bytes that this release does not know are zero; otherwise the function
 *    returns PL_ERR_INVALID. In an output, the fields that both sides know are written, and zeros after them. Fields
 *    named reserved are zero.
 *  - A pointer to options may be NULL for the defaults, and operations may share options. A function reads what its
 *    arguments point to before it returns, except the memory of tensors and done_arg.
 *  - Strings are UTF-8 and end with a NUL. Lengths are in bytes and times in milliseconds.
 *  - After a failure pl_last_error() returns the calling thread's message.
 *  - After fork() every function returns PL_ERR_FORKED in the child, because the engine's threads stay in the parent.
 *    No pl_done_fn is called in the child.
 */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Increases when a function or the beginning of a structure changes, not when a structure grows. Compare it with
 * pl_abi_version(). */
#define PL_ABI_VERSION 2

typedef enum pl_status {
  PL_OK = 0,
  PL_PENDING = 1,            /* a handle's operation is still under way */
  PL_ERR_INVALID = -1,       /* an argument is wrong; nothing was started */
  PL_ERR_NOT_INITIALIZED = -2,
  PL_ERR_DUPLICATE = -3,     /* an operation of that name is in flight on this rank */
  PL_ERR_MISMATCH = -4,      /* ranks submitted different shapes, types or operations under one name */
  PL_ERR_STALL = -5,         /* a rank did not submit, or the scheduler did not answer, in time */
  PL_ERR_PEER_LOST = -6,     /* a worker, a server or the job is lost: shut down, then initialise again */
  PL_ERR_SHUTDOWN = -7,      /* the engine was shut down while the operation was in flight */
  PL_ERR_FORKED = -8,        /* called in a child after fork() */
  PL_ERR_TIMEOUT = -9,       /* pl_wait only: its time has passed and the operation continues */
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
  PL_ACCUMULATE, /* on a value that the servers hold; pl_held.use says which */
  PL_SEND, /* a message to one rank: independent of all other operations, not declared. It is done when the receiver has
              it. A name is what errors and warnings of this rank say in the place of "tag 7" */
  PL_RECEIVE /* the earliest message of a rank, or of any, that has the tag. Messages of one rank with one tag arrive in
                their order. Its length must be that of the message: another is PL_ERR_MISMATCH at both ends */
} pl_kind;

/* The root of a receive that takes a message of any rank. */
#define PL_ANY_RANK (-1)

/* Uses of a held value. PL_ADD may come with PL_READ or PL_READ_NOW. */
typedef enum pl_use {
  PL_DECLARE = 1, /* every rank, once: the root's input becomes the value, and every rank's output */
  PL_ADD = 2, /* adds the input, averaged over the ranks for PL_AVERAGE, and ends this rank's iteration */
  PL_READ = 4, /* the value, when the synchronisation model lets this rank continue */
  PL_READ_NOW = 8, /* the current value */
  PL_WITHIN = 16, /* with PL_ADD and PL_READ_NOW: the superstep continues, see pl_end_iteration */
  PL_EXACT = 32 /* with a read: the value in full precision, even if the tensor is coded */
} pl_use;

/* Options: the synchronisation model of a tensor. Allreduce, reducescatter, accumulate. */
typedef struct pl_sync {
  uint32_t size; /* sizeof(pl_sync) */
  uint32_t soft_park; /* accumulate: 1 for the soft-barrier parking order, 0 for the lazy one */
  const char *model; /* "ssp:3"; NULL: BSP */
} pl_sync;

/* Options: how a tensor is coded. Allreduce, reducescatter, accumulate, of floating-point types, by sum or average. */
typedef struct pl_codec {
  uint32_t size; /* sizeof(pl_codec) */
  uint32_t reserved;
  const char *codec; /* a codec ("topk:0.01") or rules, as in PACELINE_COMPRESSION; NULL: that setting; "none": plain */
} pl_codec;

/* Options: which changes are too small to send. A read of a held value returns the result of this rank's previous
 * read as long as |change| / |value| (L2, by partition) is below threshold / iteration^decay. */
typedef struct pl_gate {
  uint32_t size; /* sizeof(pl_gate) */
  uint32_t reserved;
  double threshold; /* 0: each read returns the value */
  double decay;
} pl_gate;

/* Options of PL_ACCUMULATE. */
typedef struct pl_held {
  uint32_t size; /* sizeof(pl_held) */
  uint32_t use; /* pl_use */
  float significance; /* PL_ADD: |gradient| / |weights| of this iteration, for models that use it */
  uint32_t reserved;
  const char *group; /* PL_DECLARE, for models with supersteps: name of the first value of the group that is
                        stepped together; NULL: none */
} pl_held;

/* Called once when an operation has ended, successfully or not. status is what pl_poll(handle) returns then.
 *
 * The library calls from threads of its own, one call at a time, in the order in which the operations ended. A call may
 * come before pl_submit has returned. It must not block: no other call starts before it returns, although the engine
 * continues. It may call every function, including pl_submit, pl_result and pl_release of this handle, except those
 * that wait for other ranks: pl_init, pl_shutdown, pl_wait, pl_wait_all, pl_set_condition, pl_end_iteration, pl_state,
 * pl_set_state and pl_process_set_* return PL_ERR_INVALID. pl_release before or within the call frees the operation's
 * output at once, but the handle's number is not used again before the call has returned. done_arg may be any value.
 * pl_shutdown ends operations in flight with PL_ERR_SHUTDOWN and returns after the last call; within these calls
 * pl_submit returns PL_ERR_NOT_INITIALIZED. If pl_submit or pl_join returns an error, there is no call. */
typedef void (*pl_done_fn)(void *done_arg, int32_t handle, int32_t status);

/* One operation. The input and output memory, dense and in row-major order of elements,
 * must stay valid and untouched until the handle is done. */
typedef struct pl_op {
  uint32_t size; /* sizeof(pl_op) */
  uint32_t kind; /* pl_kind */
  uint32_t dtype; /* pl_dtype */
  uint32_t reduce_op; /* pl_reduce_op: allreduce, reducescatter, accumulate */
  uint32_t process_set; /* 0: all ranks */
  int32_t root; /* broadcast, PL_DECLARE: global rank of the source; send: of the receiver; receive: of the sender, or
                   PL_ANY_RANK */
  int32_t priority; /* higher is sent first; 0 by default */
  uint32_t ndim;
  const int64_t *shape; /* of the input (alltoall, allgather: this rank's) */
  const void *input; /* may equal output (allreduce, broadcast); NULL where there are no bytes */
  void *output; /* allreduce, broadcast: bytes of the input; receive: of the shape; reducescatter: this rank's rows;
                   allgather, alltoall: NULL, the engine allocates it (pl_result) */
  const int64_t *splits; /* alltoall: rows for each rank of the set, or NULL for equal parts */
  uint32_t nsplits;
  double prescale; /* allreduce, reducescatter: multiplies each input; 1.0 for none */
  double postscale; /* multiplies the result after averaging; 1.0 for none */
  const char *name; /* NULL: unnamed; unnamed operations match in the order of their submission */
  /* A pl_op may end here. The following fields are 0 or NULL by default. */
  const pl_sync *sync; /* sync, codec, pull_gate: the same in every use of a held value */
  const pl_codec *codec;
  const pl_gate *pull_gate; /* accumulate */
  const pl_held *held; /* accumulate */
  uint32_t empty; /* 1: this rank's input is zeros, which are not sent, and input may be NULL: allreduce,
                     reducescatter, accumulate with PL_ADD, by sum or average */
  uint32_t sequence; /* 1: name is that of a sequence of unnamed operations of any kinds: they match in the order of
                        their submission to the sequence, and several may be in flight */
  pl_done_fn done; /* called at the end, in addition to pl_poll and pl_wait; NULL: no call */
  void *done_arg;
  uint32_t authenticated; /* 1: receivers interpret the bytes, for example unpickle them: they are authenticated on
                             every connection, whatever PACELINE_INTEGRITY says; the same on all ranks */
  uint32_t at_once; /* 1: the caller waits for it next, so it leaves at once, with all that is held (pl_gathers) */
  uint64_t tag; /* send, receive: a receive takes messages with the same tag alone */
  int64_t timeout_ms; /* after which the operation ends with PL_ERR_STALL, on all its ranks; 0: never. A message that
                         its receiver takes at the same moment may have arrived */
  uint32_t later; /* 1: what is wrong with it may be the error that it ends with, not that of pl_submit. Then pl_submit
                     of one small allreduce need not wait for the engine, which makes many of them cheap one by one */
  uint32_t unnamed; /* 1: name is the caller's label for an operation that its program has not named; the same on all
                       ranks. They match by it, but the next one may be another tensor's: where the codec would keep a
                       residual for that, the tensor is plain, and it is in no pl_state */
} pl_op;

/* The results of a finished operation beyond its output memory. */
typedef struct pl_output {
  uint32_t size; /* sizeof(pl_output) */
  void *data; /* allgather, alltoall: rows of all sources in rank order; the caller owns it and
                 frees it by pl_free; NULL where there are no bytes */
  uint64_t bytes;
  uint32_t nrows; /* entries of rows */
  const int64_t *rows; /* allgather, alltoall: rows received from each rank of the set; valid until pl_release */
  /* A pl_output may end here. */
  /* allgather: how many ranks are not lost; join: the last rank that joined; receive: the rank that sent */
  int32_t value;
  uint32_t reserved;
} pl_output;

uint32_t pl_abi_version(void);
const char *pl_version(void);
const char *pl_last_error(void);

/* Starts the engine and joins the job. Waits for the other ranks, at most for the start timeout.
 * settings: JSON object {"env": {"NAME": "value", ...}, "settings": {"name": value, ...}, "process_sets": [[0, 1],
 * ...], "expect": with true only the place and the settings are checked and remembered for pl_info, and nothing is
 * joined: for an answer of pl_seat that is early}. env: the variables of the environment that concern Paceline.
 * settings: the same settings by name, "sync" for PACELINE_SYNC and so on, as strings, numbers or booleans; they are
 * checked as the variables are, and override these and those of other systems. An unknown name is an error. A second
 * call while running does nothing. */
int pl_init(const char *settings);
/* Leaves the job. Operations in flight end with PL_ERR_SHUTDOWN. Handles stay valid until the next pl_init, which
 * releases them. A call when not running does nothing. */
int pl_shutdown(void);

/* Asks the launcher of a job that changes its size, before pl_init, for a place in the next round, and waits for the
 * answer. request: JSON object {"env": as for pl_init, "timeout_seconds", "ask": {"process": number that the launcher
 * gave this process, "state": it has the state of the training, "commits": how new that is, "skip": it needs nobody
 * else's, "early": while a round runs, at once the place that it may expect, "watch": not a place, but news of the
 * hosts later than the number "news"}}. Writes JSON: {"env": variables of the place, for pl_init, "commits": of rank
 * 0's state, "early": this is the place to expect: ask again for one, "skip": all have the same state, "news",
 * "removed": by the news processes have to go and none joins, "why": there is no place, for this reason}. Returns the
 * length; the answer to one request is not repeated, so buf has room for 64 KiB, which is enough. */
int64_t pl_seat(const char *request, char *buf, uint64_t cap);

/* Writes the state of the job as JSON: {"rank", "size", "local_rank", "local_size", "cross_rank",
 * "cross_size", "homogeneous", "round", "process_sets": [{"id", "ranks"}], "settings": {...}, "warnings": [...],
 * "tally": {"admitted", "dropped", "duplicate", "delayed", "withheld"}, "supersteps": [{"value", "model", "superstep",
 * "iterations", "s", "w"}], "heap": {"objects", "bytes", "collections"}, "failure": why no operation can begin any
 * more, where there is such a reason}. The round is a number that all ranks have between one pl_init and pl_shutdown,
 * and no other round. The tally is that of the server in this process. The heap is what the library has taken from Go's
 * heap, and how often Go's collector has run. Returns the length, or a negative pl_status. If the length is cap or
 * more, nothing is written: call again with more room. */
int64_t pl_info(char *buf, uint64_t cap);

/* Submits count operations as one group: all are queued, or none and an error is returned. All have the same size.
 * handles receives count numbers >= 0. */
int pl_submit(const pl_op *ops, uint32_t count, int32_t *handles);
/* Points to how many bytes of reductions that are submitted now would be held until earlier ones have ended or somebody
 * waits, so that what becomes ready together travels together; 0 while they would leave at once. A caller that will
 * wait may collect operations of so many bytes, and submit them as one group before it waits, which costs less than one
 * by one. The number changes at any time; the pointer is always the same. */
const int64_t *pl_gathers(void);
/* Zeros in this process's arena, memory that it lends to the servers of its host, from the first pl_init on; NULL where
 * there is none, as without shared memory, or where it is full. A sum whose input and output lie there is made in
 * place, and not copied. Such memory stays where it is, and pl_arena_free takes it back when no operation uses it. */
void *pl_arena_alloc(uint64_t bytes);
int pl_arena_free(void *memory);
/* PL_OK if these options name a synchronisation model that so many workers can run on a tensor that is reduced
 * (accumulate 0) or held by the servers (1). Otherwise PL_ERR_INVALID, and pl_last_error() says what is allowed. */
int pl_check_sync(const pl_sync *sync, uint32_t accumulate, uint32_t workers);
/* Writes the properties of the synchronisation model that the text names, as JSON: {"setting", "held": ranks may run
 * ahead, so that the servers hold the tensor, "whole": every sum has all ranks' pushes, "supersteps": ranks run freely
 * between barriers, "significance": pushes carry their significance}. Returns the length as pl_info does. */
int64_t pl_sync_info(const char *sync, char *buf, uint64_t cap);
/* PL_OK if the text is a codec, rules, or the path of a file with rules, as in PACELINE_COMPRESSION. Otherwise
 * PL_ERR_INVALID, and pl_last_error() says what is allowed. */
int pl_check_codec(const char *codec);
/* Writes the properties of the codecs that such a text names, as a JSON list with one object per rule: {"setting",
 * "unbiased", "precise": a message can stand for the tensor, "residual": bytes per element of float32, "momentum": the
 * factor that replaces the optimizer's, 0 for none}. Returns the length as pl_info does. */
int64_t pl_codec_info(const char *codec, char *buf, uint64_t cap);
/* Changes the synchronisation model of tensors in use. One rank calls it. change: JSON {"pull": model whose pull
 * condition to use, "push": model whose push condition to use, "names": patterns of tensor names, "servers": indices of
 * servers}, all optional. Without names it changes every tensor that is held or was declared with a model; without
 * servers, on all servers. The change applies to a key when the key has closed *at iterations. PL_ERR_INVALID if one
 * tensor cannot change: then none does. */
int pl_set_condition(const char *change, uint64_t *at);
/* Under a model with supersteps (adaptive, elastic): reports to the decider that this rank has ended an iteration of a
 * group of values. name: the group's first value. *last is 1 if the iteration ends the superstep: the rank then pushes
 * by PL_ADD with PL_READ, which waits for the other ranks, otherwise by PL_ADD with PL_READ_NOW and PL_WITHIN. */
int pl_end_iteration(uint32_t process_set, const char *name, int32_t *last);
/* This rank begins to compute its next iteration. The time between the two calls is not part of an iteration. */
int pl_begin_iteration(uint32_t process_set, const char *name);
/* Reports that this rank has no more data: it contributes zeros to later reductions until every rank has joined. The
 * handle is done then, and its pl_output.value is the last rank that joined. done may be NULL. */
int pl_join(pl_done_fn done, void *done_arg, int32_t *handle);

/* PL_PENDING, PL_OK when done, or the error that the operation ended with, which is never PL_ERR_TIMEOUT. */
int pl_poll(int32_t handle);
/* Waits until the operation ends or timeout_ms has passed (negative: no limit but the engine's own
 * deadlines). Returns as pl_poll, or PL_ERR_TIMEOUT. */
int pl_wait(int32_t handle, int64_t timeout_ms);
/* Waits until all of count operations have ended or timeout_ms has passed, as pl_wait does for one. Returns PL_OK, the
 * error of the first one in the list that ended with one, or PL_ERR_TIMEOUT. The thread is woken once, not by each. */
int pl_wait_all(const int32_t *handles, uint32_t count, int64_t timeout_ms);
/* The message of an operation that ended with an error; returns the length as pl_info does. */
int64_t pl_error(int32_t handle, char *buf, uint64_t cap);
/* The output of an operation that is done. The caller then owns pl_output.data; a second call is an error. */
int pl_result(int32_t handle, pl_output *out);
/* Releases the handle of an operation that has ended; its number may be used again. */
int pl_release(int32_t handle);
/* pl_release of count handles: of all that it can, and returns the error of the first that it cannot. */
int pl_release_all(const int32_t *handles, uint32_t count);
void pl_free(void *data);

/* The state of coded tensors that a checkpoint needs beside the model: their iterations, this worker's residuals and
 * its share of the servers' residuals. Writes it to buf and returns its size in bytes, or a negative pl_status. If the
 * size is more than cap, nothing is written: call again with more room. Every rank saves its own state, at the same
 * place in the program, with no operation in flight. Waits for the servers, at most for the start timeout. */
int64_t pl_state(void *buf, uint64_t cap);
/* Restores what pl_state returned on this rank, before or after the tensors' first use. Every rank calls it, at the
 * same place. Tensors that the state does not name start at zero. */
int pl_set_state(const void *state, uint64_t bytes);

/* Every rank calls these together, with the same ranks. A set with the same ranks keeps its number. */
int pl_process_set_add(const int32_t *ranks, uint32_t count, uint32_t *id);
int pl_process_set_remove(uint32_t id);
/* The number of the set of these ranks, which is made if there is none. Any rank may call it, whatever the others do,
 * and waits for none of them; such a set is not removed. */
int pl_process_set_find(const int32_t *ranks, uint32_t count, uint32_t *id);

/* Writes a Chrome trace of this rank's operations to path. */
int pl_timeline_start(const char *path);
int pl_timeline_stop(void);

#ifdef __cplusplus
}
#endif
#endif
