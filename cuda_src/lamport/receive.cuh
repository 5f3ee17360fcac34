// Bounded waits for words of peers.
#pragma once

#include "common/types.cuh"
#include "lamport/word.cuh"
#include "ptx/ld_st.cuh"

namespace cupy_moe::lamport {

// How long a thread still waits. The clock starts at its first long wait and runs on for the whole
// launch, so that a launch ends in time however many tokens it has.
class Patience {
 public:
  __device__ Patience(u64 timeout_ns, bool gave_up) : timeout_ns_(timeout_ns), gave_up_(gave_up) {}

  __device__ bool gave_up() const { return gave_up_; }

  __device__ bool is_exhausted() {
    if (!gave_up_ && ++polls_ % kPollsPerLook == 0) {
      const u64 now = ptx::globaltimer();
      if (start_ == 0) start_ = now;
      gave_up_ = now - start_ > timeout_ns_;
    }
    return gave_up_;
  }

 private:
  static constexpr u32 kPollsPerLook = 256;
  u64 timeout_ns_;
  u64 start_ = 0;
  u32 polls_ = 0;
  bool gave_up_;
};

// Loads `count` of up to kCount vectors from `address(i)` again and again until all their words
// have arrived. Returns -1, or the vector that was missing when the patience ended. Between two
// looks at all, a polite thread looks at the last one only: polls hold up the stores that they wait
// for.
template <u32 kSentinel, i32 kCount, typename Address>
__device__ __forceinline__ i32 receive(uint4 (&v)[kCount], i32 count, Address address,
                                       bool is_polite, Patience& patience) {
  while (true) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      v[i] = i < count ? ptx::ld_relaxed_sys_v4(address(i)) : make_uint4(0, 0, 0, 0);
    }
    i32 missing = -1;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      if (is_armed<kSentinel>(v[i])) missing = i;
    }
    if (missing < 0 || patience.is_exhausted()) return missing;
    if (is_polite) {
      const void* const last = address(count - 1);
      while (is_armed<kSentinel>(ptx::ld_relaxed_sys_v4(last)) && !patience.is_exhausted()) {
      }
    }
  }
}

}  // namespace cupy_moe::lamport
