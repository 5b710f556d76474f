/*
 * The engine as glue calls it: functions of the libpaceline that Python has loaded, to which no glue is linked.
 */
#ifndef PACELINE_ENGINE_H
#define PACELINE_ENGINE_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "paceline.h"

#define EXPORT __attribute__((visibility("default")))

static struct {
  int (*submit)(const pl_op *, uint32_t, int32_t *);
  int (*wait_all)(const int32_t *, uint32_t, int64_t);
  int (*result)(int32_t, pl_output *);
  int (*release)(int32_t);
  int64_t (*error)(int32_t, char *, uint64_t);
  const char *(*last_error)(void);
  void (*free)(void *);
} engine;

/* `library` is the engine's, as dlopen has returned it. Returns 0, or -1 if it lacks a function. */
static inline int engine_bind(void *library) {
  engine.submit = (int (*)(const pl_op *, uint32_t, int32_t *))dlsym(library, "pl_submit");
  engine.wait_all = (int (*)(const int32_t *, uint32_t, int64_t))dlsym(library, "pl_wait_all");
  engine.result = (int (*)(int32_t, pl_output *))dlsym(library, "pl_result");
  engine.release = (int (*)(int32_t))dlsym(library, "pl_release");
  engine.error = (int64_t (*)(int32_t, char *, uint64_t))dlsym(library, "pl_error");
  engine.last_error = (const char *(*)(void))dlsym(library, "pl_last_error");
  engine.free = (void (*)(void *))dlsym(library, "pl_free");
  return engine.submit && engine.wait_all && engine.result && engine.release && engine.error && engine.last_error &&
                 engine.free
             ? 0
             : -1;
}

/* Writes why an operation has failed, as much as there is room for, and returns whether it says anything. */
static inline bool engine_error(int32_t handle, char *text, size_t room) {
  int64_t length = engine.error(handle, text, room);
  if (length <= 0) return false;
  if ((uint64_t)length < room) return true;
  char *whole = malloc((size_t)length + 1);
  if (!whole) return false;
  engine.error(handle, whole, (uint64_t)length + 1);
  size_t n = room - 1;
  while (n > 0 && (whole[n] & 0xC0) == 0x80) n--; /* no part of a character */
  memcpy(text, whole, n);
  text[n] = 0;
  free(whole);
  return true;
}

#endif
