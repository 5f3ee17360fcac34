// Scalar functions shared by routing and the FC1 activations, in FP32.
#pragma once

namespace cupy_moe {

// Logistic function as 0.5 * tanh(x / 2) + 0.5: exactly 1 for large x, exactly 0 for very negative
// x, with an absolute resolution of about 2^-25. Routing compares these values, so which of them
// tie is part of the definition.
__device__ __forceinline__ float sigmoid_tanh(float x) {
  return 0.5f * tanhf(0.5f * x) + 0.5f;
}

// Logistic function with a relative error below 2^-16, also where the result is tiny: for
// activations, which are rounded to 4 bits afterwards. Accurate exponentials and divisions take a
// fifth of the time of a prefill's FC1.
__device__ __forceinline__ float sigmoid_exp(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

__device__ __forceinline__ float silu(float x) {
  return x * sigmoid_exp(x);
}

// GELU with the tanh form of the normal CDF; the constant is sqrt(2 / pi).
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

}  // namespace cupy_moe
