// Thread block clusters: their barrier, and accesses to another block's shared memory. Below sm_90
// the instructions do not exist; every block is a cluster of its own and nothing else may get here.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

namespace cupy_moe::ptx {

// Arrival at the barrier of all threads of the cluster; what the thread wrote is visible to whoever
// waits for the barrier.
__device__ __forceinline__ void barrier_cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
  __trap();
#endif
}

// Likewise, but publishes nothing: for memory that the thread has read and that may now go.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#else
  __trap();
#endif
}

// Every arrival has its wait, and no thread arrives twice in between.
__device__ __forceinline__ void barrier_cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __trap();
#endif
}

// Address of the same shared variable in block `rank` of the cluster.
__device__ __forceinline__ u32 mapa_shared_cluster(const void* own, u32 rank) {
  u32 address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<u32>(__cvta_generic_to_shared(own))), "r"(rank));
#else
  __trap();
#endif
  return address;
}

__device__ __forceinline__ i32 ld_shared_cluster(u32 address) {
  i32 value = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#else
  __trap();
#endif
  return value;
}

// Arrival at the same barrier of block `rank` in a cluster of kCluster. It publishes nothing there:
// for that it would have to wait until all that the thread wrote has arrived.
template <i32 kCluster>
__device__ __forceinline__ void mbarrier_arrive_at(u64* barrier, u32 rank) {
  if constexpr (kCluster == 1) {
    mbarrier_arrive(barrier);
  } else {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa_shared_cluster(barrier, rank))
        : "memory");
#else
    __trap();
#endif
  }
}

// Likewise at the barrier at `mbarrier` of another block, which also announces `bytes`.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_cluster(u32 mbarrier, i32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(mbarrier),
               "r"(bytes)
               : "memory");
#else
  __trap();
#endif
}

// Stores to another block and counts the four bytes at the barrier at `mbarrier` of that block,
// behind which they are visible.
__device__ __forceinline__ void st_async_shared_cluster(u32 address, float value, u32 mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(__float_as_uint(value)), "r"(mbarrier)
      : "memory");
#else
  __trap();
#endif
}

// The same of 16 bytes.
__device__ __forceinline__ void st_async_shared_cluster(u32 address, int4 value, u32 mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(mbarrier)
      : "memory");
#else
  __trap();
#endif
}

// Blocks of the cluster.
__device__ __forceinline__ i32 cluster_nctarank() {
  u32 count = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %cluster_nctarank;" : "=r"(count));
#endif
  return static_cast<i32>(count);
}

// This block among them.
__device__ __forceinline__ i32 cluster_ctarank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<i32>(rank);
}

// Clusters of the grid, and this one among them; a block is one where there are no clusters.
__device__ __forceinline__ i32 nclusterid() {
  u32 count = gridDim.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %nclusterid.x;" : "=r"(count));
#endif
  return static_cast<i32>(count);
}

__device__ __forceinline__ i32 clusterid() {
  u32 id = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %clusterid.x;" : "=r"(id));
#endif
  return static_cast<i32>(id);
}

}  // namespace cupy_moe::ptx
