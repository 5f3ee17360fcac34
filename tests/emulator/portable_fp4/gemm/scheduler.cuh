#pragma once

#include "common/types.cuh"

namespace cupy_moe::gemm {

struct Tile {
  i32 m_tile;
  i32 expert;
  i32 first_row;
  i32 num_rows;
};

}  // namespace cupy_moe::gemm
