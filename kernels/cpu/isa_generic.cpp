#include "isa_kernels.h"
#include "vec_generic.h"

namespace kvzap {
Kernels kernels_generic() { return kernels_of<VecGeneric>(); }
}  // namespace kvzap
