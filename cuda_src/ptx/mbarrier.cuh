// Barriers in shared memory that count arrivals and the bytes of bulk copies (sm_90 and later, and
// nothing else may get to what sm_80 does not have).
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cupy_moe::ptx {

// Lanes that arrive for a warp that has met: one. racecheck takes no order of a warp's lanes into
// account, only that of a thread's own arrivals: in a build for it, every lane arrives.
#ifdef CUPY_MOE_EVERY_LANE_ARRIVES
constexpr u32 kArrivalsOfWarp = 32;
#else
constexpr u32 kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ void mbarrier_init(u64* barrier, i32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cvta_to_shared(barrier)),
               "r"(num_arrivals)
               : "memory");
}

// Makes initialized barriers visible to the copy engine and to the other threads' async copies.
__device__ __forceinline__ void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  __trap();
#endif
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cvta_to_shared(barrier))
               : "memory");
}

// One arrival, which also announces `bytes` that a bulk copy will deliver.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, i32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cvta_to_shared(barrier)),
      "r"(bytes)
      : "memory");
#else
  __trap();
#endif
}

// Blocks until the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait_parity(u64* barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(cvta_to_shared(barrier)),
      "r"(parity)
      : "memory");
}

// Likewise, for what other blocks of the cluster have written.
__device__ __forceinline__ void mbarrier_wait_parity_cluster(u64* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(cvta_to_shared(barrier)),
      "r"(parity)
      : "memory");
#else
  __trap();
#endif
}

}  // namespace cupy_moe::ptx
