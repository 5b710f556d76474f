/*
 * Submitting operations whose ends are calls (pl_op.done), from threads of a framework. A submission waits for the
 * engine's answer, which takes two switches. So one thread at a time submits: what others post meanwhile it submits for
 * them, all together, and they go on at once.
 */
#ifndef PACELINE_POST_H
#define PACELINE_POST_H

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

/* Operations of the caller's, which it keeps until they have ended or are refused. */
typedef struct post {
  struct post *next;
  const pl_op *ops;
  uint32_t count;
  void (*refused)(struct post *p, int status, const char *message); /* none of them has begun */
} post;

enum { POSTED_TOGETHER = 64 }; /* operations, at most */

static struct {
  pthread_mutex_t lock;
  post *first, **last;
  bool busy; /* a thread submits */
} posts = {PTHREAD_MUTEX_INITIALIZER, NULL, NULL, false};

/* In a child after fork() no thread submits. Where the framework goes on there, the engine refuses what it is asked. */
static void posts_in_child(void) {
  pthread_mutex_init(&posts.lock, NULL);
  posts.first = NULL;
  posts.busy = false;
}

__attribute__((constructor)) static void post_on_load(void) { pthread_atfork(NULL, NULL, posts_in_child); }

/* What is submitted may be gone before the answer, and so is not where the handles come to. */
static void post_alone(post *p) {
  int32_t few[POSTED_TOGETHER], *handles = p->count > POSTED_TOGETHER ? malloc(p->count * sizeof *handles) : few;
  int status = handles ? engine.submit(p->ops, p->count, handles) : PL_ERR_MEMORY;
  if (status != PL_OK) p->refused(p, status, handles ? engine.last_error() : "out of memory");
  if (handles != few) free(handles);
}

/* Posts that follow each other, whose operations fit together, or one. */
static void post_together(post **list, uint32_t length) {
  pl_op ops[POSTED_TOGETHER];
  int32_t handles[POSTED_TOGETHER];
  uint32_t count = 0;
  for (uint32_t i = 0; length > 1 && i < length; count += list[i++]->count)
    memcpy(ops + count, list[i]->ops, list[i]->count * sizeof *ops);
  if (length > 1 && engine.submit(ops, count, handles) == PL_OK) return;
  for (uint32_t i = 0; i < length; i++) post_alone(list[i]); /* a refused group says not whose fault it is */
}

/* Takes posts out of the queue, the earliest first, whose operations fit together, or one alone. */
static uint32_t post_take(post **list) {
  uint32_t length = 0, count = 0;
  while (posts.first && length < POSTED_TOGETHER && (length == 0 || count + posts.first->count <= POSTED_TOGETHER)) {
    count += posts.first->count;
    list[length++] = posts.first;
    posts.first = posts.first->next;
  }
  return length;
}

/* Puts operations behind those that are posted. Returns whether nobody submits them: then the caller does, by
 * post_drain. */
static bool post_add(post *p) {
  p->next = NULL;
  pthread_mutex_lock(&posts.lock);
  *(posts.first ? posts.last : &posts.first) = p;
  posts.last = &p->next;
  bool nobody = !posts.busy;
  posts.busy = true;
  pthread_mutex_unlock(&posts.lock);
  return nobody;
}

/* Submits what is posted, until nothing is. */
static void post_drain(void) {
  pthread_mutex_lock(&posts.lock);
  while (posts.first) {
    post *list[POSTED_TOGETHER];
    uint32_t length = post_take(list);
    pthread_mutex_unlock(&posts.lock);
    post_together(list, length);
    pthread_mutex_lock(&posts.lock);
  }
  posts.busy = false;
  pthread_mutex_unlock(&posts.lock);
}

/* Whether a thread submits. */
static inline bool post_busy(void) {
  pthread_mutex_lock(&posts.lock);
  bool busy = posts.busy;
  pthread_mutex_unlock(&posts.lock);
  return busy;
}

/* Submits the operations, now or, if another thread submits, by that one. */
static inline void post_submit(post *p) {
  if (post_add(p)) post_drain();
}

#endif
