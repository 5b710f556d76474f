/* What handles.c offers to the Go side. */
#ifndef PACELINE_HANDLES_H
#define PACELINE_HANDLES_H

#include <stdint.h>

#include "paceline.h"

enum { PL_HANDLES = 1 << 16 };

int pl_in_child(void); /* after a fork: sets the error and says so */
int pl_in_done(void);  /* within a pl_done_fn: sets the error and says so */
void pl_set_error(const char *text);
void pl_handle_open(int32_t h);
void pl_handle_close(int32_t h);
void pl_handle_finish(int32_t h, int32_t status);
void pl_handle_done(pl_done_fn done, void *done_arg, int32_t h, int32_t status);
void *pl_alloc(uint64_t bytes);

#endif
