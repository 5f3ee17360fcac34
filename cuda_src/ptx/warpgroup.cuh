// Registers and barriers of a warpgroup: four warps, 128 threads (sm_90a).
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

// The kernel must be launched with a register cap, and all warps of the group must take part.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in one thread of a whole warp. Of the choices this is the one the compiler knows: operands
// of bulk copies need no loop over threads then.
__device__ __forceinline__ bool elect_sync() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Barrier of `num_threads` threads; id 0 is __syncthreads().
__device__ __forceinline__ void named_barrier_sync(i32 id, i32 num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace cupy_moe::ptx
