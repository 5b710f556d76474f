/* Kernels for machines with AVX-512 F, BW, DQ and VL. */
#include <immintrin.h>

#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define HALF_LANES 16

TARGET static inline void half_load(float *d, const void *x) {
  _mm512_storeu_ps(d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)));
}

TARGET static inline void half_store(void *d, const float *x) {
  _mm256_storeu_si256((__m256i *)d, _mm512_cvtps_ph(_mm512_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}

#include "kernels.h"
