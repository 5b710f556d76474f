/* Requests of callers to the engine (doorbell.c). */
#ifndef PACELINE_DOORBELL_H
#define PACELINE_DOORBELL_H

#include <stdint.h>

#include "paceline.h"

enum { PL_UNANSWERED = INT32_MIN }; /* no pl_status */
enum pl_flush { PL_FLUSH = 1, PL_FLUSH_AWAITED = 2 };

/* Operations to submit. */
typedef struct pl_request {
  struct pl_request *next;
  const pl_op *ops;
  int32_t *handles;
  uint32_t count;
} pl_request;

/* The callers' side. pl_ask submits; where there is no doorbell to ring it returns PL_UNANSWERED, and pl_ask_to_flush
 * 0. The engine answers each request without waiting for anything but its own locks, so these waits have no deadline.
 */
int pl_ask(const pl_op *ops, uint32_t count, int32_t *handles);
int pl_ask_to_flush(int waits);

/* The engine's side. */
int pl_doorbell_open(void);             /* the eventfd, or -1 */
void pl_doorbell_lost(void);            /* from here on callers enter Go */
pl_request *pl_asked(int32_t *flush);   /* all that was asked, in order */
void pl_answer(pl_request *r, int32_t status);

#endif
