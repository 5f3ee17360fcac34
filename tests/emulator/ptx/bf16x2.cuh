#pragma once

#include "common/types.cuh"
#include "ptx/cvt.cuh"

namespace cupy_moe::ptx {

// FP64 is exact for the sums of products with 1 that the kernels ask for, but for sums of values that
// are further apart than its 53 bits, where the smaller one cannot change the rounding to 8 bits.
inline u16 fma_rn_bf16(u16 a, u16 b, u16 c) {
  const auto wide = [](u16 x) { return double{__uint_as_float(u32{x} << 16)}; };
  const double exact = wide(a) * wide(b) + wide(c);
  float odd = static_cast<float>(exact);  // to odd, so that the second rounding is the only one
  if (exact == exact && static_cast<double>(odd) != exact && !(__float_as_uint(odd) & 1)) {
    const bool is_above = std::fabs(static_cast<double>(odd)) > std::fabs(exact);
    odd = __uint_as_float(__float_as_uint(odd) + (is_above ? -1 : 1));
  }
  return cvt_rn_bf16_f32(odd);
}

inline u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
  const u32 high = fma_rn_bf16(a >> 16, b >> 16, c >> 16);
  return high << 16 | fma_rn_bf16(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF);
}

}  // namespace cupy_moe::ptx
