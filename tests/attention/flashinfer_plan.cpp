// FlashInfer's own planner of FA2 batch prefill (which tensor-core decode uses too), without a GPU and without nvcc.
//
// The planner is host code in a header. What it asks of the CUDA runtime is answered here: the GPU's properties are
// the caller's, and a copy to the device is a copy. batch_prefill.cu hands the same arguments on to `PrefillPlan`.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

// nvcc has these in the global namespace.
using std::max;
using std::min;

// Of this header the planner needs one name. The rest is device code that only nvcc understands.
#define FLASHINFER_POS_ENC_CUH_
namespace flashinfer {
enum class PosEncodingMode { kNone = 0U, kRoPELlama = 1U, kALiBi = 2U };
}

#include <flashinfer/attention/scheduler.cuh>

namespace {
int multiprocessors = 0;
int shared_bytes = 0;
}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes; return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in runtime"; }

// `info` receives PrefillPlanInfo::ToVector, 15 numbers. Returns 0, or 1 with a text in `error`.
__attribute__((visibility("default"))) int prefill_plan(
    void* float_workspace, size_t float_bytes, void* int_workspace, size_t int_bytes, int32_t* qo_indptr,
    int32_t* kv_indptr, uint32_t total_num_rows, uint32_t batch_size, uint32_t num_qo_heads, uint32_t num_kv_heads,
    uint32_t head_dim, int enable_cuda_graph, int disable_split_kv, int sms, int64_t* info, char* error,
    size_t error_bytes) {
  multiprocessors = sms;
  shared_bytes = 232448;
  std::vector<uint8_t> page_locked(int_bytes);
  flashinfer::PrefillPlanInfo plan;
  try {
    cudaError_t status = flashinfer::PrefillPlan<int32_t>(
        float_workspace, float_bytes, int_workspace, page_locked.data(), int_bytes, plan, qo_indptr, kv_indptr,
        total_num_rows, batch_size, num_qo_heads, num_kv_heads, head_dim, head_dim, /*page_size=*/1,
        enable_cuda_graph != 0, /*sizeof_dtype_o=*/2, /*window_left=*/-1, /*fixed_split_size=*/-1,
        disable_split_kv != 0, /*num_colocated_ctas=*/0, /*uniform_q_len=*/0, /*stream=*/nullptr,
        /*kv_dtype_bytes=*/2);
    if (status != cudaSuccess) {
      std::snprintf(error, error_bytes, "the planner returned %d", static_cast<int>(status));
      return 1;
    }
  } catch (const std::exception& thrown) {
    std::snprintf(error, error_bytes, "%s", thrown.what());
    return 1;
  }
  const std::vector<int64_t> numbers = plan.ToVector();
  std::copy(numbers.begin(), numbers.end(), info);
  return 0;
}

}  // extern "C"
