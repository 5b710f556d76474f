/*
 * What an operation of TensorFlow is made with, and the functions that run it.
 */
#ifndef PACELINE_TF_KERNEL_H
#define PACELINE_TF_KERNEL_H

#include "tf.h"

/* PRESCALE, POSTSCALE, THRESHOLD and DECAY have the bits of a double; RANK and SIZE are those in the process set. ROUND
 * and GENERATION are those for which the operation is made, 0 for any. */
enum {
  KIND,
  REDUCE_OP,
  PROCESS_SET,
  ROOT,
  PRIORITY,
  AT_ONCE,
  RANK,
  SIZE,
  PRESCALE,
  POSTSCALE,
  ROUND,
  GENERATION,
  USE, /* of held values, as the next three */
  SOFT_PARK,
  THRESHOLD,
  DECAY,
  UNNAMED, /* pl_op.unnamed */
  NUMBERS
};

/* The inputs before the tensors: for each tensor 1 if it is zeros, which are not sent; |gradient| / |weights|; whether
 * the superstep continues. */
enum { EMPTY, SIGNIFICANCE, WITHIN, FLAGS };

typedef struct kernel {
  int64_t numbers[NUMBERS];
  char *label, *codec, *sync; /* "": none */
  int flags; /* inputs before the tensors */
} kernel;

/* Submits the operation's tensors and returns; `done` is TensorFlow's function, called at the end. */
void compute_async(void *kernel, TF_Context *ctx, void *done);

/* Submits the operation's tensors and waits for the end. */
void compute(void *kernel, TF_Context *ctx);

#endif
