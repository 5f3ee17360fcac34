// Bulk copies from global to shared memory (sm_90 and later).
#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cupy_moe::ptx {

// What a line is worth to the L2 cache after it was read.
enum class L2Hint : u64 {
  EvictNormal = 0x1000000000000000,
  EvictFirst = 0x12F0000000000000,
};

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at the given coordinates (innermost first); its bytes complete `barrier`.
__device__ __forceinline__ void tma_load_3d(void* smem, const TensorMap* map, u64* barrier, i32 c0,
                                            i32 c1, i32 c2, L2Hint hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(cvta_to_shared(smem)),
      "l"(map), "r"(cvta_to_shared(barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(static_cast<u64>(hint))
      : "memory");
}

// Likewise, to the same place in every block of the cluster whose bit is set; the bytes complete
// the barrier of each at the place of `barrier`.
__device__ __forceinline__ void tma_load_3d_multicast(void* smem, const TensorMap* map,
                                                      u64* barrier, i32 c0, i32 c1, i32 c2,
                                                      u16 blocks, L2Hint hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(
          cvta_to_shared(smem)),
      "l"(map), "r"(cvta_to_shared(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(blocks),
      "l"(static_cast<u64>(hint))
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(void* smem, const TensorMap* map, u64* barrier, i32 c0,
                                            i32 c1, i32 c2, i32 c3, L2Hint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(cvta_to_shared(smem)),
      "l"(map), "r"(cvta_to_shared(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(static_cast<u64>(hint))
      : "memory");
}

// Copies `bytes`, a multiple of 16, from one place to another that are aligned as much; they
// complete `barrier`.
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, u64* barrier, i32 bytes,
                                          L2Hint hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(cvta_to_shared(smem)),
      "l"(gmem), "r"(bytes), "r"(cvta_to_shared(barrier)), "l"(static_cast<u64>(hint))
      : "memory");
}

// Brings the box into L2 only.
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, i32 c0, i32 c1, i32 c2,
                                                i32 c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Orders this thread's ordinary shared-memory writes before later reads by the copy engine and the
// tensor cores.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory, also when another kernel wrote it.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace cupy_moe::ptx
