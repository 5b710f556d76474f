/* The functions that Go calls (reduce.c), and the tables of kernels under them, one per instruction set (kernels.h). */
#ifndef PACELINE_CORE_REDUCE_H
#define PACELINE_CORE_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* Indices into the tables: the accumulator types, the operators, the 16-bit types, the wide types. */
enum { REDUCE_U8, REDUCE_I8, REDUCE_I16, REDUCE_I32, REDUCE_I64, REDUCE_F32, REDUCE_F64, REDUCE_NTYPES };
enum { REDUCE_OP_SUM, REDUCE_OP_MIN, REDUCE_OP_MAX, REDUCE_OP_PRODUCT, REDUCE_NOPS };
enum { REDUCE_HALF_FLOAT16, REDUCE_HALF_BFLOAT16, REDUCE_NHALVES, REDUCE_HALF_NONE = -1 };

struct reduce_kernels {
  void (*combine[REDUCE_NTYPES][REDUCE_NOPS])(void *dst, const void *a, const void *b, size_t n);
  void (*scale[REDUCE_NTYPES])(void *dst, const void *src, size_t n, double mul, double div);
  void (*widen[REDUCE_NHALVES])(void *dst, const void *src, size_t n);
  void (*narrow[REDUCE_NHALVES])(void *dst, const void *src, size_t n);
  void (*dots[2])(const void *a, const void *b, size_t n, double out[3]);
  void (*blend[2])(void *a, const void *b, size_t n, double ca, double cb);
};

extern const struct reduce_kernels reduce_kernels_plain, reduce_kernels_avx2, reduce_kernels_avx512;

/* Instruction sets, in rising order. The caller asks only for those that the machine has. */
enum { REDUCE_LEVEL_PLAIN, REDUCE_LEVEL_AVX2, REDUCE_LEVEL_AVX512 };

/* Lengths n are numbers of elements. `type` is the accumulator's; `half` is the tensor's own type where that has 16
 * bits, else REDUCE_HALF_NONE. */
void reduce_load(int level, int type, int half, void *acc, const void *src, size_t n, double prescale);
void reduce_add(int level, int op, int type, int half, void *acc, const void *src, size_t n, double prescale);
void reduce_load2(int level, int op, int type, int half, void *acc, const void *a, const void *b, size_t n,
                  double prescale);
void reduce_store(int level, int type, int half, void *dst, const void *acc, size_t n, double mul, double div);
void reduce_adasum(int level, int type, void *a, const void *b, size_t n);

/* Whether the machine converts float16 in hardware, as the levels above plain need. */
int reduce_has_f16c(void);

#pragma GCC visibility pop

#endif
