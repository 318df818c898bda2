// A linear layer of bf16 weights for a few rows: torch has no bf16 product for CPUs without AVX512_BF16 or AMX.
#include <algorithm>
#include <memory>

#include "bf16.h"
#include "isa.h"

namespace kvzap {
namespace {

constexpr int64_t kTile = 32;             // weight rows per work item
constexpr int64_t kSerial = 64 * 1024;    // weights below which waking a thread costs more than it saves

}  // namespace
}  // namespace kvzap

// out [m, n] = x [m, k] * w [n, k]^T + bias [n] (or null), all bf16 and contiguous, summed in fp32.
extern "C" void kvzap_linear(int isa, const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* out,
                             int64_t m, int64_t n, int64_t k, int threads) {
  using namespace kvzap;
  const LinearFn linear = kernels_of_level(isa).linear_bf16;
  std::unique_ptr<float[]> wide(new float[m * k]);
  std::transform(x, x + m * k, wide.get(), from_bf16);
#pragma omp parallel num_threads(threads) if (threads > 1 && n * k > kSerial)
  {
    std::unique_ptr<float[]> tile(new float[m * kTile]);
#pragma omp for schedule(dynamic, 1)
    for (int64_t j = 0; j < n; j += kTile) {
      const int64_t cols = std::min(kTile, n - j);
      linear(wide.get(), m, w + j * k, cols, k, tile.get());
      for (int64_t r = 0; r < m; ++r)
        for (int64_t i = 0; i < cols; ++i)
          out[r * n + j + i] = to_bf16(tile[r * cols + i] + (bias ? from_bf16(bias[j + i]) : 0.f));
    }
  }
}
