/*
 * Element-wise kernels in plain C loops, which the compiler turns into vectors of one instruction set.
 * Each file that includes this names the set: LEVEL, the suffix of its table, and TARGET, the function
 * attribute that allows it. reference.go defines the result of every kernel, bit for bit.
 *
 * Memory may be unaligned. A destination is one of the sources, or overlaps none.
 */
#include "reduce.h"

/* A product must not be fused into a sum, which would round once instead of twice. The pragma is for clang; gcc
 * fuses only in its GNU dialects, and the build uses -std=c11. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define EACH(n) INDEPENDENT for (size_t i = 0; i < (n); i++)

#define UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t u8;
typedef int8_t i8 __attribute__((may_alias));
typedef int16_t i16 UNALIGNED;
typedef int32_t i32 UNALIGNED;
typedef int64_t i64 UNALIGNED;
typedef uint16_t u16 UNALIGNED;
typedef uint32_t u32 UNALIGNED;
typedef float f32 UNALIGNED;
typedef double f64 UNALIGNED;

/* combine: d = a op b. Integers wrap around, by unsigned arithmetic; min and max return a NaN where either side is
 * one. */
#define COMBINE(T, op, expression)                                                        \
  TARGET static void op##_##T(void *dst, const void *left, const void *right, size_t n) { \
    T *d = dst;                                                                           \
    const T *x = left, *y = right;                                                        \
    EACH(n) {                                                                             \
      T a = x[i], b = y[i];                                                               \
      d[i] = (T)(expression);                                                             \
    }                                                                                     \
  }

#define COMBINE_INTEGER(T, U)        \
  COMBINE(T, sum, (U)a + (U)b)       \
  COMBINE(T, product, ((U)a * (U)b)) \
  COMBINE(T, min, a < b ? a : b)     \
  COMBINE(T, max, a > b ? a : b)

#define COMBINE_FLOAT(T)                        \
  COMBINE(T, sum, a + b)                        \
  COMBINE(T, product, (a * b))                  \
  COMBINE(T, min, ((a < b) | (a != a)) ? a : b) \
  COMBINE(T, max, ((a > b) | (a != a)) ? a : b)

COMBINE_INTEGER(u8, uint32_t)
COMBINE_INTEGER(i8, uint32_t)
COMBINE_INTEGER(i16, uint32_t)
COMBINE_INTEGER(i32, uint32_t)
COMBINE_INTEGER(i64, uint64_t)
COMBINE_FLOAT(f32)
COMBINE_FLOAT(f64)

/* scale: d = x * mul / div. Integers are computed in double, truncated towards zero and limited to their range. */
#define SCALE_INTEGER(T, LOW, HIGH)                                                            \
  TARGET static void scale_##T(void *dst, const void *src, size_t n, double mul, double div) { \
    T *d = dst;                                                                                \
    const T *x = src;                                                                          \
    EACH(n) {                                                                                  \
      double v = (double)x[i] * mul / div;                                                     \
      d[i] = v != v ? 0 : v <= (double)(LOW) ? (LOW) : v >= (double)(HIGH) ? (HIGH) : (T)v;    \
    }                                                                                          \
  }

/* The reciprocal of a power of two is exact: multiplication by it gives the same result as division, and is faster. */
static inline int power_of_two(double q) {
  return q >= 1 && q <= 0x1p30 && q == (double)(uint32_t)q && ((uint32_t)q & ((uint32_t)q - 1)) == 0;
}

#define SCALE_FLOAT(T, F)                                                                      \
  TARGET static void scale_##T(void *dst, const void *src, size_t n, double mul, double div) { \
    T *d = dst;                                                                                \
    const T *x = src;                                                                          \
    F m = (F)mul, q = (F)div;                                                                  \
    if (m == 1 && power_of_two(q)) {                                                           \
      m = 1 / q;                                                                               \
      q = 1;                                                                                   \
    }                                                                                          \
    if (q == 1) {                                                                              \
      EACH(n) d[i] = x[i] * m;                                                                 \
    } else if (m == 1) {                                                                       \
      EACH(n) d[i] = x[i] / q;                                                                 \
    } else {                                                                                   \
      EACH(n) d[i] = x[i] * m / q;                                                             \
    }                                                                                          \
  }

SCALE_INTEGER(u8, 0, UINT8_MAX)
SCALE_INTEGER(i8, INT8_MIN, INT8_MAX)
SCALE_INTEGER(i16, INT16_MIN, INT16_MAX)
SCALE_INTEGER(i32, INT32_MIN, INT32_MAX)
SCALE_INTEGER(i64, INT64_MIN, INT64_MAX)
SCALE_FLOAT(f32, float)
SCALE_FLOAT(f64, double)

/* bfloat16 is the upper half of a float32. */
TARGET static void widen_bfloat16(void *dst, const void *src, size_t n) {
  u32 *d = dst;
  const u16 *x = src;
  EACH(n) d[i] = (uint32_t)x[i] << 16;
}

TARGET static void narrow_bfloat16(void *dst, const void *src, size_t n) {
  u16 *d = dst;
  const u32 *x = src;
  EACH(n) {
    uint32_t u = x[i];
    uint32_t nearest = (u + 0x7fff + (u >> 16 & 1)) >> 16; /* ties to even */
    uint32_t quiet = u >> 16 | 0x40;
    d[i] = (u & 0x7fffffff) > 0x7f800000 ? quiet : nearest;
  }
}

static inline uint32_t half_bits(uint32_t h) {
  uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0);
  if (exponent) return sign | (exponent + 112) << 23 | mantissa << 13;
  union {
    float f;
    uint32_t u;
  } v = {(float)mantissa * 0x1p-24f}; /* zero and subnormal: exact */
  return sign | v.u;
}

static inline uint16_t half_nearest(uint32_t u) {
  uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff)); /* NaN, made quiet */
  if (u >= 0x47800000) return (uint16_t)(sign | 0x7c00);                    /* 2^16 and more */
  if (u >= 0x38800000) return (uint16_t)(sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
  union {
    uint32_t u;
    float f;
  } v = {u};
  v.f += 0.5f; /* 0.5f's last place is that of float16's subnormals, so the sum is rounded as they are */
  return (uint16_t)(sign | (v.u - 0x3f000000));
}

TARGET static void widen_float16(void *dst, const void *src, size_t n) {
  u32 *d = dst;
  const u16 *x = src;
  size_t i = 0;
#ifdef HALF_LANES
  for (; i + HALF_LANES <= n; i += HALF_LANES) half_load((float *)(d + i), x + i);
#endif
  for (; i < n; i++) d[i] = half_bits(x[i]);
}

TARGET static void narrow_float16(void *dst, const void *src, size_t n) {
  u16 *d = dst;
  const u32 *x = src;
  size_t i = 0;
#ifdef HALF_LANES
  for (; i + HALF_LANES <= n; i += HALF_LANES) half_store(d + i, (const float *)(x + i));
#endif
  for (; i < n; i++) d[i] = half_nearest(x[i]);
}

/* dots: |a|², |b|² and a·b in double. Eight partial sums, one per index modulo 8, fix the order of additions for every
 * vector width. */
#define DOTS(T)                                                                               \
  TARGET static void dots_##T(const void *left, const void *right, size_t n, double out[3]) { \
    const T *x = left, *y = right;                                                            \
    double aa[8] = {0}, bb[8] = {0}, ab[8] = {0};                                             \
    size_t i = 0;                                                                             \
    for (; i + 8 <= n; i += 8)                                                                \
      for (size_t k = 0; k < 8; k++) {                                                        \
        double a = x[i + k], b = y[i + k];                                                    \
        aa[k] += a * a;                                                                       \
        bb[k] += b * b;                                                                       \
        ab[k] += a * b;                                                                       \
      }                                                                                       \
    for (size_t k = 0; i < n; i++, k++) {                                                     \
      double a = x[i], b = y[i];                                                              \
      aa[k] += a * a;                                                                         \
      bb[k] += b * b;                                                                         \
      ab[k] += a * b;                                                                         \
    }                                                                                         \
    out[0] = out[1] = out[2] = 0;                                                             \
    for (size_t k = 0; k < 8; k++) {                                                          \
      out[0] += aa[k];                                                                        \
      out[1] += bb[k];                                                                        \
      out[2] += ab[k];                                                                        \
    }                                                                                         \
  }

/* blend: a = ca*a + cb*b, in double. */
#define BLEND(T)                                                                             \
  TARGET static void blend_##T(void *dst, const void *src, size_t n, double ca, double cb) { \
    T *x = dst;                                                                              \
    const T *y = src;                                                                        \
    EACH(n) x[i] = (T)(ca * (double)x[i] + cb * (double)y[i]);                               \
  }

DOTS(f32)
DOTS(f64)
BLEND(f32)
BLEND(f64)

#define OPS(T) {sum_##T, min_##T, max_##T, product_##T}
#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)

const struct reduce_kernels NAMED(reduce_kernels_, LEVEL) = {
    .combine = {OPS(u8), OPS(i8), OPS(i16), OPS(i32), OPS(i64), OPS(f32), OPS(f64)},
    .scale = {scale_u8, scale_i8, scale_i16, scale_i32, scale_i64, scale_f32, scale_f64},
    .widen = {widen_float16, widen_bfloat16},
    .narrow = {narrow_float16, narrow_bfloat16},
    .dots = {dots_f32, dots_f64},
    .blend = {blend_f32, blend_f64},
};
