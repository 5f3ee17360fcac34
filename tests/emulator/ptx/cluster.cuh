#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

namespace cupy_moe::ptx {

inline void barrier_cluster_arrive_relaxed() {}
inline void barrier_cluster_wait() { emulator::cluster->barrier.arrive_and_wait(); }
inline i32 cluster_nctarank() { return static_cast<i32>(emulator::cluster->blocks.size()); }
inline i32 cluster_ctarank() { return emulator::rank_in_cluster; }

// A block and an offset into its shared memory.
inline u32 mapa_shared_cluster(const void* own, u32 rank) {
  const auto offset = static_cast<const char*>(own) - emulator::block->shared.data();
  return static_cast<u32>(offset) | rank << 26;
}

inline char* shared_of(u32 address) {
  char* shared = emulator::cluster->blocks[address >> 26]->shared.data();
  return shared + (address & ((1u << 26) - 1));
}
inline void st_async_shared_cluster(u32 address, float value, u32 mbarrier) {
  std::memcpy(shared_of(address), &value, sizeof value);
  change_barrier(reinterpret_cast<u64*>(shared_of(mbarrier)), 0, -i32{sizeof value});
}
inline i32 nclusterid() { return static_cast<i32>(gridDim.x) / cluster_nctarank(); }
inline i32 clusterid() { return static_cast<i32>(blockIdx.x) / cluster_nctarank(); }

}  // namespace cupy_moe::ptx
