#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

// Bits of a barrier: 0 phase, 1 to 15 arrivals of a phase, 16 to 31 pending ones, 32 to 63 pending
// bytes, which may be negative for a while.
inline u64 barrier_bits(u64 phase, u64 expected, u64 pending, i32 bytes) {
  return phase | expected << 1 | pending << 16 | u64{static_cast<u32>(bytes)} << 32;
}

inline void change_barrier(u64* barrier, u32 arrivals, i32 bytes) {
  u64 old = __atomic_load_n(barrier, __ATOMIC_SEQ_CST), next;
  do {
    u64 phase = old & 1, expected = old >> 1 & 0x7FFF, pending = (old >> 16 & 0xFFFF) - arrivals;
    const i32 left = static_cast<i32>(old >> 32) + bytes;
    if (pending == 0 && left == 0) phase ^= 1, pending = expected;
    next = barrier_bits(phase, expected, pending, left);
  } while (!__atomic_compare_exchange_n(barrier, &old, next, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST));
}

inline void mbarrier_init(u64* barrier, i32 arrivals) {
  __atomic_store_n(barrier, barrier_bits(0, arrivals, arrivals, 0), __ATOMIC_SEQ_CST);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(u64* barrier, i32 bytes) { change_barrier(barrier, 1, bytes); }
// The first warp of a second block is late behind every wait, so that others are as far ahead of it
// as they can be.
inline void mbarrier_wait_parity_cluster(u64* barrier, u32 parity) {
  while ((__atomic_load_n(barrier, __ATOMIC_SEQ_CST) & 1) == parity) std::this_thread::yield();
  const bool is_late = emulator::rank_in_cluster == 1 && threadIdx.x == 0;
  if (is_late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
}

}  // namespace cupy_moe::ptx
