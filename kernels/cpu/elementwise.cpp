// RMS norm and rotary embedding of bf16 activations in one pass each, where torch takes many.
#include <cmath>
#include <memory>

#include "bf16.h"

namespace kvzap {
namespace {

constexpr int64_t kSerial = 64 * 1024;  // values below which waking a thread costs more than it saves

float square_sum(const float* x, int64_t n) {  // sixteen sums side by side: a single one cannot be vectorised
  float part[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) part[j] += x[i + j] * x[i + j];
  float total = 0.f;
  for (float p : part) total += p;
  for (; i < n; ++i) total += x[i] * x[i];
  return total;
}

}  // namespace
}  // namespace kvzap

extern "C" {

// out = (x + residual) / rms(x + residual) * weight, sum = x + residual; rows [rows, width]; residual and sum may be null.
void kvzap_rms_norm(const uint16_t* x, const uint16_t* residual, const uint16_t* weight, float epsilon, uint16_t* out,
                    uint16_t* sum, int64_t rows, int64_t width, int threads) {
  using namespace kvzap;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * width > kSerial)
  {
    std::unique_ptr<float[]> wide(new float[width]);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * width;
      for (int64_t i = 0; i < width; ++i) wide[i] = from_bf16(x[at + i]);
      if (residual) {
        for (int64_t i = 0; i < width; ++i) wide[i] += from_bf16(residual[at + i]);
        for (int64_t i = 0; i < width; ++i) sum[at + i] = to_bf16(wide[i]);
      }
      const float scale = 1.f / std::sqrt(square_sum(wide.get(), width) / float(width) + epsilon);
      for (int64_t i = 0; i < width; ++i) out[at + i] = to_bf16(wide[i] * scale * from_bf16(weight[i]));
    }
  }
}

// Rotates the two halves of every head: x [rows, heads * dim], rows `x_stride` apart; cache [cache_rows, dim], cosines
// then sines; out contiguous. Returns 0, or 1 + index of a position outside the cache.
int64_t kvzap_rotate(const uint16_t* x, int64_t x_stride, const int64_t* positions, const uint16_t* cache,
                     int64_t cache_rows, uint16_t* out, int64_t rows, int64_t heads, int64_t dim, int threads) {
  using namespace kvzap;
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || positions[r] >= cache_rows) return 1 + r;
  const int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * heads * dim > kSerial)
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t* angle = cache + positions[r] * dim;
    for (int64_t h = 0; h < heads; ++h) {
      const uint16_t* in = x + r * x_stride + h * dim;
      uint16_t* to = out + (r * heads + h) * dim;
      for (int64_t i = 0; i < half; ++i) {
        const float cosine = from_bf16(angle[i]), sine = from_bf16(angle[half + i]);
        const float a = from_bf16(in[i]), b = from_bf16(in[half + i]);
        to[i] = to_bf16(a * cosine - b * sine);
        to[half + i] = to_bf16(b * cosine + a * sine);
      }
    }
  }
  return 0;
}
}
