// Products of a few input rows with many weight rows, written once for every vector type (see attend.h on linkage).
#pragma once
#include <cstdint>

#include "bf16.h"

namespace kvzap {

template <class Vec>
struct Linear {
  using reg = typename Vec::reg;

  static constexpr int64_t kLine = 32;  // weights in a cache line

  // G input rows times four weight rows: every weight is read and widened once for G rows. `fetch`: also ask for the
  // four rows after these, which the next block reads.
  template <int G>
  static void block(const float* x, const uint16_t* const (&w)[4], int64_t k, int64_t n, int64_t cols, bool fetch,
                    float* out) {
    reg sum[G][4];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < 4; ++i) sum[g][i] = Vec::zero();
    const int64_t whole = k - k % Vec::width;
    for (int64_t d = 0; d < whole; d += Vec::width) {
      if (fetch && d % kLine == 0)
        for (int i = 0; i < 4; ++i) __builtin_prefetch(w[i] + 4 * k + d, 0, 3);
      reg input[G];
      for (int g = 0; g < G; ++g) input[g] = Vec::load(x + g * k + d);
      for (int i = 0; i < 4; ++i) {
        const reg weight = Vec::load(w[i] + d);
        for (int g = 0; g < G; ++g) sum[g][i] = Vec::fma(input[g], weight, sum[g][i]);
      }
    }
    for (int g = 0; g < G; ++g) {
      float four[4];
      Vec::sum4(sum[g][0], sum[g][1], sum[g][2], sum[g][3], four);
      for (int64_t i = 0; i < cols; ++i) {
        for (int64_t d = whole; d < k; ++d) four[i] += x[g * k + d] * from_bf16(w[i][d]);
        out[g * n + i] = four[i];
      }
    }
  }

  template <int G>
  static void block_of(int rows, const float* x, const uint16_t* const (&w)[4], int64_t k, int64_t n, int64_t cols,
                       bool fetch, float* out) {
    if constexpr (G > 1) {
      if (rows < G) return block_of<G - 1>(rows, x, w, k, n, cols, fetch, out);
    }
    block<G>(x, w, k, n, cols, fetch, out);
  }

  static void run(const float* x, int64_t m, const uint16_t* w, int64_t n, int64_t k, float* out) {
    for (int64_t j = 0; j < n; j += 4) {
      const int64_t cols = n - j < 4 ? n - j : 4;
      const uint16_t* row[4];
      for (int64_t i = 0; i < 4; ++i) row[i] = w + (j + (i < cols ? i : cols - 1)) * k;
      for (int64_t r = 0; r < m; r += Vec::max_group) {
        const int rows = m - r < Vec::max_group ? int(m - r) : Vec::max_group;
        block_of<Vec::max_group>(rows, x + r * k, row, k, n, cols, r == 0, out + r * n + j);
      }
    }
  }
};

}  // namespace kvzap
