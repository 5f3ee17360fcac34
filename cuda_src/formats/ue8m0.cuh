// UE8M0: a byte b is 2^(b - 127), 0xFF is NaN.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::formats {

__device__ __forceinline__ float decode_ue8m0(u32 byte) {
  if (byte == 0) return 0x1p-127f;
  if (byte == 255) return __uint_as_float(0x7FC00000u);
  return __uint_as_float(byte << 23);
}

}  // namespace cupy_moe::formats
