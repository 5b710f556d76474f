/*
 * Kernels in plain C loops, which the compiler turns into vectors of one instruction set. Each file
 * that includes this names the set: LEVEL, the suffix of its table, and TARGET, the function attribute
 * that allows it. reference.go defines the result of every kernel, bit for bit.
 */
#include "codec.h"

/* A product must not be fused into a sum, which would round once instead of twice. The pragma is for clang; gcc
 * fuses only in its GNU dialects, and the build uses -std=c11. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define EACH(n) INDEPENDENT for (size_t i = 0; i < (n); i++)

typedef codec_float f32;
typedef codec_u16 u16;
typedef codec_u32 u32;

/* 16-bit floats: rounded to the nearest, ties to even; a NaN stays a NaN. */
TARGET static void widen_bfloat16(f32 *d, const u16 *x, size_t n) {
  u32 *bits = (u32 *)d;
  EACH(n) bits[i] = (uint32_t)x[i] << 16;
}

TARGET static void narrow_bfloat16(u16 *d, const f32 *x, size_t n) {
  const u32 *bits = (const u32 *)x;
  EACH(n) {
    uint32_t u = bits[i];
    uint32_t nearest = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    uint32_t quiet = u >> 16 | 0x40;
    d[i] = (u & MAGNITUDE) > INFINITE ? quiet : nearest;
  }
}

static inline float half_value(uint32_t h) {
  uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return float_of(sign | INFINITE | mantissa << 13 | (mantissa ? 0x400000 : 0));
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  return float_of(sign | bits_of((float)mantissa * 0x1p-24f)); /* zero and subnormal: exact */
}

static inline uint16_t half_nearest(uint32_t u) {
  uint32_t sign = u >> 16 & 0x8000;
  u &= MAGNITUDE;
  if (u > INFINITE) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff)); /* NaN, made quiet */
  if (u >= 0x47800000) return (uint16_t)(sign | 0x7c00);                  /* 2^16 and more */
  if (u >= 0x38800000) return (uint16_t)(sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
  return (uint16_t)(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000)); /* in units of 0.5f's last place, 2^-24 */
}

TARGET static void widen_float16(f32 *d, const u16 *x, size_t n) {
  size_t i = 0;
#ifdef HALF_LANES
  for (; i + HALF_LANES <= n; i += HALF_LANES) half_load(d + i, x + i);
#endif
  for (; i < n; i++) d[i] = half_value(x[i]);
}

TARGET static void narrow_float16(u16 *d, const f32 *x, size_t n) {
  size_t i = 0;
#ifdef HALF_LANES
  for (; i + HALF_LANES <= n; i += HALF_LANES) half_store(d + i, x + i);
#endif
  for (; i < n; i++) d[i] = half_nearest(bits_of(x[i]));
}

/* Residuals. Where a sent value is not finite the residual is 0; otherwise it would never be finite again. */
TARGET static void feed(f32 *r, const f32 *x, size_t n) { EACH(n) r[i] = r[i] + x[i]; }

TARGET static void leave(f32 *r, const f32 *sent, size_t n) {
  EACH(n) {
    float rest = r[i] - sent[i];
    r[i] = (bits_of(rest) & MAGNITUDE) < INFINITE ? rest : 0;
  }
}

TARGET static void momentum(f32 *v, f32 *u, const f32 *x, size_t n, float m) {
  EACH(n) {
    float moved = m * u[i] + x[i];
    u[i] = moved;
    v[i] = v[i] + moved;
  }
}

/* Statistics of a block. As bits, NaN is the greatest, then infinity. */
TARGET static uint32_t absmax(const f32 *x, size_t n) {
  const u32 *bits = (const u32 *)x;
  uint32_t most = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t u = bits[i] & MAGNITUDE;
    most = u > most ? u : most;
  }
  return most;
}

/* Eight partial sums, one per index modulo 8, fix the order of additions for every vector width. */
TARGET static void moments(const f32 *x, size_t n, double out[2]) {
  double a[8] = {0}, b[8] = {0};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t k = 0; k < 8; k++) {
      double v = x[i + k];
      a[k] += __builtin_fabs(v);
      b[k] += v * v;
    }
  for (size_t k = 0; i < n; i++, k++) {
    double v = x[i];
    a[k] += __builtin_fabs(v);
    b[k] += v * v;
  }
  out[0] = out[1] = 0;
  for (size_t k = 0; k < 8; k++) {
    out[0] += a[k];
    out[1] += b[k];
  }
}

/* 32 random bits for element i. */
static inline uint32_t draw(uint32_t i, struct codec_keys keys) {
  uint32_t h = (i ^ keys.k0) * 0x9e3779b1u;
  h = (h ^ h >> 16) * 0x7feb352du;
  h = ((h ^ h >> 15) + keys.k1) * 0x846ca68bu;
  return h ^ h >> 16;
}

/* The upper 24 of them as a number in [0, 1). */
static inline float unit(uint32_t h) { return (float)(int32_t)(h >> 8) * 0x1p-24f; }

/* x·inverse, limited to ±levels, is rounded to one of the two integers around it, with the probability that
 * makes the mean exact; code 0 is -levels. */
TARGET static void uniform(uint16_t *codes, const f32 *x, size_t n, float inverse, uint32_t levels,
                           struct codec_keys keys, uint32_t base) {
  const int32_t s = (int32_t)levels;
  const float most = (float)s;
  EACH(n) {
    float y = x[i] * inverse;
    y = y > most ? most : y;
    y = y < -most ? -most : y;
    int32_t t = (int32_t)y;
    t -= (float)t > y;
    codes[i] = (uint16_t)(t + s + (unit(draw(base + (uint32_t)i, keys)) < y - (float)t));
  }
}

/* x·inverse, within ±1, is rounded to one of the two powers of two around it: random bits that are added below the
 * exponent carry into it with the right probability. Below the smallest power it is rounded to that or to 0. */
TARGET static void natural(uint16_t *codes, const f32 *x, size_t n, float inverse, uint32_t levels,
                           struct codec_keys keys, uint32_t base) {
  const int32_t s = (int32_t)levels;
  const uint32_t smallest = (uint32_t)(128 - s) << 23; /* 2^(1-s) */
  const float scale = float_of((uint32_t)(126 + s) << 23); /* 2^(s-1) */
  EACH(n) {
    float y = x[i] * inverse;
    uint32_t u = bits_of(y) & MAGNITUDE, h = draw(base + (uint32_t)i, keys);
    int32_t high = (int32_t)((u + (h >> 9)) >> 23) - 127 + s;
    int32_t low = unit(h) < float_of(u) * scale;
    int32_t beneath = -(int32_t)(u < smallest), negative = (int32_t)bits_of(y) >> 31; /* all bits or none */
    int32_t level = (low & beneath) | (high & ~beneath);
    codes[i] = (uint16_t)(s + ((level ^ negative) - negative));
  }
}

TARGET static void sign(uint16_t *codes, const f32 *x, size_t n) {
  const u32 *bits = (const u32 *)x;
  EACH(n) codes[i] = (uint16_t)(~bits[i] >> 31);
}

TARGET static void uniform_values(f32 *d, const uint16_t *codes, size_t n, float step, uint32_t levels) {
  const int32_t s = (int32_t)levels;
  EACH(n) d[i] = (float)((int32_t)codes[i] - s) * step;
}

TARGET static void natural_values(f32 *d, const uint16_t *codes, size_t n, float scale, uint32_t levels) {
  const int32_t s = (int32_t)levels;
  EACH(n) {
    int32_t code = (int32_t)codes[i] - s;
    int32_t level = code < 0 ? -code : code;
    uint32_t power = (uint32_t)(127 - s + level) << 23; /* 2^(level-s) */
    power = level == 0 ? 0 : power;
    d[i] = float_of(power | (code < 0 ? 0x80000000u : 0)) * scale;
  }
}

TARGET static void sign_values(f32 *d, const uint16_t *codes, size_t n, float scale) {
  EACH(n) d[i] = codes[i] ? scale : -scale;
}

/* Bit planes: bit t of byte i of plane j is bit j of code i + t·stride, where stride is ⌈n/8⌉. So the loops for each
 * width carry nothing from one element to the next. They also read and write the codes from n to the next multiple
 * of eight. */
TARGET static void pack_planes(uint8_t *out, const uint16_t *codes, size_t n, uint32_t bits) {
  size_t stride = (n + 7) / 8;
  for (uint32_t j = 0; j < bits; j++, out += stride) EACH(stride) {
      const uint16_t *c = codes + i;
      uint32_t b = (c[0] >> j & 1) | (c[stride] >> j & 1) << 1 | (c[2 * stride] >> j & 1) << 2 |
                   (c[3 * stride] >> j & 1) << 3 | (c[4 * stride] >> j & 1) << 4 | (c[5 * stride] >> j & 1) << 5 |
                   (c[6 * stride] >> j & 1) << 6 | (c[7 * stride] >> j & 1) << 7;
      out[i] = (uint8_t)b;
    }
}

/* unpack_width reads up to 8 planes; the first is bit `low` of the codes, 0 or 8. */
TARGET static inline __attribute__((always_inline)) void unpack_width(uint16_t *codes, const uint8_t *in, size_t stride,
                                                                      uint32_t bits, uint32_t low) {
  for (uint32_t t = 0; t < 8; t++, codes += stride) EACH(stride) {
      uint8_t c = 0;
      for (uint32_t j = 0; j < bits; j++) c |= in[j * stride + i] & (uint8_t)(1u << t) ? (uint8_t)(1u << j) : 0;
      codes[i] = low ? (uint16_t)(codes[i] | c << 8) : c;
    }
}

TARGET static inline __attribute__((always_inline)) void unpack_upto8(uint16_t *codes, const uint8_t *in, size_t stride,
                                                                      uint32_t bits, uint32_t low) {
  /* a constant unrolls the loop over the planes */
  if (bits == 1) unpack_width(codes, in, stride, 1, low);
  else if (bits == 2) unpack_width(codes, in, stride, 2, low);
  else if (bits == 3) unpack_width(codes, in, stride, 3, low);
  else if (bits == 4) unpack_width(codes, in, stride, 4, low);
  else if (bits == 5) unpack_width(codes, in, stride, 5, low);
  else if (bits == 6) unpack_width(codes, in, stride, 6, low);
  else if (bits == 7) unpack_width(codes, in, stride, 7, low);
  else unpack_width(codes, in, stride, 8, low);
}

TARGET static void unpack_planes(uint16_t *codes, const uint8_t *in, size_t n, uint32_t bits) {
  size_t stride = (n + 7) / 8;
  unpack_upto8(codes, in, stride, bits, 0);
  if (bits > 8) unpack_upto8(codes, in + 8 * stride, stride, bits - 8, 8);
}

/* Packed codes are bit planes; codes of eight bits are bytes in order. */
TARGET static void pack(uint8_t *out, const uint16_t *codes, size_t n, uint32_t bits) {
  if (bits != 8) {
    pack_planes(out, codes, n, bits);
    return;
  }
  EACH(n) out[i] = (uint8_t)codes[i];
}

TARGET static void unpack(uint16_t *codes, const uint8_t *in, size_t n, uint32_t bits) {
  if (bits != 8) {
    unpack_planes(codes, in, n, bits);
    return;
  }
  EACH(n) codes[i] = in[i];
}

#include "elias.h"

/* full reports whether some code in whole bytes of planes has all bits set. */
TARGET static int full(const uint8_t *in, size_t stride, uint32_t bits) {
  uint8_t all[CODEC_MAX_BLOCK / 8], any = 0;
  memcpy(all, in, stride);
  for (uint32_t j = 1; j < bits; j++) {
    const uint8_t *plane = in + j * stride;
    EACH(stride) all[i] &= plane[i];
  }
  for (size_t i = 0; i < stride; i++) any |= all[i];
  return any != 0;
}

TARGET static uint32_t greatest(const uint16_t *codes, size_t n) {
  uint16_t most = 0;
  for (size_t i = 0; i < n; i++) most = codes[i] > most ? codes[i] : most;
  return most;
}

#ifndef HAS_ABOVE
TARGET static uint64_t above(const f32 *x, uint32_t threshold) {
  uint64_t mask = 0;
  for (size_t i = 0; i < 64; i++) mask |= (uint64_t)((bits_of(x[i]) & MAGNITUDE) > threshold) << i;
  return mask;
}
#endif

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)

const struct codec_kernels NAMED(codec_kernels_, LEVEL) = {
    .narrow = {narrow_float16, narrow_bfloat16},
    .widen = {widen_float16, widen_bfloat16},
    .feed = feed,
    .leave = leave,
    .momentum = momentum,
    .absmax = absmax,
    .moments = moments,
    .uniform = uniform,
    .natural = natural,
    .sign = sign,
    .uniform_values = uniform_values,
    .natural_values = natural_values,
    .sign_values = sign_values,
    .pack = pack,
    .unpack = unpack,
    .slice = slice,
    .unslice = unslice,
    .elias_pack = elias_pack,
    .elias_unpack = elias_unpack,
    .full = full,
    .greatest = greatest,
    .above = above,
};
