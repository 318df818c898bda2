#include "isa_kernels.h"
#include "vec_avx2.h"

namespace kvzap {
Kernels kernels_avx2() { return kernels_of<VecAvx2>(); }
}  // namespace kvzap
