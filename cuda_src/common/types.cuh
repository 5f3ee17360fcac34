// Fixed-width types and the enumerations that cupy_moe/types.py mirrors by name.
#pragma once

namespace cupy_moe {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(i64) == 8 && sizeof(u64) == 8 && sizeof(void*) == 8,
              "LP64 device ABI expected");

enum class RoutingMethodType {
  Default,
  Renormalize,
  DeepSeekV3,
  Llama4,
  RenormalizeNaive,
  TopK,
  SigmoidRenorm,
  MiniMax2,
  Sigmoid,
  TopKSigmoid,
};

enum class ActivationType {
  Silu,
  Swiglu,
  Geglu,
  Relu2,
  SwigluStep,
  Identity,
  Situ,
};

// What hidden states, weights and the FC1 output are: E4M3 throughout (Fp8), or FP4 weights with
// block scales, and hidden states and FC1 output of the kind that names the format.
enum class MoeFormat { Fp8, Nvfp4, Mxfp8, Bf16 };

// The two GEMMs of a layer.
enum class GemmStage { Fc1, Fc2 };

// How the tensor cores are fed: mma.sync everywhere, wgmma on sm_90a.
enum class MainloopKind { Mma, Wgmma };

// Who reduces the expert rows of a token in a tensor-parallel finalize: every rank all of them, one
// rank all of them, or every rank those of its slots.
enum class FinalizeScheme { EveryRank, TokenOwner, ExpertOwner };

__host__ __device__ constexpr bool is_gated(ActivationType activation) {
  return activation == ActivationType::Swiglu || activation == ActivationType::Geglu ||
         activation == ActivationType::SwigluStep || activation == ActivationType::Situ;
}

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T min(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
__host__ __device__ constexpr T max(T a, T b) {
  return a < b ? b : a;
}

}  // namespace cupy_moe
