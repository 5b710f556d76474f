/* Composes the kernels. Where two are needed, chunks go through a buffer that stays in the first-level cache, so that
 * the tensor is read once from memory. */
#include "reduce.h"

#include <stdalign.h>
#include <string.h>

#ifdef __x86_64__
#include <cpuid.h>
#endif

enum { CHUNK = 1024 }; /* elements; 8 KiB of the widest type */

static const size_t size_of[REDUCE_NTYPES] = {1, 1, 2, 4, 8, 4, 8};

static const struct reduce_kernels *kernels(int level) {
#ifdef __x86_64__
  if (level == REDUCE_LEVEL_AVX512) return &reduce_kernels_avx512;
  if (level == REDUCE_LEVEL_AVX2) return &reduce_kernels_avx2;
#endif
  (void)level;
  return &reduce_kernels_plain;
}

int reduce_has_f16c(void) {
#ifdef __x86_64__
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
#else
  return 0;
#endif
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static void load(const struct reduce_kernels *k, int type, int half, void *acc, const void *src, size_t n,
                 double prescale) {
  if (half != REDUCE_HALF_NONE) {
    k->widen[half](acc, src, n);
    src = acc;
  }
  if (prescale != 1) {
    k->scale[type](acc, src, n, prescale, 1);
  } else if (acc != src) {
    memcpy(acc, src, n * size_of[type]);
  }
}

void reduce_load(int level, int type, int half, void *acc, const void *src, size_t n, double prescale) {
  size_t wide = size_of[type], narrow = half == REDUCE_HALF_NONE ? wide : 2;
  size_t step = half != REDUCE_HALF_NONE && prescale != 1 ? CHUNK : n;
  for (size_t i = 0; i < n; i += step)
    load(kernels(level), type, half, (char *)acc + i * wide, (const char *)src + i * narrow, least(step, n - i),
         prescale);
}

void reduce_add(int level, int op, int type, int half, void *acc, const void *src, size_t n, double prescale) {
  const struct reduce_kernels *k = kernels(level);
  if (half == REDUCE_HALF_NONE && prescale == 1) {
    k->combine[type][op](acc, acc, src, n);
    return;
  }
  size_t wide = size_of[type], narrow = half == REDUCE_HALF_NONE ? wide : 2;
  alignas(64) double loaded[CHUNK];
  for (size_t i = 0; i < n; i += CHUNK) {
    char *to = (char *)acc + i * wide;
    size_t m = least(CHUNK, n - i);
    load(k, type, half, loaded, (const char *)src + i * narrow, m, prescale);
    k->combine[type][op](to, to, loaded, m);
  }
}

void reduce_load2(int level, int op, int type, int half, void *acc, const void *a, const void *b, size_t n,
                  double prescale) {
  const struct reduce_kernels *k = kernels(level);
  if (half == REDUCE_HALF_NONE && prescale == 1) {
    k->combine[type][op](acc, a, b, n);
    return;
  }
  size_t wide = size_of[type], narrow = half == REDUCE_HALF_NONE ? wide : 2;
  alignas(64) double left[CHUNK];
  alignas(64) double right[CHUNK];
  for (size_t i = 0; i < n; i += CHUNK) {
    size_t m = least(CHUNK, n - i);
    load(k, type, half, left, (const char *)a + i * narrow, m, prescale);
    load(k, type, half, right, (const char *)b + i * narrow, m, prescale);
    k->combine[type][op]((char *)acc + i * wide, left, right, m);
  }
}

void reduce_store(int level, int type, int half, void *dst, const void *acc, size_t n, double mul, double div) {
  const struct reduce_kernels *k = kernels(level);
  int scaled = mul != 1 || div != 1;
  if (half == REDUCE_HALF_NONE) {
    if (scaled) {
      k->scale[type](dst, acc, n, mul, div);
    } else if (dst != acc) {
      memcpy(dst, acc, n * size_of[type]);
    }
    return;
  }
  if (!scaled && dst != acc) {
    k->narrow[half](dst, acc, n);
    return;
  }
  alignas(64) float result[CHUNK]; /* in place, it also separates a kernel's writes from its reads */
  for (size_t i = 0; i < n; i += CHUNK) {
    size_t m = least(CHUNK, n - i);
    k->scale[type](result, (const float *)acc + i, m, mul, div);
    k->narrow[half]((uint16_t *)dst + i, result, m);
  }
}

/* a = (1 - a·b/2|a|²) a + (1 - a·b/2|b|²) b; a vector of zeros leaves the other unchanged. */
void reduce_adasum(int level, int type, void *a, const void *b, size_t n) {
  const struct reduce_kernels *k = kernels(level);
  double dots[3];
  k->dots[type - REDUCE_F32](a, b, n, dots);
  double ca = dots[0] == 0 ? 1 : 1 - dots[2] / (2 * dots[0]);
  double cb = dots[1] == 0 ? 1 : 1 - dots[2] / (2 * dots[1]);
  k->blend[type - REDUCE_F32](a, b, n, ca, cb);
}
