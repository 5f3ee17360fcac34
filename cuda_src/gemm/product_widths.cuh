// Columns that FP4 products of the Hopper main loop come in, by columns of a token tile, in
// ascending order. In a large tile padding would cost time of the tensor cores.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::gemm {

template <i32 kTileN>
struct ProductWidths {
  static constexpr i32 kWidths[] = {kTileN};
};
template <>
struct ProductWidths<48> {
  static constexpr i32 kWidths[] = {32, 48};
};
template <>
struct ProductWidths<96> {
  static constexpr i32 kWidths[] = {32, 48, 64, 72, 80, 96};
};
template <>
struct ProductWidths<160> {
  static constexpr i32 kWidths[] = {120, 128, 136, 144, 160};
};
template <>
struct ProductWidths<192> {
  static constexpr i32 kWidths[] = {128, 160, 168, 176, 192};
};

}  // namespace cupy_moe::gemm
