// Loads and stores of single words and 16-byte vectors that other devices see, and the clock that
// bounds a wait for them.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

// Never served by a cache that a peer's store leaves stale.
__device__ __forceinline__ uint4 ld_relaxed_sys_v4(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_sys_v4(void* p, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void st_relaxed_sys_v2(void* p, const uint2& v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}

__device__ __forceinline__ i32 ld_relaxed_gpu(const i32* p) {
  i32 value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void st_relaxed_sys(i32* p, i32 value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// The same address, of which the compiler does not know that: sums with it are not kept in
// registers across a loop.
__device__ __forceinline__ const u8* opaque(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Nanoseconds; advances in steps of up to a microsecond.
__device__ __forceinline__ u64 globaltimer() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace cupy_moe::ptx
