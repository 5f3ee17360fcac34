// What a kernel of this package needs of CUDA, on threads of the host: a thread of a block is a thread
// of the process. Slow, but it runs the kernel itself, with words that become visible one by one.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline

struct uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

struct Warp {
  std::barrier<> barrier{32};
  uint32_t words[32];
};

struct Block {
  explicit Block(int num_threads, size_t smem)
      : barrier(num_threads), shared(smem, char(0xFF)), warps(num_threads / 32) {
    for (auto& warp : warps) warp = std::make_unique<Warp>();
  }
  std::barrier<> barrier;
  std::vector<char> shared;
  std::vector<std::unique_ptr<Warp>> warps;
};

struct Cluster {
  explicit Cluster(int num_threads) : barrier(num_threads) {}
  std::barrier<> barrier;
  std::vector<std::unique_ptr<Block>> blocks;
};

inline thread_local Warp* warp;
inline thread_local Block* block;
inline thread_local Cluster* cluster;
inline thread_local int rank_in_cluster;

}  // namespace emulator

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { emulator::block->barrier.arrive_and_wait(); }
inline void __syncwarp() { emulator::warp->barrier.arrive_and_wait(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  emulator::Warp& warp = *emulator::warp;
  std::memcpy(&warp.words[threadIdx.x % 32], &value, 4);
  warp.barrier.arrive_and_wait();
  std::memcpy(&value, &warp.words[lane & 31], 4);
  warp.barrier.arrive_and_wait();
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return __shfl_sync(mask, value, (threadIdx.x % 32) ^ distance);
}
inline unsigned __reduce_max_sync(unsigned, unsigned) { std::abort(); }
inline unsigned __reduce_min_sync(unsigned, unsigned) { std::abort(); }

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline uint4 __ldcs(const uint4* p) { return *p; }
inline int atomicCAS(int* p, int expected, int desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace emulator {

// Runs `body` on every thread of a grid. Returns when all have ended.
template <typename Body>
void launch(int num_blocks, int num_threads, int cluster_size, size_t smem, Body body) {
  std::vector<std::unique_ptr<Cluster>> clusters;
  for (int b = 0; b < num_blocks; ++b) {
    if (b % cluster_size == 0) {
      clusters.push_back(std::make_unique<Cluster>(cluster_size * num_threads));
    }
    clusters.back()->blocks.push_back(std::make_unique<Block>(num_threads, smem));
  }
  std::vector<std::thread> threads;
  for (int b = 0; b < num_blocks; ++b) {
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, b, t] {
        threadIdx.x = t, blockIdx.x = b, blockDim.x = num_threads, gridDim.x = num_blocks;
        cluster = clusters[b / cluster_size].get();
        rank_in_cluster = b % cluster_size;
        block = cluster->blocks[rank_in_cluster].get();
        warp = block->warps[t / 32].get();
        body(block->shared.data());
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace emulator
