#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

inline void cp_async_cg_16_or_zero(void* smem, const void* gmem, bool valid) {
  valid ? std::memcpy(smem, gmem, 16) : std::memset(smem, 0, 16);
}

}  // namespace cupy_moe::ptx
