// Words that one access of 8 or 16 bytes loads.
#pragma once

#include "common/types.cuh"

namespace cupy_moe {

__device__ __forceinline__ void load_words(const u8* from, u32 (&words)[2]) {
  const uint2 vector = *reinterpret_cast<const uint2*>(from);
  words[0] = vector.x;
  words[1] = vector.y;
}

__device__ __forceinline__ void load_words(const u8* from, u32 (&words)[4]) {
  const uint4 vector = *reinterpret_cast<const uint4*>(from);
  words[0] = vector.x;
  words[1] = vector.y;
  words[2] = vector.z;
  words[3] = vector.w;
}

}  // namespace cupy_moe
