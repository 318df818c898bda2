// The table of one instruction set's kernels.
#pragma once
#include "attend.h"
#include "isa.h"
#include "linear.h"

namespace kvzap {

template <class Vec>
Kernels kernels_of() {
  using F32 = Attend<Vec, float>;
  using Bf16 = Attend<Vec, uint16_t>;
  return Kernels{F32::attend, Bf16::attend, F32::read, Bf16::read, Linear<Vec>::run};
}

}  // namespace kvzap
