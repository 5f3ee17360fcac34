// Asynchronous copies from global to shared memory.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

__device__ __forceinline__ u32 cvta_to_shared(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes past L1.
__device__ __forceinline__ void cp_async_cg_16(void* smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(cvta_to_shared(smem)), "l"(gmem)
               : "memory");
}

// The same, but if not `valid` nothing is read and zeros are stored.
__device__ __forceinline__ void cp_async_cg_16_or_zero(void* smem, const void* gmem, bool valid) {
  const u32 src_size = valid ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(cvta_to_shared(smem)),
               "l"(gmem), "r"(src_size)
               : "memory");
}

// Copies a word.
__device__ __forceinline__ void cp_async_ca_4(void* smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cvta_to_shared(smem)), "l"(gmem)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's most recent groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all copies of this thread, in groups or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace cupy_moe::ptx
