// Rounding to bf16. Internal linkage: every object keeps the copy that was compiled for its own instruction set.
#pragma once
#include <cstdint>
#include <cstring>

namespace kvzap {
namespace {

uint16_t to_bf16(float x) {  // to nearest even; a NaN stays one
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return x != x ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}

}  // namespace
}  // namespace kvzap
