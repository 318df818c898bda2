// The interface between the driver (ragged.cpp) and the attention of one piece of a segment (attend.h, one object per ISA).
#pragma once
#include <cstdint>

namespace kvzap {

constexpr int kBlock = 32;  // keys per softmax block: with D = 128 in fp32 their K rows and V rows are 16 KiB each

// Some consecutive visible cells of one (request, KV head), and where their unnormalised attention goes.
struct Segment {
  const void* q;         // [group, dim], contiguous
  const void* k;         // rows of `dim` elements, `k_stride` elements apart
  const void* v;
  int64_t k_stride;
  int64_t v_stride;
  const int32_t* cells;  // [n]
  int64_t n;             // >= 1
  int group;
  int dim;               // a multiple of 16
  float scale;
  float* acc;            // out [group, dim]: sum over keys of exp(score - peak) * v
  float* peak;           // out [group]: largest score
  float* mass;           // out [group]: sum over keys of exp(score - peak)
  float* scratch;        // group * (dim + kBlock) floats
};

using AttendFn = void (*)(const Segment&);
using ReadFn = float (*)(const Segment&);

// One instruction set's kernels. `read` only touches the rows: the bound that the benchmark compares with.
struct Kernels {
  AttendFn attend_f32;
  AttendFn attend_bf16;
  ReadFn read_f32;
  ReadFn read_bf16;
};

Kernels kernels_generic();
#if defined(__x86_64__)
Kernels kernels_avx2();
Kernels kernels_avx512();
#endif

}  // namespace kvzap
