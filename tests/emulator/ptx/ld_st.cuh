#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

inline uint4 ld_relaxed_sys_v4(const void* p) {
  static thread_local unsigned polls = 0;
  if (++polls % 64 == 0) std::this_thread::yield();
  const auto* words = static_cast<const u32*>(p);
  u32 v[4];
  for (int i = 0; i < 4; ++i) v[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
  return {v[0], v[1], v[2], v[3]};
}

// The last word first: a reader that looks at one word only sees the others too early.
inline void st_relaxed_sys_v4(void* p, const uint4& v) {
  const u32 from[4] = {v.x, v.y, v.z, v.w};
  for (int i = 3; i >= 0; --i) {
    __atomic_store_n(static_cast<u32*>(p) + i, from[i], __ATOMIC_RELAXED);
  }
}

inline void st_relaxed_sys_v2(void* p, const uint2& v) {
  __atomic_store_n(static_cast<u32*>(p) + 1, v.y, __ATOMIC_RELAXED);
  __atomic_store_n(static_cast<u32*>(p), v.x, __ATOMIC_RELAXED);
}

inline i32 ld_relaxed_gpu(const i32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void st_relaxed_sys(i32* p, i32 value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }
inline const u8* opaque(const u8* p) { return p; }
inline u64 globaltimer() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace cupy_moe::ptx
