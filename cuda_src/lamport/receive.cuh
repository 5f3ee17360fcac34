// Bounded waits for words of peers.
#pragma once

#include "common/types.cuh"
#include "lamport/word.cuh"
#include "ptx/ld_st.cuh"

namespace cupy_moe::lamport {

// How long a thread still waits. The clock starts at its first long wait and runs on for the whole
// launch, and who gives up says so in `failed`, which ends the waits of all threads: a launch ends
// in time however many tokens it has.
class Patience {
 public:
  __device__ Patience(u64 timeout_ns, const i32* failed)
      : timeout_ns_(timeout_ns), failed_(failed) {}

  __device__ bool gave_up() const { return gave_up_ != 0; }

  // Whether another thread gave up; nothing waits for the load before it is asked for.
  __device__ void look() { gave_up_ |= ptx::ld_relaxed_gpu(failed_); }

  __device__ bool is_exhausted() {
    if (gave_up_ == 0 && ++polls_ % kPollsPerLook == 0) {
      const u32 now = ticks(ptx::globaltimer());
      if (start_ == 0) start_ = now;
      gave_up_ = now - start_ > ticks(timeout_ns_);
      look();
    }
    return gave_up();
  }

 private:
  static constexpr u32 kPollsPerLook = 256;

  // Of 2^20 ns: a register less to keep.
  __device__ static u32 ticks(u64 ns) { return static_cast<u32>(ns >> 20); }

  u64 timeout_ns_;
  const i32* failed_;
  u32 start_ = 0;
  u32 polls_ = 0;
  i32 gave_up_ = 0;
};

// Loads `count` of up to kCount vectors from `from + offset(i)`, again and again those of which a
// word has not arrived. Returns -1, or the vector that was missing when the patience ended. Between
// two looks at all, a polite thread looks at the last one only: polls hold up the stores that they
// wait for.
template <u32 kSentinel, i32 kCount, typename Offset>
__device__ __forceinline__ i32 receive(uint4 (&v)[kCount], i32 count, const u8* from, Offset offset,
                                       bool is_polite, Patience& patience) {
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) v[i] = i < count ? armed<kSentinel>() : make_uint4(0, 0, 0, 0);
  while (true) {
    const u8* const at = ptx::opaque(from);
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      if (is_armed<kSentinel>(v[i])) v[i] = ptx::ld_relaxed_sys_v4(at + offset(i));
    }
    i32 missing = -1;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      if (is_armed<kSentinel>(v[i])) missing = i;
    }
    if (missing < 0 || patience.is_exhausted()) return missing;
    if (is_polite) {
      const u8* const last = at + offset(count - 1);
      while (is_armed<kSentinel>(ptx::ld_relaxed_sys_v4(last)) && !patience.is_exhausted()) {
      }
    }
  }
}

}  // namespace cupy_moe::lamport
