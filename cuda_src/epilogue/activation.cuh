// FC1 activations on raw FP32 accumulators. u is the up (linear) half, v the gate half; s1 and sg
// are the expert's output and gate scale. Comparisons are written so that NaN passes through.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

namespace cupy_moe::epilogue {

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
