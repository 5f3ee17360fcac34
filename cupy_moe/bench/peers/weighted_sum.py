"""The weighted sum over a token's slots, for peers that leave it to their user."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cupy_moe.runtime.streams import cupy_stream

__all__ = ["weighted_sum"]

# One block a token; BF16 in and out, FP32 sums.
SUM_KERNEL = r"""
extern "C" __global__ void weighted_sum(
    const uint4* rows,        // [R, H/8]
    const int* row_of_slot,   // [T, K], -1: no such row
    const float* weights,     // [T, K]
    uint4* out,               // [T, H/8]
    int top_k, int vectors) {
  const int* const token_rows = row_of_slot + blockIdx.x * top_k;
  const float* const token_weights = weights + blockIdx.x * top_k;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    float sums[8] = {};
    for (int k = 0; k < top_k; ++k) {
      const long long row = token_rows[k];
      if (row < 0) continue;
      const uint4 q = rows[row * vectors + v];
      const unsigned words[4] = {q.x, q.y, q.z, q.w};
      for (int i = 0; i < 4; ++i) {
        sums[2 * i] += token_weights[k] * __uint_as_float(words[i] << 16);
        sums[2 * i + 1] += token_weights[k] * __uint_as_float(words[i] & 0xFFFF0000u);
      }
    }
    unsigned halves[8];
    for (int i = 0; i < 8; ++i) {
      const unsigned bits = __float_as_uint(sums[i]);
      halves[i] = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    }
    out[blockIdx.x * (long long)vectors + v] =
        make_uint4(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16,
                   halves[4] | halves[5] << 16, halves[6] | halves[7] << 16);
  }
}
"""


@cache
def _sum_kernel() -> Any:
    import cupy

    return cupy.RawKernel(SUM_KERNEL, "weighted_sum")


def weighted_sum(rows: Any, row_of_slot: Any, weights: Any, output: Any) -> Any:
    """Sum a token's rows on torch's current stream; all arguments are torch tensors."""
    import torch

    num_tokens, hidden_size = output.shape
    vectors = hidden_size // 8
    addresses = [np.uint64(t.data_ptr()) for t in (rows, row_of_slot, weights, output)]
    sizes = [np.int32(weights.shape[1]), np.int32(vectors)]
    with cupy_stream(torch.cuda.current_stream().cuda_stream):
        _sum_kernel()((num_tokens,), (min(vectors, 512),), (*addresses, *sizes))
    return output
