// Sixteen fp32 lanes. Included only by isa_avx512.cpp, which is compiled with -mavx512f -mavx2 -mfma.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace kvzap {

struct VecAvx512 {
  using reg = __m512;
  static constexpr int width = 16;
  static constexpr int max_group = 5;  // 5 queries x 4 keys are 20 accumulators of the 32 registers

  static reg zero() { return _mm512_setzero_ps(); }
  static reg set1(float x) { return _mm512_set1_ps(x); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static reg load(const uint16_t* p) {  // bf16 is the upper half of an fp32
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store(float* p, reg a) { _mm512_storeu_ps(p, a); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static reg round(reg a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  static reg pow2(reg n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }
  static void sum4(reg a, reg b, reg c, reg d, float* out) {
    const __m256 pair_ab = _mm256_hadd_ps(fold(a), fold(b));
    const __m256 quads = _mm256_hadd_ps(pair_ab, _mm256_hadd_ps(fold(c), fold(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
  }

 private:
  static __m256 fold(reg a) {  // the upper half by an extract of AVX-512F itself, not of AVX-512DQ
    const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(a), 1);
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(upper));
  }
};

}  // namespace kvzap
