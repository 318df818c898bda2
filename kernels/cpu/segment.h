// What the driver of decode attention (ragged.cpp) asks of attend.h.
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

}  // namespace kvzap
