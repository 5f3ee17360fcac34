// out[i] = in[i] * kFactor + offset + kIncrement for i < n; one thread an element. Used to test
// compilation and launches: block 0 reports its cluster size, every block its multiprocessor.
#include "common/types.cuh"
#include "probe.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe::probe {

struct Params {
  const float* in;  // [n] or null: zeros
  float* out;       // [n]
  u32* sm_ids;      // [gridDim.x] or null
  u32* cluster;     // [1] or null
  i64 spin_cycles;  // busy time of every block
  i32 n;
  float offset;
};

CUPY_MOE_CHECK_PARAMS(Params);

static_assert(Config::kNumThreads <= 1024, "more threads than a block holds");

__device__ __forceinline__ void report(const Params& p) {
  if (threadIdx.x != 0) return;
  if (p.sm_ids != nullptr) p.sm_ids[blockIdx.x] = sm_id();
  if (p.cluster != nullptr && blockIdx.x == 0) *p.cluster = cluster_size();
}

}  // namespace cupy_moe::probe

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    probe(const __grid_constant__ cupy_moe::probe::Params p) {
  using namespace cupy_moe;
  if constexpr (Config::kEarlyLaunch) ptx::griddepcontrol_launch_dependents();
  const i64 start = clock64();
  while (clock64() - start < p.spin_cycles) {
  }
  ptx::griddepcontrol_wait();
  probe::report(p);
  const i64 i = i64{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < p.n) {
    const float x = p.in == nullptr ? 0.0f : p.in[i];
    p.out[i] = x * Config::kFactor + p.offset + static_cast<float>(probe::kIncrement);
  }
}
