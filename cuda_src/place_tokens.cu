// Token rows as FC1 reads them, at the places where it looks for them.
//
// FP8 rows are what they are. Those of FP4 layers become BF16, exactly (down to 2^-133), in the
// order in which their main loop walks K. A row is read once. It stays at the place of its token,
// where FC1 gathers it, or is written to the permuted rows of all its slots, so that FC1 can fetch
// tiles of them. Padding rows are left alone: nobody looks at what is computed from them.
//
// One block a token and kNumThreads vectors of 16 bytes, a vector a thread. Routing weights in FP32
// are rounded to BF16 on the way where the layer asks for it.
#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "formats/block_scale.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/k_order.cuh"
#include "formats/ue8m0.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const u8* hidden_states;          // [num_tokens, hidden_size] e4m3, bf16 or packed e2m1
  const u8* scales;                 // [num_tokens, scale_pitch] e4m3 or ue8m0; null without scales
  const i32* expanded_to_permuted;  // [num_tokens * top_k] row of the slot, or -1; null: by token
  uint4* output;                    // [num_tokens or permuted rows, hidden_size] e4m3 or bf16
  const float* topk_weights;        // [num_tokens * top_k] to be rounded, or null
  u16* expert_weights;              // [num_tokens * top_k] bf16 of them
  i32 hidden_size;
  i32 scale_pitch;
  i32 top_k;
};

CUPY_MOE_CHECK_PARAMS(Params);

// Pairs (i, i + 4) of the eight elements that start at `element` of a row.
template <MoeFormat kFormat>
struct Widen;

template <>
struct Widen<MoeFormat::Nvfp4> {
  __device__ static void run(const u8* row, const u8* scales, i32 element, u32 (&pairs)[4]) {
    const u32 codes = *reinterpret_cast<const u32*>(row + element / 2);
    u32 multiplier, unused;
    formats::NvScale::multipliers(scales[element / 16], 0, multiplier, unused);
    formats::widen_e2m1x8(codes, multiplier, pairs);
    const u32 gain = formats::encode_bf16x2(formats::NvScale::kGain, formats::NvScale::kGain);
#pragma unroll
    for (u32& pair : pairs) pair = formats::mul_bf16x2(pair, gain);
  }
};

template <>
struct Widen<MoeFormat::Mxfp8> {
  __device__ static void run(const u8* row, const u8* scales, i32 element, u32 (&pairs)[4]) {
    const uint2 codes = *reinterpret_cast<const uint2*>(row + element);
    const float scale = formats::decode_ue8m0(scales[element / 32]);
#pragma unroll
    for (i32 i = 0; i < 4; i += 2) {
      const float2 first = formats::decode_e4m3x2(static_cast<u16>(codes.x >> (8 * i)));
      const float2 second = formats::decode_e4m3x2(static_cast<u16>(codes.y >> (8 * i)));
      pairs[i] = formats::encode_bf16x2(first.x * scale, second.x * scale);
      pairs[i + 1] = formats::encode_bf16x2(first.y * scale, second.y * scale);
    }
  }
};

template <>
struct Widen<MoeFormat::Bf16> {
  __device__ static void run(const u8* row, const u8*, i32 element, u32 (&pairs)[4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + 2 * element);
    pairs[0] = __byte_perm(words.x, words.z, 0x5410);
    pairs[1] = __byte_perm(words.x, words.z, 0x7632);
    pairs[2] = __byte_perm(words.y, words.w, 0x5410);
    pairs[3] = __byte_perm(words.y, words.w, 0x7632);
  }
};

constexpr i64 given_bytes(i64 elements) {
  return Config::kMoeFormat == MoeFormat::Nvfp4  ? elements / 2
         : Config::kMoeFormat == MoeFormat::Bf16 ? 2 * elements
                                                 : elements;
}

constexpr i32 kColumns = Config::kMoeFormat == MoeFormat::Fp8 ? 16 : 8;  // of a thread

// The thread's vector of the row, which may end before it; for all threads of a warp.
template <MoeFormat kFormat>
__device__ uint4 make_vector(const Params& p, i64 token, i32 vector, bool in_row) {
  const u8* row = p.hidden_states + token * given_bytes(p.hidden_size);
  if constexpr (kFormat == MoeFormat::Fp8) {
    return in_row ? reinterpret_cast<const uint4*>(row)[vector] : uint4{};
  } else {
    // Threads next to each other make a span of K, each of them a word here and there.
    constexpr i32 kBlock = formats::WeightScaleOf<kFormat>::type::kBlock;
    static_assert(32 * 8 % (4 * kBlock) == 0, "a warp makes whole spans");
    __shared__ uint4 vectors[Config::kNumThreads];
    if (in_row) {
      u32 pairs[4];
      Widen<kFormat>::run(row, p.scales + token * p.scale_pitch, kColumns * vector, pairs);
      formats::store_in_k_order<kBlock>(reinterpret_cast<u8*>(vectors),
                                        static_cast<i32>(threadIdx.x), pairs);
    }
    __syncwarp();
    return vectors[threadIdx.x];
  }
}

// Places of a row: the token's own, or those of its slots.
__device__ i32 num_places(const Params& p) {
  return p.expanded_to_permuted == nullptr ? 1 : p.top_k;
}

// Row of a place, -1 for none.
__device__ i32 load_place(const Params& p, i64 token, i32 place) {
  if (p.expanded_to_permuted == nullptr) return static_cast<i32>(token);
  return place < p.top_k ? p.expanded_to_permuted[token * p.top_k + place] : -1;
}

// Stores the thread's vector to all places; each lane knows one of the first 32.
__device__ void store_vector(const Params& p, i64 token, i32 vector, bool in_row, const uint4& made,
                             i32 own_place, i32 lane) {
  const i32 row_vectors = p.hidden_size / kColumns;
  const i32 count = num_places(p);
  for (i32 first = 0; first < count; first += 32) {
    if (first > 0) own_place = load_place(p, token, first + lane);
#pragma unroll 4
    for (i32 i = 0; i < min(32, count - first); ++i) {
      const i32 row = __shfl_sync(~0u, own_place, i);
      if (row >= 0 && in_row) p.output[static_cast<i64>(row) * row_vectors + vector] = made;
    }
  }
}

// For finalize. FC1 may be running, but does not scale rows of FP4 layers by them.
__device__ void round_weights(const Params& p, i64 token) {
  for (i32 i = static_cast<i32>(threadIdx.x); i < p.top_k; i += Config::kNumThreads) {
    const i64 slot = token * p.top_k + i;
    p.expert_weights[slot] = formats::encode_bf16(p.topk_weights[slot]);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    place_tokens(const __grid_constant__ Params p) {
  const i64 token = blockIdx.x;
  const i32 vector = static_cast<i32>(blockIdx.y * Config::kNumThreads + threadIdx.x);
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const bool in_row = kColumns * vector < p.hidden_size;

  ptx::griddepcontrol_wait();
  // Not before the wait: the next kernel takes it that the permutation has ended.
  ptx::griddepcontrol_launch_dependents();
  if (p.topk_weights != nullptr && blockIdx.y == 0) round_weights(p, token);
  const i32 own_place = load_place(p, token, lane);  // on its way while the vector is made
  const uint4 made = make_vector<Config::kMoeFormat>(p, token, vector, in_row);
  store_vector(p, token, vector, in_row, made, own_place, lane);
}

}  // namespace cupy_moe
