#pragma once

#include_next "ptx/bf16x2.cuh"

namespace cupy_moe::ptx {

// Of magnitudes below infinity, whose bits are ordered like their values.
inline u32 set_gt_f16x2(u32 a, u32 b) {
  const u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? 0xFFFF : 0;
  return low | ((a >> 16) > (b >> 16) ? 0xFFFF0000 : 0);
}

}  // namespace cupy_moe::ptx
