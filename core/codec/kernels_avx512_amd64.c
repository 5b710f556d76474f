/* Kernels for machines with AVX-512 F, BW, DQ and VL. */
#include <immintrin.h>

#include "codec.h"

#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define HALF_LANES 16
#define HAS_ABOVE
#define HAS_BMI2

TARGET static inline void half_load(void *d, const void *x) {
  _mm512_storeu_ps(d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)));
}

TARGET static inline void half_store(void *d, const void *x) {
  _mm256_storeu_si256((__m256i *)d, _mm512_cvtps_ph(_mm512_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}

TARGET static uint64_t above(const codec_float *x, uint32_t threshold) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32((int)threshold);
  uint64_t mask = 0;
  for (int i = 0; i < 4; i++) {
    __m512i u = _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), magnitude);
    mask |= (uint64_t)_mm512_cmpgt_epi32_mask(u, least) << 16 * i;
  }
  return mask;
}

#include "kernels.h"
