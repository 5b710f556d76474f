/* Kernels for machines with AVX2 and F16C. */
#include <immintrin.h>

#include "codec.h"

#define LEVEL avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define HALF_LANES 8
#define HAS_ABOVE
#define HAS_BMI2

TARGET static inline void half_load(void *d, const void *x) {
  _mm256_storeu_ps(d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)));
}

TARGET static inline void half_store(void *d, const void *x) {
  _mm_storeu_si128((__m128i *)d, _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}

TARGET static uint64_t above(const codec_float *x, uint32_t threshold) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), least = _mm256_set1_epi32((int)threshold);
  uint64_t mask = 0;
  for (int i = 0; i < 8; i++) {
    __m256i u = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 8 * i)), magnitude);
    mask |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(u, least))) << 8 * i;
  }
  return mask;
}

#include "kernels.h"
