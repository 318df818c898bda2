// The cell table on the CPU: from token slots to ragged lists of visible cells, and to the rows that new K and V go to.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace kvzap {
namespace {

constexpr int32_t kCondemned = 1 << 30;  // as in encoding.py
constexpr int64_t kItem = 2048;          // token slots per work item

struct Item {
  int64_t request;
  int64_t begin;  // into the concatenated slots
  int64_t end;
};

struct Query {
  const int32_t* table;  // [table_slots, heads]
  int64_t table_slots;
  int64_t heads;
  const int64_t* slots;
  const int64_t* slot_indptr;
  const int64_t* dense_from;
};

// Where one item's compacted entries go: head h's start at h * stride. The two details may be null.
struct Lists {
  int32_t* cells;
  int32_t* positions;
  uint8_t* condemned;
  int64_t stride;
  int64_t* counts;  // [heads]
};

void lower(std::atomic<int64_t>& least, int64_t value) {
  int64_t seen = least.load();
  while (value < seen && !least.compare_exchange_weak(seen, value)) {
  }
}

// Compacts heads h0..h0+H of one item. Writes every entry and advances only past visible ones: a branch would be
// mispredicted at every third entry. Returns the index of the first slot outside the table, or item.end.
template <int H, bool kDetail>
int64_t compact(const Query& q, const Item& item, int64_t h0, const Lists& to) {
  const int64_t base = q.slot_indptr[item.request];
  const int64_t dense_from = base + q.dense_from[item.request];
  int64_t count[H] = {};
  for (int64_t i = item.begin; i < item.end; ++i) {
    const int64_t slot = q.slots[i];
    if (uint64_t(slot) >= uint64_t(q.table_slots)) return i;
    const int32_t* row = q.table + slot * q.heads + h0;
    const int32_t hidden_bit = i < dense_from ? kCondemned : 0;
    for (int h = 0; h < H; ++h) {
      const int32_t entry = row[h];
      const int64_t at = (h0 + h) * to.stride + count[h];
      to.cells[at] = entry & ~kCondemned;
      if (kDetail) {
        to.positions[at] = int32_t(i - base);
        to.condemned[at] = uint8_t((entry & kCondemned) != 0);
      }
      count[h] += int(entry >= 0) & int((entry & hidden_bit) == 0);
    }
  }
  for (int h = 0; h < H; ++h) to.counts[h0 + h] = count[h];
  return item.end;
}

template <bool kDetail>
int64_t compact_all(const Query& q, const Item& item, const Lists& to) {
  int64_t h = 0;
  for (; h + 8 <= q.heads; h += 8) {
    const int64_t stop = compact<8, kDetail>(q, item, h, to);
    if (stop != item.end) return stop;
  }
  switch (q.heads - h) {
    case 1: return compact<1, kDetail>(q, item, h, to);
    case 2: return compact<2, kDetail>(q, item, h, to);
    case 3: return compact<3, kDetail>(q, item, h, to);
    case 4: return compact<4, kDetail>(q, item, h, to);
    case 5: return compact<5, kDetail>(q, item, h, to);
    case 6: return compact<6, kDetail>(q, item, h, to);
    case 7: return compact<7, kDetail>(q, item, h, to);
  }
  return item.end;
}

std::vector<Item> split(const int64_t* slot_indptr, int64_t requests) {
  std::vector<Item> items;
  for (int64_t b = 0; b < requests; ++b)
    for (int64_t i = slot_indptr[b]; i < slot_indptr[b + 1]; i += kItem)
      items.push_back({b, i, std::min(i + kItem, slot_indptr[b + 1])});
  return items;
}

// Fills indptr and turns counts [item][head] into where each (item, head) begins in the output. Returns nnz.
int64_t place(const std::vector<Item>& items, int64_t requests, int64_t heads, int64_t* counts, int64_t* begins,
              int64_t* indptr) {
  int64_t total = 0;
  size_t first = 0, last = 0;
  for (int64_t b = 0; b < requests; ++b, first = last) {
    while (last < items.size() && items[last].request == b) ++last;
    for (int64_t h = 0; h < heads; ++h) {
      indptr[b * heads + h] = total;
      for (size_t i = first; i < last; ++i) {
        begins[i * heads + h] = total;
        total += counts[i * heads + h];
      }
    }
  }
  return indptr[requests * heads] = total;
}

}  // namespace
}  // namespace kvzap

extern "C" {

// indptr [requests * heads + 1]; cells (and positions, condemned unless null) have room for slots * heads entries.
// Returns the number of visible cells, or -1 - index of the first slot outside the table.
int64_t kvzap_visible_cells(const int32_t* table, int64_t table_slots, int64_t heads, const int64_t* slots,
                            const int64_t* slot_indptr, int64_t requests, const int64_t* dense_from, int64_t* indptr,
                            int32_t* cells, int32_t* positions, uint8_t* condemned, int threads) {
  using namespace kvzap;
  const Query query{table, table_slots, heads, slots, slot_indptr, dense_from};
  const std::vector<Item> items = split(slot_indptr, requests);
  const int64_t n = int64_t(items.size()), room = slot_indptr[requests] * heads;
  std::unique_ptr<int32_t[]> cell_lists(new int32_t[room]), position_lists(new int32_t[positions ? room : 0]);
  std::unique_ptr<uint8_t[]> condemned_lists(new uint8_t[positions ? room : 0]);
  std::vector<int64_t> counts(n * heads), begins(n * heads);
  std::atomic<int64_t> first_bad(slot_indptr[requests]);
#pragma omp parallel num_threads(threads) if (n > 1 && threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = items[i].begin * heads;
      const Lists to{cell_lists.get() + at, position_lists.get() + (positions ? at : 0),
                     condemned_lists.get() + (positions ? at : 0), items[i].end - items[i].begin, &counts[i * heads]};
      const int64_t stop = positions ? compact_all<true>(query, items[i], to) : compact_all<false>(query, items[i], to);
      if (stop != items[i].end) lower(first_bad, stop);
    }
#pragma omp single
    place(items, requests, heads, counts.data(), begins.data(), indptr);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t from = items[i].begin * heads + h * (items[i].end - items[i].begin);
        const int64_t to = begins[i * heads + h], count = counts[i * heads + h];
        memcpy(cells + to, cell_lists.get() + from, count * sizeof(int32_t));
        if (!positions) continue;
        memcpy(positions + to, position_lists.get() + from, count * sizeof(int32_t));
        memcpy(condemned + to, condemned_lists.get() + from, count);
      }
  }
  return first_bad < slot_indptr[requests] ? -1 - first_bad.load() : indptr[requests * heads];
}

// Copies rows of `row_bytes` of k and v [tokens, heads] (strides in bytes) to the cells of `slots`.
// Returns 0, or 1 + token * heads + head of the first entry without a cell in the pool; nothing is written then.
int64_t kvzap_write_cells(const int32_t* table, int64_t table_slots, int64_t heads, const int64_t* slots,
                          int64_t tokens, const char* k, int64_t k_token, int64_t k_head, const char* v,
                          int64_t v_token, int64_t v_head, char* k_pool, int64_t k_row, char* v_pool, int64_t v_row,
                          int64_t pool_rows, int64_t row_bytes, int threads) {
  using namespace kvzap;
  for (int64_t t = 0; t < tokens; ++t) {
    const bool inside = uint64_t(slots[t]) < uint64_t(table_slots);
    for (int64_t h = 0; h < heads; ++h) {
      const int32_t entry = inside ? table[slots[t] * heads + h] : -1;
      if (entry < 0 || (entry & ~kCondemned) >= pool_rows) return 1 + t * heads + h;
    }
  }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens * heads >= 256)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t cell = table[slots[t] * heads + h] & ~kCondemned;
      memcpy(k_pool + cell * k_row, k + t * k_token + h * k_head, row_bytes);
      memcpy(v_pool + cell * v_row, v + t * v_token + h * v_head, row_bytes);
    }
  return 0;
}
}
