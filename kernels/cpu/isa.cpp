// Choice of the instruction set at run time.
#include "isa.h"

namespace kvzap {

int best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  return __builtin_cpu_supports("avx512f") ? 2 : 1;
#else
  return 0;
#endif
}

Kernels kernels_of_level(int isa) {
#if defined(__x86_64__)
  if (isa == 2) return kernels_avx512();
  if (isa == 1) return kernels_avx2();
#endif
  (void)isa;
  return kernels_generic();
}

}  // namespace kvzap

extern "C" int kvzap_best_isa() { return kvzap::best_isa(); }
