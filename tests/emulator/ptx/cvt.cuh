#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

inline u16 cvt_rn_bf16_f32(float x) {
  const u32 bits = __float_as_uint(x);
  return static_cast<u16>(x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline u32 cvt_rn_bf16x2_f32(float high, float low) {
  return static_cast<u32>(cvt_rn_bf16_f32(high)) << 16 | cvt_rn_bf16_f32(low);
}

}  // namespace cupy_moe::ptx
