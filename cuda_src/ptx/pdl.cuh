// Programmatic dependent launch. Below sm_90 the instructions do not exist and nothing is launched
// early.
#pragma once

namespace cupy_moe::ptx {

// Blocks until every grid this one depends on has finished and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the dependent grid start; it still waits for this one's completion before reading its
// results. What had ended before this call needs no wait there.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cupy_moe::ptx
