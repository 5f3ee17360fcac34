// Helpers of probe.cu; also a header for the include closure to find.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::probe {

constexpr i32 kIncrement = 1;

__device__ __forceinline__ u32 sm_id() {
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

__device__ __forceinline__ u32 cluster_size() {
  u32 size = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}

}  // namespace cupy_moe::probe
