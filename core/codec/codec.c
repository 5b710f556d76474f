/* Composes the kernels block by block, so that the tensor is read once from memory. */
#include "codec.h"

#include <float.h>

#ifdef __x86_64__
#include <cpuid.h>
#endif

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

static const struct codec_kernels *kernels(int level) {
#ifdef __x86_64__
  if (level == CODEC_LEVEL_AVX512) return &codec_kernels_avx512;
  if (level == CODEC_LEVEL_AVX2) return &codec_kernels_avx2;
#endif
  (void)level;
  return &codec_kernels_plain;
}

/* blockwise_kernels prefers shorter vectors where the planes of a block are shorter than the longest. */
static const struct codec_kernels *blockwise_kernels(int level, const struct codec_grid *g) {
  return kernels(level == CODEC_LEVEL_AVX512 && g->block < 256 ? CODEC_LEVEL_AVX2 : level);
}

/* On AMD processors before Zen 3, PEXT and PDEP are microcode, and far slower than the loops of the plain kernels. */
static int gathers_slowly;

#ifdef __x86_64__
__attribute__((constructor)) static void find_slow_gathers(void) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid(0, &a, &b, &c, &d);
  int amd = c == signature_AMD_ecx;
  __get_cpuid(1, &a, &b, &c, &d);
  unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
  gathers_slowly = amd && family < 0x19;
}
#endif

static const struct codec_kernels *elias_kernels(const struct codec_kernels *k) {
  return gathers_slowly ? &codec_kernels_plain : k;
}

int codec_has_f16c(void) {
#ifdef __x86_64__
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
#else
  return 0;
#endif
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static double lesser(double a, double b) { return a < b ? a : b; }

#define NOT_A_NUMBER 0x7fc00000u
#define TINY 0x1p-100 /* below it a block is sent as zeros: reciprocals would overflow */

/* norm is the scale of a block, NaN where it holds something that is not finite. */
static double norm(const struct codec_kernels *k, const struct codec_grid *g, const codec_float *x, size_t n) {
  uint32_t most = k->absmax(x, n);
  if (most >= INFINITE) return float_of(NOT_A_NUMBER);
  double peak = float_of(most), m[2];
  if (g->norm == CODEC_NORM_MAX) return peak;
  k->moments(x, n, m);
  double count = (double)n;
  if (g->norm == CODEC_NORM_MEAN) return m[0] / count;
  if (g->norm == CODEC_NORM_L2) return lesser(__builtin_sqrt(m[1]), FLT_MAX);
  return lesser(g->clip * __builtin_sqrt(m[1] / count), peak);
}

/* power rounds up to a power of two; NaN where that is beyond float32. */
static float power(double scale) {
  uint32_t u = bits_of((float)scale);
  u = (u + 0x7fffff) & ~0x7fffffu;
  return u >= INFINITE ? float_of(NOT_A_NUMBER) : float_of(u);
}

/* quantise makes the codes of a block and returns the step that precedes them in the message. */
static float quantise(const struct codec_kernels *k, const struct codec_grid *g, uint16_t *codes, const codec_float *x,
                      size_t n, struct codec_keys keys, uint32_t base) {
  double scale = norm(k, g, x, n);
  float step = (float)scale;
  if (g->kind == CODEC_UNIFORM) {
    step = (float)(scale / g->levels);
    float most = step * (float)g->levels;
    if (bits_of(most) == INFINITE) step = float_of(bits_of(step) - 1); /* it was rounded up */
  }
  if (g->kind == CODEC_NATURAL) step = power(scale);
  if ((bits_of(step) & MAGNITUDE) >= INFINITE) step = float_of(NOT_A_NUMBER);
  if (g->kind == CODEC_SIGN && step == step) {
    k->sign(codes, x, n);
  } else if (!(scale >= TINY) || step != step) {
    for (size_t i = 0; i < n; i++) codes[i] = (uint16_t)g->levels;
    return step != step ? step : 0;
  } else if (g->kind == CODEC_UNIFORM) {
    k->uniform(codes, x, n, (float)(1 / (double)step), g->levels, keys, base);
  } else {
    k->natural(codes, x, n, (float)(1 / (double)step), g->levels, keys, base);
  }
  return step;
}

static void values(const struct codec_kernels *k, const struct codec_grid *g, codec_float *d, const uint16_t *codes,
                   size_t n, float step) {
  if (g->kind == CODEC_UNIFORM) k->uniform_values(d, codes, n, step, g->levels);
  else if (g->kind == CODEC_NATURAL) k->natural_values(d, codes, n, step, g->levels);
  else k->sign_values(d, codes, n, step);
}

static size_t packed_bytes(const struct codec_grid *g, size_t n) { return g->bits == 8 ? n : (n + 7) / 8 * g->bits; }

/* fixed_bytes is the length of a message whose codes are all in bit planes. */
static size_t fixed_bytes(const struct codec_grid *g, size_t n) {
  size_t rest = n % g->block;
  return n / g->block * (4 + packed_bytes(g, g->block)) + (rest ? 4 + packed_bytes(g, rest) : 0);
}

/* A block that is a scale and codes: [float32 step] [uint16 bytes of Elias codes, 0: bit planes] codes. */
static size_t write_block(const struct codec_kernels *k, const struct codec_grid *g, uint8_t *out,
                          const uint16_t *codes, size_t n, float step) {
  size_t packed = packed_bytes(g, n);
  memcpy(out, &step, 4);
  if (!g->elias) {
    k->pack(out + 4, codes, n, g->bits);
    return 4 + packed;
  }
  uint8_t planes[CODEC_PLANES_ROOM], room[CODEC_ELIAS_ROOM];
  k->slice(planes, codes, n, g->levels, g->bits);
  size_t coded = elias_kernels(k)->elias_pack(room, packed, planes, n, g->bits);
  memcpy(out + 6, room, coded);
  uint16_t length = (uint16_t)coded;
  memcpy(out + 4, &length, 2);
  if (coded > 0) return 6 + coded;
  k->pack(out + 6, codes, n, g->bits);
  return 6 + packed;
}

/* read_block returns the number of bytes that it consumed, or 0 and the reason. With `checking` it only checks a block
 * of Elias codes. */
static size_t read_block(const struct codec_kernels *k, const struct codec_grid *g, uint16_t *codes, float *step,
                         const uint8_t *in, size_t len, size_t n, int *why, int checking) {
  size_t head = g->elias ? 6 : 4, packed = packed_bytes(g, n);
  *why = CODEC_BAD_LENGTH;
  if (len < head) return 0;
  memcpy(step, in, 4);
  uint16_t coded = 0;
  if (g->elias) memcpy(&coded, in + 4, 2);
  if (coded > 0) {
    if (coded >= packed || len - head < coded) return 0;
    *why = CODEC_BAD_CODE;
    uint8_t planes[CODEC_PLANES_ROOM], room[CODEC_PLANES_ROOM + CODEC_ELIAS_AHEAD];
    const uint8_t *from = in + head;
    if (len - head - coded < CODEC_ELIAS_AHEAD) {
      from = memcpy(room, from, coded);
      memset(room + coded, 0, CODEC_ELIAS_AHEAD);
    }
    if (!elias_kernels(k)->elias_unpack(checking ? NULL : planes, from, coded, n, g->levels, g->bits)) return 0;
    if (!checking) k->unslice(codes, planes, n, g->levels, g->bits);
    return head + coded;
  }
  if (len - head < packed) return 0;
  k->unpack(codes, in + head, n, g->bits);
  *why = CODEC_BAD_CODE;
  return g->kind == CODEC_SIGN || k->greatest(codes, n) <= 2 * g->levels ? head + packed : 0;
}

/* Where there is a residual, the message of a block is decoded again: the residual is what it lacks. */
size_t codec_encode(int level, struct codec_grid g, uint8_t *dst, const void *src, void *residual, size_t n,
                    struct codec_keys keys) {
  const struct codec_kernels *k = blockwise_kernels(level, &g);
  const codec_float *x = src;
  codec_float *r = residual;
  uint8_t *out = dst;
  uint16_t codes[CODEC_CODES_ROOM];
  float sent[CODEC_MAX_BLOCK];
  for (size_t i = 0; i < n; i += g.block) {
    size_t m = least(g.block, n - i);
    const codec_float *from = x + i;
    if (r) {
      k->feed(r + i, x + i, m);
      from = r + i;
    }
    if (g.kind <= CODEC_BFLOAT16) {
      k->narrow[g.kind]((codec_u16 *)out, from, m);
      if (r) k->widen[g.kind](sent, (const codec_u16 *)out, m);
      out += 2 * m;
    } else {
      float step = quantise(k, &g, codes, from, m, keys, (uint32_t)i);
      memset(codes + m, 0, 8 * sizeof *codes);
      out += write_block(k, &g, out, codes, m, step);
      if (r) values(k, &g, sent, codes, m, step);
    }
    if (r) k->leave(r + i, sent, m);
  }
  return (size_t)(out - dst);
}

/* planes_are_sound checks a block of bit planes whose only wrong code is that of all ones, unread. */
static int planes_are_sound(const struct codec_kernels *k, const struct codec_grid *g, const uint8_t *src, size_t len) {
  size_t packed = packed_bytes(g, g->block);
  return g->kind != CODEC_SIGN && !g->elias && g->bits < 8 && 2 * g->levels + 2 == 1u << g->bits && g->block % 8 == 0 &&
         len >= 4 + packed && !k->full(src + 4, g->block / 8, g->bits);
}

static int check(const struct codec_kernels *k, const struct codec_grid *g, const uint8_t *src, size_t len, size_t n) {
  if (g->kind == CODEC_SIGN) return len == fixed_bytes(g, n) ? 0 : CODEC_BAD_LENGTH;
  uint16_t codes[CODEC_CODES_ROOM];
  float step;
  int why = 0;
  for (size_t i = 0; i < n; i += g->block) {
    size_t took = 4 + packed_bytes(g, g->block);
    if (n - i < g->block || !planes_are_sound(k, g, src, len)) {
      took = read_block(k, g, codes, &step, src, len, least(g->block, n - i), &why, 1);
      if (took == 0) return why;
    }
    src += took;
    len -= took;
  }
  return len == 0 ? 0 : CODEC_BAD_LENGTH;
}

int codec_decode(int level, struct codec_grid g, void *dst, const uint8_t *src, size_t len, size_t n, int add) {
  const struct codec_kernels *k = blockwise_kernels(level, &g);
  codec_float *d = dst;
  uint16_t codes[CODEC_CODES_ROOM];
  float room[CODEC_MAX_BLOCK], step = 0;
  int half = g.kind <= CODEC_BFLOAT16, why = half ? (len == 2 * n ? 0 : CODEC_BAD_LENGTH) : check(k, &g, src, len, n);
  if (why) return why;
  for (size_t i = 0; i < n; i += g.block) {
    size_t m = least(g.block, n - i);
    codec_float *to = add ? room : d + i;
    if (half) {
      k->widen[g.kind](to, (const codec_u16 *)src, m);
      src += 2 * m;
    } else {
      size_t took = read_block(k, &g, codes, &step, src, len, m, &why, 0);
      values(k, &g, to, codes, m, step);
      src += took;
      len -= took;
    }
    if (add) k->feed(d + i, room, m);
  }
  return 0;
}

size_t codec_scan(int level, void *x, const void *src, size_t from, size_t n, uint32_t threshold, uint32_t *index,
                  uint32_t *key, size_t room, size_t *found) {
  const struct codec_kernels *k = kernels(level);
  const size_t chunk = 2048;
  codec_float *v = x;
  size_t at = *found;
  while (from < n) {
    size_t m = least(chunk, n - from);
    if (room - at < m) m = (room - at) / 64 * 64;
    if (m == 0) break;
    if (src) k->feed(v + from, (const codec_float *)src + from, m);
    for (size_t i = from; i < from + m; i += 64) {
      codec_float tail[64] = {0};
      const codec_float *group = v + i;
      if (from + m - i < 64) group = memcpy(tail, v + i, (from + m - i) * sizeof *tail);
      for (uint64_t mask = k->above(group, threshold); mask; mask &= mask - 1) {
        size_t bit = (size_t)__builtin_ctzll(mask);
        index[at] = (uint32_t)(i + bit);
        key[at++] = bits_of(group[bit]) & MAGNITUDE;
      }
    }
    from += m;
  }
  *found = at;
  return from;
}

void codec_momentum(int level, void *v, void *u, const void *src, size_t n, float m) {
  kernels(level)->momentum(v, u, src, n, m);
}

uint32_t codec_feed(int level, void *x, const void *src, size_t n) {
  const struct codec_kernels *k = kernels(level);
  codec_float *v = x;
  uint32_t most = 0;
  for (size_t i = 0; i < n; i += 4096) {
    size_t m = least(4096, n - i);
    if (src) k->feed(v + i, (const codec_float *)src + i, m);
    uint32_t here = k->absmax(v + i, m);
    most = here > most ? here : most;
  }
  return most;
}
