// FP4 x BF16 products of the Hopper main loop: weights are widened in registers, from where the
// tensor cores take them, and meet BF16 tokens in shared memory.
//
// A weight times its scale is exact in BF16, and so are the products in the FP32 accumulators. A
// step is one window of K of all rows of a group: its descriptors, waits and loads are shared by
// units of 64 rows. What executes per weight bounds this loop in small tiles, the tensor cores in
// large ones.
#pragma once

#include "common/types.cuh"
#include "formats/e2m1.cuh"
#include "gemm/codes_fp4.cuh"
#include "gemm/feed_wgmma.cuh"
#include "gemm/product_widths.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct ProductsFp4 {
  using Stage = StageFp4<Config>;
  using Scale = typename Stage::Scale;
  using Feed = FeedWgmma<Config>;
  using Smem = typename Feed::Smem;
  using Ring = typename Feed::Ring;
  static constexpr i32 kGroupRows = Feed::kGroupRows;
  static constexpr i32 kFragsM = kGroupRows / 64;
  static constexpr i32 kTileN = Config::kTileN;
  // With few units on a multiprocessor no other warp fills the time in which one is widened: the
  // products of half a window run while the other half is. There are registers for a loop for every
  // width, too, of which ptxas gives each its own for fragments; others branch on the width.
  static constexpr bool kFewUnits = kFragsM * Feed::kConsumers * Config::kMinBlocks < 4;
  static constexpr i32 kParts = kFewUnits ? 2 : 1;
  static constexpr float kAccScale = Scale::kGain;
  using UnitAccumulators = float[kTileN / 8][4];
  using Accumulators = UnitAccumulators[kFragsM];
  static constexpr auto& kWidths = ProductWidths<kTileN>::kWidths;
  static constexpr i32 kNumWidths = sizeof(kWidths) / sizeof(kWidths[0]);
  template <i32 kWidth>
  struct Width {
    static constexpr i32 kIndex = kWidth;
    static constexpr i32 kColumns = kWidths[kWidth];
  };
  using Fragments = u32[4][4];  // of the four products of a unit and window

  // All windows of a span are loaded at once where a thread has registers for that beside
  // accumulators, fragments and what widening takes; branches on many widths want more of them.
  using Codes = CodesFp4<Config, kGroupRows>;
  static constexpr i32 kSpareRegisters = Feed::kConsumerRegisters - kFragsM * (kTileN / 2 + 16);
  static constexpr i32 kLoadedWindows =
      kSpareRegisters >= (kNumWidths > 2 ? 72 : 48) ? Codes::kSpanWindows : 1;
  using Loaded = typename Codes::template Loaded<kLoadedWindows>;

  // Fragments of a part of one of the windows that were loaded.
  template <bool kRare, i32 kNumParts, i32 kNumWindows>
  __device__ __forceinline__ static void widen(
      const typename Codes::template Loaded<kNumWindows>& loaded, i32 window, i32 part,
      Fragments& a) {
    u32 scales[2] = {loaded.scales[0], loaded.scales[1]};
    u32 second[2];
    if constexpr (kRare) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
        second[i] = Scale::rare_multiplier(scales[i]);
        scales[i] = Scale::clamp_rare(scales[i]);
      }
    }
    u32 first[2];
    Scale::multipliers(scales[0], scales[1], first[0], first[1]);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
#pragma unroll
      for (i32 word = 0; word < 2; ++word) {
        if (word * kNumParts / 2 != part) continue;
        u32 pairs[4];
        formats::widen_e2m1x8(loaded.words[i][2 * window + word], first[i], pairs);
#pragma unroll
        for (i32 j = 0; j < 4; ++j) {
          if constexpr (kRare) pairs[j] = formats::mul_bf16x2(pairs[j], second[i]);
          a[2 * word + j / 2][i + j % 2 * 2] = pairs[j];
        }
      }
    }
  }

  // Products of kUnits units and a part of a window.
  template <i32 kN, i32 kUnits, i32 kNumParts>
  __device__ __forceinline__ static void issue(const Fragments* a, u64 tokens, i32 part,
                                               UnitAccumulators* acc) {
    ptx::wgmma_fence();
#pragma unroll
    for (i32 k = 0; k < 4; ++k) {
      if (k * kNumParts / 4 != part) continue;
#pragma unroll
      for (i32 m = 0; m < kUnits; ++m) {
        ptx::WgmmaBf16<kN>::mma(&acc[m][0][0], a[m][k], tokens + 2 * k);
      }
    }
    ptx::wgmma_commit_group();
  }

  // Calls multiply(width) with the narrowest of some widths that covers the columns in use.
  template <i32 kFirst = 0, i32 kLast = kNumWidths - 1, typename Multiply>
  __device__ __forceinline__ static void with_narrowest(i32 num_columns, Multiply multiply) {
    constexpr i32 kMiddle = (kFirst + kLast) / 2;
    if constexpr (kFirst == kLast) {
      multiply(Width<kFirst>{});
    } else if (num_columns <= kWidths[kMiddle]) {
      with_narrowest<kFirst, kMiddle>(num_columns, multiply);
    } else {
      with_narrowest<kMiddle + 1, kLast>(num_columns, multiply);
    }
  }

  // One of the windows that were loaded, by one of some widths. Before the last part is issued the
  // products of earlier windows have ended.
  template <i32 kFirst, i32 kLast, typename Release>
  __device__ __forceinline__ static void multiply_window(const Loaded (&loaded)[kFragsM],
                                                         i32 window, u64 tokens, i32 num_columns,
                                                         Fragments (&a)[kFragsM], Accumulators& acc,
                                                         Release release_before) {
#pragma unroll
    for (i32 part = 0; part < kParts; ++part) {
      ptx::wgmma_wait_group<kParts - 1>();
      if (part == kParts - 1) release_before();
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m)
        widen<false, kParts, kLoadedWindows>(loaded[m], window, part, a[m]);
      with_narrowest<kFirst, kLast>(num_columns, [&](auto width) {
        issue<width.kColumns, kFragsM, kParts>(a, tokens, part, acc);
      });
    }
  }

  // Whole stages up to one that needs care, by one of some widths. A stage is left while the next
  // one is multiplied.
  template <i32 kFirst, i32 kLast>
  __device__ __forceinline__ static void multiply_stages(Smem& smem, Ring& ring, const Codes& codes,
                                                         const ptx::Swizzle128Operand& tokens,
                                                         i32& num_windows, i32 num_columns,
                                                         Accumulators& acc) {
    Fragments a[kFragsM];
    i32 before = -1;
#pragma unroll 1
    for (; num_windows >= Stage::kWindows; num_windows -= Stage::kWindows) {
      ptx::mbarrier_wait_parity(&smem.full[ring.slot], ring.parity);
      __syncwarp();  // here, not at the release: the compiler may not move loads across it
      const u8* stage = smem.weights[ring.slot];
      const ptx::Swizzle128Operand rows = tokens.at(ring.slot * sizeof(smem.tokens[0]));
      if (codes.any_rare(stage)) break;
#pragma unroll
      for (i32 first = 0; first < Stage::kWindows; first += kLoadedWindows) {
        Loaded loaded[kFragsM];
#pragma unroll
        for (i32 m = 0; m < kFragsM; ++m) {
          loaded[m] = codes.template load<kLoadedWindows>(stage, first, m);
        }
#pragma unroll
        for (i32 i = 0; i < kLoadedWindows; ++i) {
          const u64 descriptor = rows.descriptor((first + i) * Feed::kTokenWindowBytes);
          multiply_window<kFirst, kLast>(loaded, i, descriptor, num_columns, a, acc, [&] {
            if (first + i == 0 && before >= 0) Feed::release(smem, before);
          });
        }
      }
      before = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
    __syncwarp();
    if (before >= 0) Feed::release(smem, before);
  }

  // Any stage, of which only the first windows lie in K.
  __device__ static void multiply_carefully(const u8* stage, const Codes& codes,
                                            const ptx::Swizzle128Operand& tokens, i32 num_windows,
                                            i32 num_columns, Accumulators& acc) {
#pragma unroll 1
    for (i32 window = 0; window < num_windows; ++window) {
      const u64 descriptor = tokens.descriptor(window * Feed::kTokenWindowBytes);
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m) {
        Fragments a;
        widen<Scale::kHasRare, 1, 1>(codes.template load<1>(stage, window, m), 0, 0, a);
        with_narrowest(num_columns, [&](auto width) {
          issue<width.kColumns, 1, 1>(&a, descriptor, 0, acc + m);
        });
        ptx::wgmma_wait_group<0>();
      }
    }
  }

  // acc = weights[kGroupRows, K] * tokens[num_rows, K]^T of a tile; columns not in use get
  // anything.
  __device__ __forceinline__ static void multiply(Smem& smem, Ring& ring, const Tile& tile,
                                                  i32 group, i32 num_windows, Accumulators& acc) {
    const ptx::Swizzle128Operand tokens(smem.tokens[0]);
    const Codes codes(tile, group);
#pragma unroll
    for (i32 i = 0; i < kFragsM * kTileN / 2; ++i) (&acc[0][0][0])[i] = 0.0f;
    while (num_windows > 0) {
      if constexpr (kFewUnits) {
        with_narrowest(tile.num_rows, [&](auto width) {
          constexpr i32 kIndex = width.kIndex;
          multiply_stages<kIndex, kIndex>(smem, ring, codes, tokens, num_windows, tile.num_rows,
                                          acc);
        });
      } else {
        multiply_stages<0, kNumWidths - 1>(smem, ring, codes, tokens, num_windows, tile.num_rows,
                                           acc);
      }
      if (num_windows <= 0) break;
      ptx::mbarrier_wait_parity(&smem.full[ring.slot], ring.parity);
      multiply_carefully(smem.weights[ring.slot], codes,
                         tokens.at(ring.slot * sizeof(smem.tokens[0])),
                         min(num_windows, Stage::kWindows), tile.num_rows, acc);
      num_windows -= Stage::kWindows;
      __syncwarp();
      Feed::release(smem, ring.slot);
      ring.advance();
    }
    ptx::wgmma_fence_registers(*reinterpret_cast<float (*)[kFragsM * kTileN / 2]>(&acc));
  }
};

}  // namespace cupy_moe::gemm
