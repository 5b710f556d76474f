/*
 * Elias' gamma code of a block, a part of kernels.h. The codes are in bit planes (the sign, then the magnitude's bits
 * from the lowest), so a word has one bit of each of 64 codes: one step of writing gathers bits of a word, one step of
 * reading scatters them. reference.go defines the place of each bit.
 */

#ifdef HAS_BMI2
/* Without vectors: gcc would keep words in the mask registers of AVX-512, which is slow. */
#define BITS_TARGET __attribute__((target("bmi,bmi2,popcnt")))

BITS_TARGET static inline uint64_t gather(uint64_t x, uint64_t mask) { return _pext_u64(x, mask); }

BITS_TARGET static inline uint64_t scatter(uint64_t x, uint64_t mask) { return _pdep_u64(x, mask); }
#else
#define BITS_TARGET

/* gather moves the bits of x under the mask to the lowest places. In the first step the mask has all bits. */
static inline uint64_t gather(uint64_t x, uint64_t mask) {
  if (mask == UINT64_MAX) return x;
  uint64_t gathered = 0;
  for (uint32_t at = 0; mask; mask &= mask - 1) gathered |= (x >> __builtin_ctzll(mask) & 1) << at++;
  return gathered;
}

/* scatter moves the lowest bits of x to the places under the mask. */
static inline uint64_t scatter(uint64_t x, uint64_t mask) {
  if (mask == UINT64_MAX) return x;
  uint64_t scattered = 0;
  for (; mask; mask &= mask - 1, x >>= 1) scattered |= (mask & -mask) & -(x & 1);
  return scattered;
}
#endif

TARGET static void slice(uint8_t *planes, const uint16_t *codes, size_t n, uint32_t levels, uint32_t bits) {
  uint16_t folded[CODEC_CODES_ROOM];
  const int32_t s = (int32_t)levels;
  EACH(n) {
    int32_t level = (int32_t)codes[i] - s;
    folded[i] = (uint16_t)(level < 0 ? -level * 2 + 1 : level * 2);
  }
  memset(folded + n, 0, 8 * sizeof *folded);
  pack_planes(planes, folded, n, bits);
}

TARGET static void unslice(uint16_t *codes, const uint8_t *planes, size_t n, uint32_t levels, uint32_t bits) {
  const int32_t s = (int32_t)levels;
  unpack_planes(codes, planes, n, bits);
  EACH(n) {
    int32_t level = codes[i] >> 1;
    codes[i] = (uint16_t)(s + (codes[i] & 1 ? -level : level));
  }
}

/* A word of a plane that has m bytes left. */
BITS_TARGET static inline uint64_t load_word(const uint8_t *plane, size_t m) {
  uint64_t word = 0;
  if (m >= 8) memcpy(&word, plane, 8);
  else memcpy(&word, plane, m);
  return word;
}

BITS_TARGET static inline void store_word(uint8_t *plane, uint64_t word, size_t m) {
  if (m >= 8) memcpy(plane, &word, 8);
  else memcpy(plane, &word, m);
}

/* The mask of the codes in such a word. */
static inline uint64_t whole(size_t m) { return m >= 8 ? UINT64_MAX : ((uint64_t)1 << 8 * m) - 1; }

/* Whole words at out, and `fill` bits of the next word. */
struct bit_writer {
  uint8_t *out;
  uint64_t held;
  uint32_t fill;
};

/* put writes the bits of x under the mask. It always writes a word, also one that is not full, which saves a branch. */
BITS_TARGET static inline void put(struct bit_writer *w, uint64_t x, uint64_t mask) {
  x = gather(x, mask);
  uint64_t low = w->held | x << w->fill, high = x >> 1 >> (63 - w->fill);
  memcpy(w->out, &low, 8);
  w->fill += (uint32_t)__builtin_popcountll(mask);
  w->out += w->fill / 64 * 8;
  w->held = w->fill < 64 ? low : high;
  w->fill %= 64;
}

BITS_TARGET static size_t elias_pack(uint8_t *out, size_t packed, const uint8_t *planes, size_t n, uint32_t bits) {
  size_t stride = (n + 7) / 8;
  struct bit_writer w = {out, 0, 0};
  for (size_t i = 0; i < stride; i += 8) {
    size_t m = stride - i;
    uint64_t active = whole(m), carry = active;
    uint64_t v[CODEC_MAX_BITS], above[CODEC_MAX_BITS]; /* magnitude + 1; the codes with a bit above this one */
    for (uint32_t j = 1; j < bits; j++) {
      uint64_t word = load_word(planes + j * stride + i, m);
      v[j - 1] = word ^ carry;
      carry &= word;
    }
    v[bits - 1] = carry;
    above[bits - 1] = 0;
    for (uint32_t j = bits - 1; j > 0; j--) above[j - 1] = above[j] | v[j];
    for (uint32_t j = 0; active; active = above[j++]) {
      put(&w, ~above[j], active);
      put(&w, v[j], above[j]);
    }
    put(&w, load_word(planes + i, m), above[0]);
    if ((size_t)(w.out - out) >= packed) return 0;
  }
  memcpy(w.out, &w.held, 8);
  size_t length = (size_t)(w.out - out) + (w.fill + 7) / 8;
  return length < packed ? length : 0;
}

struct bit_reader {
  const uint8_t *in;
  size_t at; /* bits */
};

/* take reads as many bits as the mask has, and moves them to its places. */
BITS_TARGET static inline uint64_t take(struct bit_reader *r, uint64_t mask) {
  const uint8_t *from = r->in + r->at / 8;
  uint64_t word, shift = r->at % 8;
  memcpy(&word, from, 8);
  word = word >> shift | (uint64_t)from[8] << 1 << (63 - shift);
  r->at += (size_t)__builtin_popcountll(mask);
  return scatter(word, mask);
}

BITS_TARGET static int elias_unpack(uint8_t *planes, const uint8_t *in, size_t len, size_t n, uint32_t levels,
                                    uint32_t bits) {
  size_t stride = (n + 7) / 8;
  struct bit_reader r = {in, 0};
  for (size_t i = 0; i < stride; i += 8) {
    size_t m = stride - i;
    uint64_t active = whole(m), borrow = active, nonzero = 0, v[CODEC_MAX_BITS];
    uint32_t width = 0; /* of the widest v */
    for (; active; width++) {
      if (width == bits || r.at > 8 * len) return 0;
      uint64_t ends = take(&r, active);
      active &= ~ends;
      v[width] = ends | take(&r, active);
      if (width == 0) nonzero = active;
    }
    uint64_t negative = take(&r, nonzero);
    if (!planes && width + 2 <= bits) continue; /* v < 2^width ≤ levels */

    uint64_t beyond = 0;
    if (planes) store_word(planes + i, negative, m);
    for (uint32_t j = 0; j < bits; j++) {
      uint64_t bit = j < width ? v[j] : 0, word = bit ^ borrow, most = -(uint64_t)(levels >> j & 1);
      borrow &= ~bit;
      beyond = (word & ~most) | (beyond & ~(word ^ most));
      if (planes && j + 1 < bits) store_word(planes + (j + 1) * stride + i, word, m);
    }
    if (beyond) return 0;
  }
  return (r.at + 7) / 8 == len && (r.at % 8 == 0 || in[len - 1] >> r.at % 8 == 0);
}
