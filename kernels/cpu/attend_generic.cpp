#include "attend.h"
#include "vec_generic.h"

namespace kvzap {
Kernels kernels_generic() { return kernels_of<VecGeneric>(); }
}  // namespace kvzap
