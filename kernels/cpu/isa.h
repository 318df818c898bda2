// The kernels of one instruction set, compiled once per set (isa_*.cpp) and chosen at run time (isa.cpp).
#pragma once
#include <cstdint>

#include "segment.h"

namespace kvzap {

using AttendFn = void (*)(const Segment&);
using ReadFn = float (*)(const Segment&);
// out [m, n] = x [m, k] * w [n, k]^T
using LinearFn = void (*)(const float* x, int64_t m, const uint16_t* w, int64_t n, int64_t k, float* out);

// `read` only touches the rows: the bound that the benchmark compares with.
struct Kernels {
  AttendFn attend_f32;
  AttendFn attend_bf16;
  ReadFn read_f32;
  ReadFn read_bf16;
  LinearFn linear_bf16;
};

Kernels kernels_generic();
#if defined(__x86_64__)
Kernels kernels_avx2();
Kernels kernels_avx512();
#endif

int best_isa();                      // of this host: 0 generic, 1 AVX2, 2 AVX-512
Kernels kernels_of_level(int isa);

}  // namespace kvzap
