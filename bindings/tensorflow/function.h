/*
 * A std::function<void()> that TensorFlow passes by value to an asynchronous kernel. Its C interface hands over the
 * address only, which ends with the call, so the kernel moves the function out of there and leaves an empty one. This
 * takes the layout of libstdc++, which is checked when the glue is loaded: where it is another, kernels wait.
 */
#ifndef PACELINE_TF_FUNCTION_H
#define PACELINE_TF_FUNCTION_H

#include <stdbool.h>
#include <string.h>

typedef struct function {
  void *captured[2];
  bool (*manage)(void *, const void *, int); /* NULL: empty */
  void (*invoke)(const void *);
} function;

enum { FUNCTION_DESTROY = 3 };

static inline function function_move(void *from) {
  function moved;
  memcpy(&moved, from, sizeof moved);
  ((function *)from)->manage = NULL;
  return moved;
}

/* Calls the function once and destroys it. */
static inline void function_end(function *f) {
  f->invoke(f->captured);
  f->manage(f->captured, f->captured, FUNCTION_DESTROY);
}

static void function_probe_invoke(const void *captured) { ++**(int *const *)captured; }

static bool function_probe_manage(void *to, const void *from, int what) {
  (void)to, (void)from, (void)what;
  return false;
}

/* Whether `run`, which calls a std::function<void()> by its address, calls one of this layout. */
static inline bool function_layout_known(void (*run)(void *)) {
  int calls = 0;
  struct {
    function known;
    void *beyond[8]; /* a larger layout finds an empty function */
  } probe = {.known = {{&calls, NULL}, function_probe_manage, function_probe_invoke}};
  run(&probe);
  return calls == 1;
}

#endif
