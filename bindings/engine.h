/*
 * The engine as glue calls it: functions of the libpaceline that Python has loaded, to which no glue is linked.
 */
#ifndef PACELINE_ENGINE_H
#define PACELINE_ENGINE_H

#include <dlfcn.h>

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

#endif
