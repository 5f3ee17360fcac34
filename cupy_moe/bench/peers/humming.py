"""Humming: GEMMs compiled at run time, composed to a layer as its documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender, installed
from cupy_moe.bench.layers import BenchLayer
from cupy_moe.bench.peers.assignments import aligned_order, local_assignments
from cupy_moe.bench.workloads import Ids
from cupy_moe.runtime.streams import cupy_stream

__all__ = ["Humming"]

# Humming's activation works on ``[a, b]``; here a is up and b is gate.
SWIGLU = "a * b / (1.0f + __expf(-b))"

COMPUTE = {"gemm_type": "indexed"}

# Humming leaves the weighted sum over a token's slots to its user. One block a token; BF16 in and
# out, FP32 sums.
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


@dataclass(frozen=True, eq=False)
class _Gemm:
    """One of the two GEMMs with its transformed weights."""

    config: Any  # humming.config.LayerConfig
    tensors: dict[str, Any]
    input_scale: Any  # (1,), float32
    locks: Any

    @classmethod
    def make(cls, weight: Any, weight_scale: Any, input_factor: float) -> _Gemm:
        """Transform weights (EL, N, K) with a scale an expert, for inputs of one static scale."""
        import torch
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        num_experts, rows, columns = weight.shape
        config, tensors = prepare_and_transform_humming_tensors(
            {"weight": weight.view(torch.int32), "weight_scale": weight_scale.contiguous()},
            shape_n=rows,
            shape_k=columns,
            weight_schema=HummingWeightSchema(
                b_dtype="float8e4m3", bs_dtype="float32", weight_scale_type="tensor"
            ),
            input_schema=HummingInputSchema(a_dtype="float8e4m3", input_quant_mode="static_tensor"),
            num_experts=num_experts,
            torch_dtype=torch.bfloat16,
            device=weight.device,
        )
        return cls(
            config=config,
            tensors=tensors,
            input_scale=torch.full((1,), input_factor, device=weight.device),
            locks=torch.zeros(2048, dtype=torch.int32, device=weight.device),
        )

    def prepare(
        self, experts: NDArray[np.int32], num_experts: int, slots_per_row: int
    ) -> Callable[[Any], Any]:
        """GEMM of the rows, ``slots_per_row`` of them from each row of the input."""
        import torch
        from humming.forward import humming_forward
        from humming.tune import get_heuristics_config

        tuning = get_heuristics_config(self.config, shape_m=experts.size, gemm_type="indexed")
        rows, block_experts = aligned_order(experts, num_experts, tuning["block_shape"][0])
        device = self.locks.device
        routing = {
            "sorted_ids": torch.from_numpy(rows).to(device),
            "expert_ids": torch.from_numpy(block_experts).to(device),
            "num_tokens_padded": torch.tensor(rows.size, dtype=torch.int32, device=device),
        }
        return lambda x: humming_forward(
            self.config,
            inputs=x,
            input_scale=self.input_scale,
            locks=self.locks,
            top_k=slots_per_row,
            compute_config=COMPUTE,
            tuning_config=tuning,
            **self.tensors,
            **routing,
        )


class Humming(Contender):
    """FC1, SwiGLU with quantization, FC2 and a weighted sum: four launches, E4M3 per tensor."""

    key = "humming"
    name = "Humming W8A8"
    package = "humming-kernels"
    scope = "whole layer, its own choice of tiles; not timed: sorting by expert"

    @classmethod
    def missing(cls) -> str | None:
        """Reason if the package is not installed or cannot be imported."""
        if installed(cls.package) is None:
            return (
                'humming-kernels is not installed: pip install "humming-kernels[cu13]" '
                "(or cu12, as torch is built)"
            )
        try:
            import humming  # noqa: F401
        except Exception as error:  # it looks for GPU, compiler and launcher when imported
            return f"humming-kernels cannot be imported: {type(error).__name__}: {error}"
        return None

    def __init__(self, layer: BenchLayer) -> None:
        """Transform the weights."""
        self._workload = layer.workload
        self._fc1 = _Gemm.make(layer.w1, layer.w1_factor, layer.input_factor)
        self._fc2 = _Gemm.make(layer.w2, layer.w2_factor, layer.intermediate_factor)

    def prepare(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Sort the local slots by expert.

        Where only some slots are local, their tokens' rows are gathered first, in the timed part:
        so the intermediate buffers hold local rows alone.
        """
        import torch
        from humming.forward import may_process_input

        assigned = local_assignments(self._workload, ids)
        every_slot = assigned.is_every_slot
        num_experts = self._workload.local_num_experts
        fc1 = self._fc1.prepare(assigned.experts, num_experts, ids.shape[1] if every_slot else 1)
        fc2 = self._fc2.prepare(assigned.experts, num_experts, 1)
        tokens, row_of_slot, slot_weights = (
            torch.from_numpy(array).to(hidden.device)
            for array in (assigned.tokens, assigned.row_of_slot, weights)
        )
        output = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
        words = hidden.view(torch.int64)

        def call() -> Any:
            x = hidden if every_slot else words.index_select(0, tokens).view(hidden.dtype)
            intermediate, _, _ = may_process_input(
                self._fc2.config,
                fc1(x),
                token_scales=self._fc2.input_scale,
                activation_type="binary_split",
                activation_impl=SWIGLU,
            )
            return weighted_sum(fc2(intermediate), row_of_slot, slot_weights, output)

        return call
