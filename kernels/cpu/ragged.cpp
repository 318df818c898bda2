// Decode attention over ragged per-head lists of cells: splits segments into items of equal cost, merges their parts.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "bf16.h"
#include "isa.h"

namespace kvzap {
namespace {

constexpr int64_t kItem = 512;  // cells per work item: small enough to balance ragged heads over threads

struct Item {
  int64_t segment;
  int64_t begin;
  int64_t end;
};

// Work items of all segments; those of segment s are first[s]..first[s + 1].
struct Plan {
  std::vector<Item> items;
  std::vector<int64_t> first;

  Plan(const int64_t* indptr, int64_t segments) {
    first.reserve(segments + 1);
    for (int64_t s = 0; s < segments; ++s) {
      first.push_back(int64_t(items.size()));
      for (int64_t i = indptr[s]; i < indptr[s + 1]; i += kItem)
        items.push_back({s, i, std::min(i + kItem, indptr[s + 1])});
    }
    first.push_back(int64_t(items.size()));
  }
};

void put(float* out, float x) { *out = x; }

void put(uint16_t* out, float x) { *out = to_bf16(x); }

// One query's result from its parts, each [acc: group * dim][peak: group][mass: group].
template <class T>
void merge(const float* parts, int64_t n, int64_t stride, int group, int dim, int g, float* row, T* out, float* lse) {
  const int64_t peak_at = int64_t(group) * dim + g, mass_at = peak_at + group;
  float peak = -std::numeric_limits<float>::infinity(), mass = 0.f;
  for (int64_t i = 0; i < n; ++i) peak = std::max(peak, parts[i * stride + peak_at]);
  std::fill(row, row + dim, 0.f);
  for (int64_t i = 0; i < n; ++i) {
    const float* part = parts + i * stride;
    const float weight = std::exp(part[peak_at] - peak);
    mass += weight * part[mass_at];
    for (int d = 0; d < dim; ++d) row[d] += weight * part[g * dim + d];
  }
  for (int d = 0; d < dim; ++d) put(out + d, n ? row[d] / mass : 0.f);
  *lse = n ? peak + std::log(mass) : -std::numeric_limits<float>::infinity();
}

// Returns 1 + index of the first cell outside the pool, or 0.
int64_t check_cells(const int32_t* cells, int64_t n, int64_t pool_rows) {
  uint32_t largest = 0;  // a negative entry is larger than any pool
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, uint32_t(cells[i]));
  if (n == 0 || int64_t(largest) < pool_rows) return 0;
  return 1 + (std::find(cells, cells + n, int32_t(largest)) - cells);
}

struct Problem {
  const char* q;
  int64_t q_segment;  // bytes of one segment's queries
  const void* k;
  const void* v;
  int64_t k_stride;
  int64_t v_stride;
  const int32_t* cells;
  int group;
  int dim;
  float scale;

  Segment segment(const Item& item, float* part, float* scratch) const {
    float* peak = part + int64_t(group) * dim;
    return Segment{q + item.segment * q_segment, k, v, k_stride, v_stride, cells + item.begin,
                   item.end - item.begin, group, dim, scale, part, peak, peak + group, scratch};
  }
};

template <class T>
int64_t decode(const Problem& p, const Plan& plan, AttendFn attend, int64_t pool_rows, T* out, float* lse,
               int threads) {
  int64_t bad = 0;
  const int64_t items = int64_t(plan.items.size()), segments = int64_t(plan.first.size()) - 1;
  const int64_t part_size = int64_t(p.group) * (p.dim + 2), scratch_size = int64_t(p.group) * (p.dim + kBlock);
  std::unique_ptr<float[]> parts(new float[items * part_size]);
#pragma omp parallel num_threads(threads) if (items > 1 && threads > 1)
  {
    std::unique_ptr<float[]> scratch(new float[scratch_size]);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < items; ++i) {
      const Segment segment = p.segment(plan.items[i], parts.get() + i * part_size, scratch.get());
      if (const int64_t at = check_cells(segment.cells, segment.n, pool_rows)) {
#pragma omp atomic write
        bad = plan.items[i].begin + at;
        continue;
      }
      attend(segment);
    }
#pragma omp for schedule(static)
    for (int64_t s = 0; s < segments; ++s)
      for (int g = 0; g < p.group; ++g) {
        const int64_t row = s * p.group + g;
        merge(parts.get() + plan.first[s] * part_size, plan.first[s + 1] - plan.first[s], part_size, p.group, p.dim,
              g, scratch.get(), out + row * p.dim, lse + row);
      }
  }
  return bad;
}

}  // namespace
}  // namespace kvzap

extern "C" {

// q, out [segments * group, dim]; lse [segments * group]. Returns 0, or 1 + index of a cell outside the pool; out and
// lse are then meaningless.
int64_t kvzap_ragged_decode(int isa, int bf16, const void* q, const void* k, const void* v, int64_t k_stride,
                            int64_t v_stride, int64_t pool_rows, const int64_t* indptr, const int32_t* cells,
                            int64_t segments, int group, int dim, float scale, void* out, float* lse, int threads) {
  using namespace kvzap;
  const Kernels kernels = kernels_of_level(isa);
  const int64_t element = bf16 ? 2 : 4;
  const Problem problem{static_cast<const char*>(q), group * dim * element, k, v, k_stride, v_stride, cells, group, dim, scale};
  const Plan plan(indptr, segments);
  if (bf16) return decode(problem, plan, kernels.attend_bf16, pool_rows, static_cast<uint16_t*>(out), lse, threads);
  return decode(problem, plan, kernels.attend_f32, pool_rows, static_cast<float*>(out), lse, threads);
}

// Reads the same rows as kvzap_ragged_decode, in the same items, and does nothing with them but a sum (benchmarks).
float kvzap_read_rows(int isa, int bf16, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
                      const int64_t* indptr, const int32_t* cells, int64_t segments, int dim, int threads) {
  using namespace kvzap;
  const Kernels kernels = kernels_of_level(isa);
  const Problem problem{nullptr, 0, k, v, k_stride, v_stride, cells, 0, dim, 0.f};
  const Plan plan(indptr, segments);
  const int64_t items = int64_t(plan.items.size());
  float total = 0.f;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(+ : total)
  for (int64_t i = 0; i < items; ++i)
    total += (bf16 ? kernels.read_bf16 : kernels.read_f32)(problem.segment(plan.items[i], nullptr, nullptr));
  return total;
}
}
