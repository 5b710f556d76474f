/* What the C files share with each other and with Go. */
#ifndef PACELINE_HANDLES_H
#define PACELINE_HANDLES_H

#include <stdint.h>

#include "paceline.h"

enum {
  PL_LEFT = 256, /* operations that callers leave before the engine takes them: 1 MiB of tensors of 4 KiB */
  PL_LEFT_DIMS = 8,
  PL_LEFT_NAME = 256, /* bytes, with the NUL */
  PL_HANDLES = (1 << 20) + PL_LEFT,
  PL_UNANSWERED = INT32_MIN /* no pl_status */
};

typedef struct pl_handle {
  int32_t state; /* pl_status; free ones are PL_ERR_INVALID */
  int32_t waiters;
  int32_t before; /* the one released before it, + 1, while the engine has not taken it back */
} pl_handle;

/* Operations to submit. It lies on the stack of the thread that waits for the answer, or in a pl_left. */
typedef struct pl_request {
  struct pl_request *next;
  const pl_op *ops;
  int32_t *handles;
  uint32_t count;
  uint32_t ended; /* what pl_shared.ended was before it */
  int32_t waits; /* for the operations too, not for the answer alone */
  int32_t answer; /* pl_status; with it the request may be gone */
  struct pl_left *left; /* that it lies in; NULL where a thread waits */
} pl_request;

/* An operation that nobody waits for to be submitted (pl_op.later). The engine gives it its handle before anybody asks;
 * from then on it is a spare, until a caller takes it out of pl_shared.spares, and the engine's again once it is in
 * pl_shared.requests. What op points to, but the tensors, is copied behind it. */
typedef struct pl_left {
  pl_request request;
  int32_t handle;
  pl_op op;
  int64_t shape[PL_LEFT_DIMS];
  char name[PL_LEFT_NAME];
} pl_left;

enum pl_flush { PL_FLUSH = 1, PL_FLUSH_AWAITED = 2 };

/* What callers use without entering Go, and the engine (shared.go) without entering C. Either call costs more than its
 * time: it wakes Go's monitor thread, which then wakes every 20 us, and takes Go's processor from whoever is slow in C.
 * All is read and written by atomic operations, so no field has the type _Atomic, which Go does not know. */
struct pl_shared {
  pl_handle handles[PL_HANDLES];
  int32_t used; /* handles from here on were never opened: their memory is not touched */
  int32_t released; /* the last handle that the engine has not taken back, + 1 */
  /* For waits for many handles, which sleep on the count: */
  uint32_t ended; /* operations that have */
  uint32_t wanted; /* the least count that somebody waits for */
  int32_t waiters;
  int32_t crowded; /* a thread that spins takes its core from a rank that computes */
  int64_t gathers; /* worker.Gathering */
  int32_t holding;
  /* The doorbell: */
  int32_t bell; /* an eventfd, or -1 */
  int32_t rung; /* the engine has still to look */
  int32_t flushes; /* enum pl_flush */
  pl_request *requests; /* the latest first */
  /* Operations that are left: */
  int32_t leaves; /* callers may leave them */
  int32_t untaken; /* are left and not submitted yet */
  uint32_t first, end; /* count the spares that callers have taken, and that the engine has put */
  int32_t spares[PL_LEFT]; /* from first to end, modulo PL_LEFT, the numbers of entries of left that are free */
  pl_left left[PL_LEFT];
};

extern struct pl_shared pl_shared;

/* The engine's sockets (internal/forked). A child closes them: connections then end with this process. */
enum { PL_SOCKETS = 4096 };
extern struct pl_socket {
  int32_t fd; /* and 1; 0 is a free place */
  int32_t unused;
  uint64_t cookie;
} pl_sockets[PL_SOCKETS];

/* The arena, which servers map. A child gets a copy of its own: what it writes is nobody else's. */
extern struct pl_memory {
  void *at;
  uint64_t bytes;
  int32_t file; /* and 1; 0 for none */
  int32_t unused;
} pl_memory;

#define PL_GET(field) __atomic_load_n(&(field), __ATOMIC_SEQ_CST)
#define PL_SET(field, value) __atomic_store_n(&(field), value, __ATOMIC_SEQ_CST)
#define PL_SWAP(field, value) __atomic_exchange_n(&(field), value, __ATOMIC_SEQ_CST)
#define PL_ADD(field, value) __atomic_add_fetch(&(field), value, __ATOMIC_SEQ_CST)
/* At 0 *old is what is there. */
#define PL_SWAP_IF(field, old, value)                                                      \
  __atomic_compare_exchange_n(&(field), old, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)

int pl_in_child(void); /* whether this is a child after fork(); sets the error if so */
int pl_within_done(void); /* whether this thread runs a pl_done_fn */
int pl_in_done(void); /* the same; sets the error if so */
void pl_set_error(const char *text);
uint32_t pl_handles_release(const int32_t *list,
                            uint32_t count); /* how many, up to the first that cannot be released */
void pl_handle_done(pl_done_fn done, uintptr_t done_arg, int32_t h, int32_t status);
void *pl_alloc(uint64_t bytes);

/* Waits for the answer, and if the request waits for its operations and is taken, until these have ended, for 0.1 s at
 * most then. Returns the answer. */
int32_t pl_await(pl_request *r);

/* doorbell.c: pl_ask submits; where there is no doorbell to ring it returns PL_UNANSWERED, and pl_ask_to_flush 0. The
 * engine answers each request without waiting for anything but its own locks, so these waits have no deadline. Under
 * autotuning it waits for other ranks, too, where a phase of the search is not decided: until they come or the job
 * ends. */
int pl_ask(const pl_op *ops, uint32_t count, int32_t *handles);
/* Leaves one operation for the engine to submit, and gives its handle; 0 where it has to be asked for instead. */
int pl_leave(const pl_op *op, int32_t *handle);
int pl_ask_to_flush(int waits);

#endif
