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

/* scale: d = x * mul / div. Integers are computed in double, truncated towards zero and limited to their range; NaN
 * becomes 0. The numbers are limited in a loop of their own, since gcc makes branches of a single loop.
 *
 * The quotient of whole numbers is below the next whole number by at least 1/div, so that x times a reciprocal that is
 * too great by 2^-40 is truncated to the same number. For 8 and 16 bits float has as much room. */
#define SCALE_INTEGER(T, F, EXCESS, LOW, HIGH)                                                     \
  TARGET static void scale_##T(void *dst, const void *src, size_t count, double mul, double div) { \
    T *d = dst;                                                                                    \
    const T *x = src;                                                                              \
    if (mul == 1 && whole(div)) {                                                                  \
      F reciprocal = (F)((1 + (EXCESS)) / div);                                                    \
      EACH(count) d[i] = (T)(int32_t)((F)x[i] * reciprocal);                                       \
      return;                                                                                      \
    }                                                                                              \
    _Alignas(64) double v[256];                                                                    \
    for (size_t n; count > 0; d += n, x += n, count -= n) {                                        \
      n = count < 256 ? count : 256;                                                               \
      if (div == 1) {                                                                              \
        EACH(n) v[i] = (double)x[i] * mul;                                                         \
      } else {                                                                                     \
        EACH(n) v[i] = (double)x[i] * mul / div;                                                   \
      }                                                                                            \
      EACH(n) {                                                                                    \
        double f = v[i] == v[i] ? v[i] : 0;                                                        \
        f = f > (LOW) ? f : (LOW);                                                                 \
        v[i] = f < (HIGH) ? f : (HIGH);                                                            \
      }                                                                                            \
      EACH(n) d[i] = (T)(int32_t)v[i];                                                             \
    }                                                                                              \
  }

static inline int whole(double q) { return q >= 1 && q <= 0x1p30 && q == (double)(uint32_t)q; }

/* The reciprocal of a power of two is exact: multiplication by it gives the same result as division, and is faster. */
static inline int power_of_two(double q) { return whole(q) && ((uint32_t)q & ((uint32_t)q - 1)) == 0; }

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

SCALE_INTEGER(u8, float, 0x1p-20, 0, UINT8_MAX)
SCALE_INTEGER(i8, float, 0x1p-20, INT8_MIN, INT8_MAX)
SCALE_INTEGER(i16, float, 0x1p-20, INT16_MIN, INT16_MAX)
SCALE_INTEGER(i32, double, 0x1p-40, INT32_MIN, INT32_MAX)
SCALE_FLOAT(f32, float)
SCALE_FLOAT(f64, double)

/* Here only AVX-512 has vectors for the conversions, and 2^63 - 1 is no double. */
TARGET static void scale_i64(void *dst, const void *src, size_t n, double mul, double div) {
  i64 *d = dst;
  const i64 *x = src;
  EACH(n) {
    double v = (double)x[i] * mul / div;
    d[i] = v != v ? 0 : v <= -0x1p63 ? INT64_MIN : v >= 0x1p63 ? INT64_MAX : (int64_t)v;
  }
}

/* bfloat16 is the upper half of a float32. */
TARGET static void widen_bfloat16(void *dst, const void *src, size_t n) {
  u32 *d = dst;
  const u16 *x = src;
  EACH(n) d[i] = (uint32_t)x[i] << 16;
}

/* To the nearest, ties to even; a NaN becomes quiet. */
TARGET static void narrow_bfloat16(void *dst, const void *src, size_t n) {
  u16 *d = dst;
  const u32 *x = src;
  EACH(n) {
    uint32_t u = x[i], nearest = u + 0x7fff + (u >> 16 & 1), quiet = u | 0x400000;
    d[i] = (uint16_t)(((int32_t)(u & 0x7fffffff) > 0x7f800000 ? quiet : nearest) >> 16);
  }
}

union bits {
  uint32_t u;
  float f;
};

/* Without a branch, behind which the compiler would hide what has no place in a vector then. */
static inline uint32_t either(int condition, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & -(uint32_t)condition); }

/* Subnormals of float16 are the difference to a number whose last place is theirs: exact, or rounded as they are. */
static inline uint32_t half_bits(uint32_t h) {
  int32_t magnitude = (int32_t)(h & 0x7fff) << 13;
  union bits subnormal = {(uint32_t)magnitude + 0x38800000};
  subnormal.f -= 0x1p-14f;
  uint32_t offset = either(magnitude >= 31 << 23, 224 << 23, 112 << 23); /* infinity and NaN keep their exponent */
  uint32_t quiet = -(uint32_t)(magnitude > 31 << 23) & 0x400000;
  uint32_t wide = either(magnitude < 1 << 23, subnormal.u, ((uint32_t)magnitude + offset) | quiet);
  return (h & 0x8000) << 16 | wide;
}

static inline uint16_t half_nearest(uint32_t u) {
  uint32_t sign = u >> 16 & 0x8000;
  int32_t magnitude = (int32_t)(u & 0x7fffffff);
  uint32_t normal = ((uint32_t)magnitude - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
  uint32_t quiet = 0x7e00 | (u >> 13 & 0x3ff);
  union bits subnormal = {(uint32_t)magnitude};
  subnormal.f += 0.5f;
  uint32_t finite = either(magnitude < 0x38800000, subnormal.u - 0x3f000000, normal);
  uint32_t infinite = either(magnitude > 0x7f800000, quiet, 0x7c00); /* from 2^16 on */
  return (uint16_t)(sign | either(magnitude >= 0x47800000, infinite, finite));
}

TARGET static void widen_float16(void *dst, const void *src, size_t n) {
  u32 *d = dst;
  const u16 *x = src;
  size_t i = 0;
#ifdef HALF_LANES
  for (; i + HALF_LANES <= n; i += HALF_LANES) half_load((float *)(d + i), x + i);
#endif
  INDEPENDENT for (; i < n; i++) d[i] = half_bits(x[i]);
}

TARGET static void narrow_float16(void *dst, const void *src, size_t n) {
  u16 *d = dst;
  const u32 *x = src;
  size_t i = 0;
#ifdef HALF_LANES
  for (; i + HALF_LANES <= n; i += HALF_LANES) half_store(d + i, (const float *)(x + i));
#endif
  INDEPENDENT for (; i < n; i++) d[i] = half_nearest(x[i]);
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
