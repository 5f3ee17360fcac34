// FC1 activations on raw FP32 accumulators. u is the up (linear) half, v the gate half; s1 and sg
// are the expert's output and gate scale. Comparisons are written so that NaN passes through.
#pragma once

#include "common/types.cuh"
#include "ptx/approx.cuh"

namespace cupy_moe::epilogue {

// Logistic function with a relative error below 2^-16 for x above -87, and 0 below: the result is
// rounded to 4 bits. Accurate exponentials and divisions take a fifth of the time of a prefill's
// FC1. What flushing subnormals changes is nothing beside 1.
__device__ __forceinline__ float sigmoid_exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-kLog2E * x));
}

__device__ __forceinline__ float silu(float x) {
  return x * sigmoid_exp(x);
}

// GELU with the tanh form of the normal CDF; the constant is sqrt(2 / pi).
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

template <ActivationType kActivation>
struct Activation;

template <>
struct Activation<ActivationType::Swiglu> {
  __device__ static float apply(float u, float v, float s1, float sg, float) {
    return s1 * u * silu(sg * v);
  }
};

template <>
struct Activation<ActivationType::Geglu> {
  __device__ static float apply(float u, float v, float s1, float sg, float) {
    return s1 * u * gelu_tanh(sg * v);
  }
};

// The up half is clamped on both sides, the gate only from above and after its SiLU.
template <>
struct Activation<ActivationType::SwigluStep> {
  __device__ static float apply(float u, float v, float s1, float sg, float limit) {
    const float up = u < -limit ? -limit : (u > limit ? limit : u);
    const float gate = silu(sg * v);
    const float cap = limit * sg;
    return s1 * up * (gate > cap ? cap : gate);
  }
};

template <>
struct Activation<ActivationType::Situ> {
  __device__ static float apply(float u, float v, float s1, float sg, float) {
    return s1 * tanhf(sg * u) * tanhf(sg * v) * sigmoid_exp(sg * v);
  }
};

template <>
struct Activation<ActivationType::Relu2> {
  __device__ static float apply(float u, float, float s1, float sg, float) {
    const float x = sg * u;
    const float positive = x < 0.0f ? 0.0f : x;
    return s1 * (positive * positive);
  }
};

template <>
struct Activation<ActivationType::Identity> {
  __device__ static float apply(float u, float, float s1, float, float) { return s1 * u; }
};

template <>
struct Activation<ActivationType::Silu> {
  __device__ static float apply(float u, float, float s1, float sg, float) {
    return s1 * silu(sg * u);
  }
};

}  // namespace cupy_moe::epilogue
