// One GEMM of the layer over all experts: out[row, :] = epilogue(W[expert(row)] * x[row]).
//
// Weights are the M operand (prepared rows), tokens the N operand, so that a tile of eight tokens
// wastes nothing. Rows are expert-sorted and padded to whole token tiles: a tile has one expert.
// Blocks are persistent over the (token tile, weight tile) list; the counts are on the device. FC1
// gathers token rows from the hidden states or reads a permuted copy, FC2 reads FC1's rows in
// place. The K order of a value does not depend on the tile, so neither does a single bit of the
// result.
#include "common/types.cuh"
#include "epilogue/store.cuh"
#include "gemm/mainloop_mma.cuh"
#include "gemm/mainloop_wgmma.cuh"
#include "gemm/problem.cuh"

namespace cupy_moe {

using gemm::Params;

CUPY_MOE_CHECK_PARAMS(Params);

template <MainloopKind kKind>
struct MainloopOf {
  using type = gemm::MainloopMma<Config>;
};
template <>
struct MainloopOf<MainloopKind::Wgmma> {
  using type = gemm::MainloopWgmma<Config>;
};
using Mainloop = MainloopOf<Config::kMainloopKind>::type;

template <GemmStage kStage, MoeFormat kFormat, bool kClamps>
struct TransformOf {
  using type = epilogue::ScaleToBf16;
};
template <MoeFormat kFormat, bool kClamps>
struct TransformOf<GemmStage::Fc1, kFormat, kClamps> {
  using type = epilogue::ActivateToBlocks<Config, kClamps>;
};
template <bool kClamps>
struct TransformOf<GemmStage::Fc1, MoeFormat::Fp8, kClamps> {
  using type = epilogue::ActivateToE4m3<Config::kActivation>;
};
// Clamping takes a third of the activation. Large tiles gain nothing without it; other activations
// and the portable loop spill with code of both kinds. NOTE: accumulators are scaled by powers of
// two, so that sums that the compiler fuses in one of them have the same bits.
constexpr bool kMayNotClamp = gemm::kIsFc1<Config> && Config::kMoeFormat != MoeFormat::Fp8 &&
                              Config::kActivation == ActivationType::Swiglu &&
                              Config::kTileN <= 96 && Config::kMainloopKind == MainloopKind::Wgmma;
template <bool kClamps>
using StoreOf = epilogue::TileStore<
    Config, Mainloop, typename TransformOf<Config::kGemmStage, Config::kMoeFormat, kClamps>::type>;

extern "C" __global__ void __launch_bounds__(Mainloop::kNumThreads, Config::kMinBlocks)
    grouped_gemm(const __grid_constant__ Params p) {
  using Smem = Mainloop::Smem;
  static_assert(sizeof(Smem) == Config::kSmemBytes, "the host reserves what the plan needs");
  static_assert(Mainloop::kNumThreads == Config::kNumThreads, "the host launches as many");
  extern __shared__ __align__(1024) u8 smem_raw[];

  constexpr i32 kGroups = Config::kTileM / Mainloop::kGroupRows;
  Mainloop::for_each_tile(
      *reinterpret_cast<Smem*>(smem_raw), p,
      [&](const gemm::Tile& tile, Mainloop::Group& group, const Mainloop::Accumulators& acc,
          const epilogue::ExpertScales& scales) {
        // Of a cluster's blocks the last ones may have no weights; they meet as in an epilogue.
        if (Config::kCluster > 1 && tile.m_tile * Config::kTileM >= p.m) return group.sync();
        const i32 feature =
            p.first_feature + (tile.m_tile * kGroups + group.index) * StoreOf<true>::kFeatures;
        u8* output = p.output + static_cast<i64>(tile.first_row) * p.output_pitch;
        if constexpr (kMayNotClamp) {
          if (!epilogue::clamps(scales)) {
            return StoreOf<false>::run(group, acc, scales, tile.num_rows, output, feature,
                                       p.output_pitch);
          }
        }
        StoreOf<true>::run(group, acc, scales, tile.num_rows, output, feature, p.output_pitch);
      });
}

}  // namespace cupy_moe
