// Four fp32 lanes in the compiler's own vector type: SSE2 on x86-64, NEON on aarch64.
#pragma once
#include <cstdint>
#include <cstring>

namespace kvzap {

struct VecGeneric {
  typedef float reg __attribute__((vector_size(16)));
  typedef int32_t ints __attribute__((vector_size(16)));
  static constexpr int width = 4;
  static constexpr int max_group = 3;

  static reg zero() { return reg{0.f, 0.f, 0.f, 0.f}; }
  static reg set1(float x) { return reg{x, x, x, x}; }
  static reg load(const float* p) {
    reg a;
    memcpy(&a, p, sizeof(a));
    return a;
  }
  static reg load(const uint16_t* p) {  // bf16 is the upper half of an fp32
    const ints bits = {int32_t(uint32_t(p[0]) << 16), int32_t(uint32_t(p[1]) << 16),
                       int32_t(uint32_t(p[2]) << 16), int32_t(uint32_t(p[3]) << 16)};
    return reinterpret_cast<reg>(bits);
  }
  static void store(float* p, reg a) { memcpy(p, &a, sizeof(a)); }
  static reg add(reg a, reg b) { return a + b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static reg max(reg a, reg b) { return a > b ? a : b; }  // b where either is NaN
  static reg round(reg a) {  // adding 1.5 * 2^23 leaves no fraction bits; exact for |a| < 2^22
    const reg shift = set1(12582912.f);
    return (a + shift) - shift;
  }
  static reg pow2(reg n) { return reinterpret_cast<reg>((__builtin_convertvector(n, ints) + 127) << 23); }
  static void sum4(reg a, reg b, reg c, reg d, float* out) {
    out[0] = (a[0] + a[1]) + (a[2] + a[3]);
    out[1] = (b[0] + b[1]) + (b[2] + b[3]);
    out[2] = (c[0] + c[1]) + (c[2] + c[3]);
    out[3] = (d[0] + d[1]) + (d[2] + d[3]);
  }
};

}  // namespace kvzap
