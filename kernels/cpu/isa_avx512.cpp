#include "isa_kernels.h"
#include "vec_avx512.h"

namespace kvzap {
Kernels kernels_avx512() { return kernels_of<VecAvx512>(); }
}  // namespace kvzap
