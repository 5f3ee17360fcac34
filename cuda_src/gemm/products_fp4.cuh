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
#include "gemm/feed_wgmma.cuh"
#include "gemm/product_widths.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/stage_fp4.cuh"
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

  // What a thread has of a unit: of rows g and g + 8 eight bytes of codes, and their scale.
  struct Codes {
    uint2 words[2];
    u32 scales[2];
  };

  // Offsets in a stage of what a thread reads.
  struct Place {
    i32 codes;
    i32 scales;
    i32 group_scales;  // of 64 or 128 rows, spread over a warp

    // The scales of a tile of 64 rows are in one half of theirs.
    __device__ Place(const Tile& tile, i32 group) {
      const i32 scaled_row = tile.m_tile * Config::kTileM % Stage::kScaleTileRows;
      const i32 lane = static_cast<i32>(threadIdx.x) % 32;
      const i32 warp = static_cast<i32>(threadIdx.x) / 32 % 4;
      const i32 row = group * kGroupRows + 16 * warp + lane / 4;
      const i32 column = lane % 4 * 16 / Scale::kBlock;
      codes = row * Stage::kBoxRowBytes + lane % 4 * 8;
      scales = Stage::kCodeBytes + scale_row(scaled_row + row) + column;
      group_scales = Stage::kCodeBytes + scale_row(scaled_row + group * kGroupRows) + lane * 16;
    }

    // Of the scales of a row in the first tile that has it.
    __device__ static i32 scale_row(i32 row) {
      constexpr i32 kRows = Stage::kScaleTileRows;
      return row / kRows * (Stage::kScaleTiles * Stage::kScaleTileBytes) + row % 32 * 16 +
             row % kRows / 32 * 4;
    }
  };

  // A unit of a stage, counted window by window.
  __device__ __forceinline__ static Codes load(const u8* stage, const Place& place, i32 unit) {
    const i32 window = unit / kFragsM;
    const i32 first_row = unit % kFragsM * 64;
    const u8* codes = stage + place.codes + window / 2 * Stage::kBoxBytes + window % 2 * 32;
    const i32 column = window * Stage::kWindow / Scale::kBlock;
    const u8* scales = stage + place.scales + column / 4 * Stage::kScaleTileBytes + column % 4;
    Codes result;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const i32 row = first_row + 8 * i;
      result.words[i] = *reinterpret_cast<const uint2*>(codes + row * Stage::kBoxRowBytes);
      result.scales[i] = scales[Place::scale_row(row)];
    }
    return result;
  }

  // Whether a stage may have scales that need a second multiplier. All warps of a group look at all
  // scales of the group, so that they agree.
  __device__ __forceinline__ static bool any_rare(const u8* stage, const Place& place) {
    if constexpr (Scale::kHasRare) {
      u32 bits = 0;
#pragma unroll
      for (i32 tile = 0; tile < Stage::kScaleTiles; ++tile) {
        const u8* scales = stage + place.group_scales + tile * Stage::kScaleTileBytes;
        if constexpr (kGroupRows == 64) {
          const uint2 words = *reinterpret_cast<const uint2*>(scales);
          bits |= words.x | words.y;
        } else {
          const uint4 words = *reinterpret_cast<const uint4*>(scales);
          bits |= words.x | words.y | words.z | words.w;
        }
      }
      return __any_sync(~0u, Scale::rare_bits(bits) != 0);
    }
    return false;
  }

  // Fragments of a part of a window.
  template <bool kRare, i32 kNumParts>
  __device__ __forceinline__ static void widen(const Codes& codes, i32 part, Fragments& a) {
    u32 scales[2] = {codes.scales[0], codes.scales[1]};
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
        formats::widen_e2m1x8(word == 0 ? codes.words[i].x : codes.words[i].y, first[i], pairs);
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

  // A whole window, by one of some widths. Before the last part is issued the products of earlier
  // windows have ended.
  template <i32 kFirst, i32 kLast, typename Release>
  __device__ __forceinline__ static void multiply_window(const Codes (&codes)[kFragsM], u64 tokens,
                                                         i32 num_columns, Fragments (&a)[kFragsM],
                                                         Accumulators& acc,
                                                         Release release_before) {
#pragma unroll
    for (i32 part = 0; part < kParts; ++part) {
      ptx::wgmma_wait_group<kParts - 1>();
      if (part == kParts - 1) release_before();
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m) widen<false, kParts>(codes[m], part, a[m]);
      with_narrowest<kFirst, kLast>(num_columns, [&](auto width) {
        issue<width.kColumns, kFragsM, kParts>(a, tokens, part, acc);
      });
    }
  }

  // Whole stages up to one that needs care, by one of some widths. A stage is left while the next
  // one is multiplied.
  template <i32 kFirst, i32 kLast>
  __device__ __forceinline__ static void multiply_stages(Smem& smem, Ring& ring, const Place& place,
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
      if (any_rare(stage, place)) break;
#pragma unroll
      for (i32 window = 0; window < Stage::kWindows; ++window) {
        Codes codes[kFragsM];
#pragma unroll
        for (i32 m = 0; m < kFragsM; ++m) codes[m] = load(stage, place, window * kFragsM + m);
        const u64 descriptor = rows.descriptor(window * Feed::kTokenWindowBytes);
        multiply_window<kFirst, kLast>(codes, descriptor, num_columns, a, acc, [&] {
          if (window == 0 && before >= 0) Feed::release(smem, before);
        });
      }
      before = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
    __syncwarp();
    if (before >= 0) Feed::release(smem, before);
  }

  // Any stage, of which only the first windows lie in K.
  __device__ static void multiply_carefully(const u8* stage, const Place& place,
                                            const ptx::Swizzle128Operand& tokens, i32 num_windows,
                                            i32 num_columns, Accumulators& acc) {
#pragma unroll 1
    for (i32 window = 0; window < num_windows; ++window) {
      const u64 descriptor = tokens.descriptor(window * Feed::kTokenWindowBytes);
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m) {
        Fragments a;
        widen<Scale::kHasRare, 1>(load(stage, place, window * kFragsM + m), 0, a);
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
    const Place place(tile, group);
#pragma unroll
    for (i32 i = 0; i < kFragsM * kTileN / 2; ++i) (&acc[0][0][0])[i] = 0.0f;
    while (num_windows > 0) {
      if constexpr (kFewUnits) {
        with_narrowest(tile.num_rows, [&](auto width) {
          constexpr i32 kIndex = width.kIndex;
          multiply_stages<kIndex, kIndex>(smem, ring, place, tokens, num_windows, tile.num_rows,
                                          acc);
        });
      } else {
        multiply_stages<0, kNumWidths - 1>(smem, ring, place, tokens, num_windows, tile.num_rows,
                                           acc);
      }
      if (num_windows <= 0) break;
      ptx::mbarrier_wait_parity(&smem.full[ring.slot], ring.parity);
      multiply_carefully(smem.weights[ring.slot], place,
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
