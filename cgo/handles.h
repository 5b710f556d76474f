/* The functions of handles.c that Go calls. */
#ifndef PACELINE_HANDLES_H
#define PACELINE_HANDLES_H

#include <stdint.h>

#include "paceline.h"

enum { PL_HANDLES = 1 << 20 };

int pl_in_child(void); /* whether this is a child after fork(); sets the error if so */
int pl_within_done(void); /* whether this thread runs a pl_done_fn */
int pl_in_done(void);     /* the same; sets the error if so */
void pl_set_error(const char *text);
void pl_set_gathering(int64_t bytes, int32_t holds);
void pl_set_crowded(int32_t is);
void pl_handle_open(int32_t h);
void pl_handle_close(int32_t h);
uint32_t pl_handles_release(const int32_t *list,
                            uint32_t count); /* how many, up to the first that cannot be released */
int32_t pl_handle_released(int32_t h); /* the one released before h, or the last one for -1; -1: none */
void pl_handle_finish(int32_t h, int32_t status);
void pl_handle_done(pl_done_fn done, uintptr_t done_arg, int32_t h, int32_t status);
void *pl_alloc(uint64_t bytes);

/* Waits on a word, for other C files: spins a little where a core is free, then sleeps. Returns the word's new value.
 */
int32_t pl_await(void *word, int32_t value);
void pl_wake(void *word);

#endif
