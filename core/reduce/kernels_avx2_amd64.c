/* Kernels for machines with AVX2 and F16C. */
#include <immintrin.h>

#define LEVEL avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define HALF_LANES 8

TARGET static inline void half_load(float *d, const void *x) {
  _mm256_storeu_ps(d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)));
}

TARGET static inline void half_store(void *d, const float *x) {
  _mm_storeu_si128((__m128i *)d, _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}

#include "kernels.h"
