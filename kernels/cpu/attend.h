// Attention of one Segment with an online softmax over blocks of kBlock keys, written once for every vector type.
// Nothing here may be an inline function of external linkage that does not depend on Vec: the linker keeps one copy of
// such a function, and it could be the one compiled for an instruction set that the host lacks.
#pragma once
#include <cmath>
#include <limits>

#include "segment.h"

namespace kvzap {

template <class Vec, class T>
struct Attend {
  using reg = typename Vec::reg;

  static void prefetch(const T* row, int dim) {
    const char* p = reinterpret_cast<const char*>(row);
    for (int o = 0; o < dim * int(sizeof(T)); o += 128) {
      __builtin_prefetch(p + o, 0, 3);
      __builtin_prefetch(p + o + 64, 0, 3);
    }
  }

  // Cephes expf for x <= 0. Below -87.3 the result is about 1e-38 instead of 0: never visible beside the block's own 1.
  static reg exp(reg x) {
    x = Vec::max(Vec::set1(-87.3f), x);  // this order lets a NaN through
    const reg n = Vec::round(Vec::mul(x, Vec::set1(1.44269504f)));
    reg r = Vec::fma(n, Vec::set1(-0.693359375f), x);
    r = Vec::fma(n, Vec::set1(2.12194440e-4f), r);
    reg p = Vec::fma(Vec::set1(1.9875691500e-4f), r, Vec::set1(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec::set1(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec::set1(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec::set1(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec::set1(5.0000001201e-1f));
    p = Vec::fma(p, Vec::mul(r, r), Vec::add(r, Vec::set1(1.f)));
    return Vec::mul(p, Vec::pow2(n));
  }

  // scores[g][t] of G queries and `n` keys, four keys at a time so that their reductions share their shuffles.
  template <int G>
  static void dot(const Segment& s, const float* q, const int32_t* cells, int n, bool fetch_v, float* scores) {
    const T* k = static_cast<const T*>(s.k);
    const T* v = static_cast<const T*>(s.v);
    for (int t = 0; t < n; t += 4) {
      const T* row[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t cell = cells[t + i < n ? t + i : n - 1];
        row[i] = k + cell * s.k_stride;
        if (fetch_v) prefetch(v + cell * s.v_stride, s.dim);
      }
      reg sum[G][4];
      for (int g = 0; g < G; ++g)
        for (int i = 0; i < 4; ++i) sum[g][i] = Vec::zero();
      for (int d = 0; d < s.dim; d += Vec::width) {
        reg query[G];
        for (int g = 0; g < G; ++g) query[g] = Vec::load(q + g * s.dim + d);
        for (int i = 0; i < 4; ++i) {
          const reg key = Vec::load(row[i] + d);
          for (int g = 0; g < G; ++g) sum[g][i] = Vec::fma(query[g], key, sum[g][i]);
        }
      }
      for (int g = 0; g < G; ++g)
        Vec::sum4(sum[g][0], sum[g][1], sum[g][2], sum[g][3], scores + g * kBlock + t);
    }
  }

  // acc[g][d:d+J*width] += sum over t of weights[g][t] * v[t][d:d+J*width]
  template <int G, int J>
  static void add_columns(const Segment& s, const float* weights, const int32_t* cells, int n,
                          const int32_t* next, int n_next, int d, float* acc) {
    const T* k = static_cast<const T*>(s.k);
    const T* v = static_cast<const T*>(s.v) + d;
    reg sum[G][J];
    for (int g = 0; g < G; ++g)
      for (int j = 0; j < J; ++j) sum[g][j] = Vec::load(acc + g * s.dim + d + j * Vec::width);
    for (int t = 0; t < n; ++t) {
      if (t < n_next) prefetch(k + int64_t(next[t]) * s.k_stride, s.dim);
      const T* row = v + int64_t(cells[t]) * s.v_stride;
      reg weight[G];
      for (int g = 0; g < G; ++g) weight[g] = Vec::set1(weights[g * kBlock + t]);
      for (int j = 0; j < J; ++j) {
        const reg value = Vec::load(row + j * Vec::width);
        for (int g = 0; g < G; ++g) sum[g][j] = Vec::fma(weight[g], value, sum[g][j]);
      }
    }
    for (int g = 0; g < G; ++g)
      for (int j = 0; j < J; ++j) Vec::store(acc + g * s.dim + d + j * Vec::width, sum[g][j]);
  }

  template <int G>
  static void add_values(const Segment& s, const float* weights, const int32_t* cells, int n,
                         const int32_t* next, int n_next, float* acc) {
    constexpr int wide = 4;
    int d = 0;
    for (; d + wide * Vec::width <= s.dim; d += wide * Vec::width) {
      add_columns<G, wide>(s, weights, cells, n, next, n_next, d, acc);
      n_next = 0;
    }
    for (; d < s.dim; d += Vec::width) {
      add_columns<G, 1>(s, weights, cells, n, next, n_next, d, acc);
      n_next = 0;
    }
  }

  // Turns one query's scores of a block into weights relative to the new peak and rescales what it has so far.
  // Not inlined: copies of it would be a quarter of the build time.
  __attribute__((noinline)) static void soften(float* scores, int n, int dim, float* acc, float* peak, float* mass) {
    for (int t = n; t < kBlock; ++t) scores[t] = -std::numeric_limits<float>::infinity();
    alignas(64) float lanes[Vec::width];
    reg top = Vec::load(scores);
    for (int t = Vec::width; t < kBlock; t += Vec::width) top = Vec::max(top, Vec::load(scores + t));
    Vec::store(lanes, top);
    float now = *peak;
    for (float x : lanes) now = now > x ? now : x;
    const reg minus = Vec::set1(-now);
    reg sum = Vec::zero();
    for (int t = 0; t < kBlock; t += Vec::width) {
      const reg weight = exp(Vec::add(Vec::load(scores + t), minus));
      Vec::store(scores + t, weight);
      sum = Vec::add(sum, weight);
    }
    Vec::store(lanes, sum);
    float block_mass = 0.f;
    for (float x : lanes) block_mass += x;
    const float fade = expf(*peak - now);
    if (fade != 1.f)
      for (int d = 0; d < dim; d += Vec::width)
        Vec::store(acc + d, Vec::mul(Vec::load(acc + d), Vec::set1(fade)));
    *mass = *mass * fade + block_mass;
    *peak = now;
  }

  template <int G>
  static void block(const Segment& s, int g, const float* q, const int32_t* cells, int n, const int32_t* next,
                    int n_next, float* scores) {
    dot<G>(s, q + g * s.dim, cells, n, g == 0, scores);
    for (int i = 0; i < G; ++i)
      soften(scores + i * kBlock, n, s.dim, s.acc + (g + i) * s.dim, s.peak + g + i, s.mass + g + i);
    add_values<G>(s, scores, cells, n, next, g + G == s.group ? n_next : 0, s.acc + g * s.dim);
  }

  template <int G>
  static void block_of(int size, const Segment& s, int g, const float* q, const int32_t* cells, int n,
                       const int32_t* next, int n_next, float* scores) {
    if constexpr (G > 1)
      if (size < G) return block_of<G - 1>(size, s, g, q, cells, n, next, n_next, scores);
    block<G>(s, g, q, cells, n, next, n_next, scores);
  }

  static void start(const Segment& s, float* q) {
    const T* from = static_cast<const T*>(s.q);
    const reg scale = Vec::set1(s.scale);
    for (int i = 0; i < s.group * s.dim; i += Vec::width) {
      Vec::store(q + i, Vec::mul(Vec::load(from + i), scale));
      Vec::store(s.acc + i, Vec::zero());
    }
    for (int g = 0; g < s.group; ++g) {
      s.peak[g] = -std::numeric_limits<float>::infinity();
      s.mass[g] = 0.f;
    }
  }

  static void attend(const Segment& s) {
    float* q = s.scratch;
    float* scores = q + s.group * s.dim;
    start(s, q);
    const int parts = (s.group + Vec::max_group - 1) / Vec::max_group;
    const T* k = static_cast<const T*>(s.k);
    for (int64_t t = 0; t < s.n && t < kBlock; ++t) prefetch(k + int64_t(s.cells[t]) * s.k_stride, s.dim);
    for (int64_t t = 0; t < s.n; t += kBlock) {
      const int n = int(s.n - t < kBlock ? s.n - t : kBlock);
      const int64_t left = s.n - t - n;
      const int n_next = int(left < kBlock ? left : kBlock);
      for (int part = 0, g = 0; part < parts; ++part) {
        const int size = (s.group - g + parts - part - 1) / (parts - part);
        block_of<Vec::max_group>(size, s, g, q, s.cells + t, n, s.cells + t + n, n_next, scores);
        g += size;
      }
    }
  }

  static float read(const Segment& s) {
    constexpr int ahead = 24;
    reg sum[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    const T* k = static_cast<const T*>(s.k);
    const T* v = static_cast<const T*>(s.v);
    for (int64_t t = 0; t < s.n; ++t) {
      if (t + ahead < s.n) {
        prefetch(k + int64_t(s.cells[t + ahead]) * s.k_stride, s.dim);
        prefetch(v + int64_t(s.cells[t + ahead]) * s.v_stride, s.dim);
      }
      const T* k_row = k + int64_t(s.cells[t]) * s.k_stride;
      const T* v_row = v + int64_t(s.cells[t]) * s.v_stride;
      for (int d = 0; d < s.dim; d += 2 * Vec::width)
        for (int j = 0; j < 2 && d + j * Vec::width < s.dim; ++j) {
          sum[2 * j] = Vec::add(sum[2 * j], Vec::load(k_row + d + j * Vec::width));
          sum[2 * j + 1] = Vec::add(sum[2 * j + 1], Vec::load(v_row + d + j * Vec::width));
        }
    }
    float lanes[Vec::width], total = 0.f;
    Vec::store(lanes, Vec::add(Vec::add(sum[0], sum[1]), Vec::add(sum[2], sum[3])));
    for (float x : lanes) total += x;
    return total;
  }
};

}  // namespace kvzap
