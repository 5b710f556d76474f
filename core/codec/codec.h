/* The functions that Go calls (codec.c), and the tables of kernels under them, one per instruction set (kernels.h). */
#ifndef PACELINE_CORE_CODEC_H
#define PACELINE_CORE_CODEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#pragma GCC visibility push(hidden)

/* The rounding of a block's elements to codes. */
enum { CODEC_FLOAT16, CODEC_BFLOAT16, CODEC_UNIFORM, CODEC_NATURAL, CODEC_SIGN };

/* The definition of a block's scale. */
enum { CODEC_NORM_MAX, CODEC_NORM_L2, CODEC_NORM_MEAN, CODEC_NORM_CLIPPED };

enum {
  CODEC_MAX_BLOCK = 8192,                 /* elements */
  CODEC_CODES_ROOM = CODEC_MAX_BLOCK + 8, /* bit planes have whole groups of eight codes */
  CODEC_MAX_BITS = 16,                    /* of a code */
  CODEC_PLANES_ROOM = CODEC_MAX_BLOCK / 8 * CODEC_MAX_BITS,
  CODEC_ELIAS_ROOM = CODEC_PLANES_ROOM + 64 * 2 * CODEC_MAX_BITS / 8 + 8, /* and room for 64 codes and a word beyond */
  CODEC_ELIAS_AHEAD = 32, /* bytes that may be read behind the codes: three words, before their end is found */
};

/* A grid is the values that a block's elements are rounded to: blockwise.go describes the fields. */
struct codec_grid {
  int kind, norm;
  uint32_t levels, bits, block;
  int elias;
  double clip;
};

/* A source of random numbers: that of element i follows from i and the two keys. */
struct codec_keys {
  uint32_t k0, k1;
};

typedef float codec_float __attribute__((aligned(1), may_alias));
typedef uint16_t codec_u16 __attribute__((aligned(1), may_alias));
typedef uint32_t codec_u32 __attribute__((aligned(1), may_alias));

enum { MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000 }; /* of the bits of a float */

static inline uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

/* Kernels work on one block, which stays in the first-level cache from one kernel to the next. */
struct codec_kernels {
  void (*narrow[2])(codec_u16 *d, const codec_float *x, size_t n);
  void (*widen[2])(codec_float *d, const codec_u16 *x, size_t n);
  void (*feed)(codec_float *r, const codec_float *x, size_t n); /* r += x */
  void (*leave)(codec_float *r, const codec_float *sent, size_t n); /* r -= sent */
  void (*momentum)(codec_float *v, codec_float *u, const codec_float *x, size_t n, float m); /* u = m·u + x, v += u */
  uint32_t (*absmax)(const codec_float *x, size_t n); /* as bits */
  void (*moments)(const codec_float *x, size_t n, double out[2]); /* Σ|x|, Σx² */
  void (*uniform)(uint16_t *codes, const codec_float *x, size_t n, float inverse, uint32_t levels,
                  struct codec_keys keys, uint32_t base);
  void (*natural)(uint16_t *codes, const codec_float *x, size_t n, float inverse, uint32_t levels,
                  struct codec_keys keys, uint32_t base);
  void (*sign)(uint16_t *codes, const codec_float *x, size_t n);
  void (*uniform_values)(codec_float *d, const uint16_t *codes, size_t n, float step, uint32_t levels);
  void (*natural_values)(codec_float *d, const uint16_t *codes, size_t n, float scale, uint32_t levels);
  void (*sign_values)(codec_float *d, const uint16_t *codes, size_t n, float scale);
  void (*pack)(uint8_t *out, const uint16_t *codes, size_t n, uint32_t bits);
  void (*unpack)(uint16_t *codes, const uint8_t *in, size_t n, uint32_t bits);

  /* Codes as bit planes: the sign first, then the magnitude. */
  void (*slice)(uint8_t *planes, const uint16_t *codes, size_t n, uint32_t levels, uint32_t bits);
  void (*unslice)(uint16_t *codes, const uint8_t *planes, size_t n, uint32_t levels, uint32_t bits);
  /* Elias codes of such planes: their bytes, or 0 where those are not fewer than the packed codes'. out has
   * CODEC_ELIAS_ROOM. */
  size_t (*elias_pack)(uint8_t *out, size_t packed, const uint8_t *planes, size_t n, uint32_t bits);
  /* Whether exactly len bytes, behind which CODEC_ELIAS_AHEAD more can be read, are the codes of n elements up to
   * the levels. Writes the planes where they are not NULL. */
  int (*elias_unpack)(uint8_t *planes, const uint8_t *in, size_t len, size_t n, uint32_t levels, uint32_t bits);

  int (*full)(const uint8_t *in, size_t stride, uint32_t bits);
  uint32_t (*greatest)(const uint16_t *codes, size_t n);
  uint64_t (*above)(const codec_float *x, uint32_t threshold); /* a bit for each of 64 elements */
};

extern const struct codec_kernels codec_kernels_plain, codec_kernels_avx2, codec_kernels_avx512;

/* Instruction sets, in rising order. The caller asks only for those that the machine has. */
enum { CODEC_LEVEL_PLAIN, CODEC_LEVEL_AVX2, CODEC_LEVEL_AVX512 };

/* Encodes n elements. A residual that is not NULL is added first, and then holds what the message lacks. Returns the
 * number of bytes written; dst has room for blockwise.go's bound. */
size_t codec_encode(int level, struct codec_grid g, uint8_t *dst, const void *src, void *residual, size_t n,
                    struct codec_keys keys);

/* Decodes len bytes into n elements, or adds them to dst. Returns 0, or one of the reasons below; dst is then
 * unchanged. */
int codec_decode(int level, struct codec_grid g, void *dst, const uint8_t *src, size_t len, size_t n, int add);
enum { CODEC_BAD_LENGTH = 1, CODEC_BAD_CODE };

/* Adds src to x where it is not NULL, and lists the elements from `from` on whose magnitude, as bits, exceeds the
 * threshold: their indices and those bits. Stops at n, or where the lists, which have room for at least 64, might not
 * hold the next 64 elements. Returns the index at which it stopped. */
size_t codec_scan(int level, void *x, const void *src, size_t from, size_t n, uint32_t threshold, uint32_t *index,
                  uint32_t *key, size_t room, size_t *found);

void codec_momentum(int level, void *v, void *u, const void *src, size_t n, float m);

/* Adds src to x where it is not NULL. Returns the greatest magnitude in x, as bits. */
uint32_t codec_feed(int level, void *x, const void *src, size_t n);

/* Whether the machine converts float16 in hardware, as the levels above plain need. */
int codec_has_f16c(void);

#pragma GCC visibility pop

#endif
