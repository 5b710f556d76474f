/* The functions of handles.c that Go calls. */
#ifndef PACELINE_HANDLES_H
#define PACELINE_HANDLES_H

#include <stdint.h>

#include "paceline.h"

enum { PL_HANDLES = 1 << 20 };

int pl_in_child(void); /* whether this is a child after fork(); sets the error if so */
int pl_in_done(void);  /* whether this thread runs a pl_done_fn; sets the error if so */
void pl_set_error(const char *text);
void pl_set_gathering(int64_t bytes, int32_t holds);
void pl_set_crowded(int32_t is);
void pl_handle_open(int32_t h);
void pl_handle_close(int32_t h);
void pl_handle_finish(int32_t h, int32_t status);
void pl_handle_done(pl_done_fn done, uintptr_t done_arg, int32_t h, int32_t status);
void *pl_alloc(uint64_t bytes);

#endif
