"""FP8 layers as the benchmark runs them, in every form that a contender wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.layers import BenchLayer, Tensor
from cupy_moe.bench.workloads import Ids, Work, Workload, work_of
from cupy_moe.fused_moe import trtllm_fp8_per_tensor_scale_routed_moe
from cupy_moe.testing.inputs import (
    INPUT_SCALE,
    INTERMEDIATE_SCALE,
    Arguments,
    Fp8Layer,
    make_fp8_layer,
    make_hidden_states,
    move_arguments,
    to_library,
)
from cupy_moe.weights import pack_topk_ids
from cupy_moe.weights.layouts import unprepare_gemm1_weights, unprepare_gemm2_weights

__all__ = ["Fp8BenchLayer", "make_fp8_bench_layer"]

E4M3_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Fp8BenchLayer(BenchLayer):
    """A workload's random layer on the GPU; hidden states are torch (T, H), float8_e4m3fn.

    The other forms of the weights hold the same numbers and are made at first use.

    Attributes
    ----------
    prepared : Fp8Layer
        CuPy arrays, as the operations of this package take them.
    """

    prepared: Fp8Layer

    @cached_property
    def w1(self) -> Tensor:
        """FC1 weights in logical order, ``[up; gate]``: torch (EL, 2I, H), float8_e4m3fn."""
        return to_library(unprepare_gemm1_weights(self.prepared.weights.gemm1_weights), "torch")

    @cached_property
    def w2(self) -> Tensor:
        """FC2 weights in logical order: torch (EL, H, I), float8_e4m3fn."""
        return to_library(unprepare_gemm2_weights(self.prepared.weights.gemm2_weights), "torch")

    @property
    def input_factor(self) -> float:
        """What the hidden states are multiplied by to get their values."""
        return 1 / INPUT_SCALE

    @property
    def intermediate_factor(self) -> float:
        """What the quantized FC1 output is multiplied by to get its values."""
        return 1 / INTERMEDIATE_SCALE

    @cached_property
    def fc1_factor(self) -> Tensor:
        """From raw FC1 sums to values: torch (EL,), float32."""
        return to_library(self.prepared.weights.output1_scales_gate_scalar, "torch")

    @cached_property
    def fc2_factor(self) -> Tensor:
        """From raw FC2 sums to values: torch (EL,), float32."""
        return to_library(self.prepared.weights.output2_scales_scalar, "torch")

    @property
    def w1_factor(self) -> Tensor:
        """From FC1 codes to weights: torch (EL,), float32."""
        return self.fc1_factor / self.input_factor

    @property
    def w2_factor(self) -> Tensor:
        """From FC2 codes to weights: torch (EL,), float32."""
        return self.fc2_factor / self.intermediate_factor

    def make_hidden(self, num_tokens: int, seed: int) -> Tensor:
        """Quantize standard normal rows."""
        import cupy

        hidden = make_hidden_states(num_tokens, self.workload.hidden_size, seed, xp=cupy)
        return to_library(hidden, "torch")

    def work_of(self, routings: list[Ids]) -> Work:
        """Count one byte a weight."""
        return work_of(self.workload, routings)

    def arguments(self, hidden: Tensor, ids: Ids, weights: NDArray[np.float32]) -> Arguments:
        """Keyword arguments of the operation, from packed routing words; torch tensors."""
        call = self.prepared.arguments(hidden, pack_topk_ids(ids, weights))
        return move_arguments(call, "torch")

    def call(self, hidden: Tensor, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Make a call from packed routing words."""
        import torch

        arguments = self.arguments(hidden, ids, weights)
        output = torch.full(hidden.shape, torch.nan, dtype=torch.bfloat16, device=hidden.device)
        return lambda: trtllm_fp8_per_tensor_scale_routed_moe(**arguments, output=output)

    def hidden_values(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """Codes times the input factor."""
        import torch

        return torch.stack([hidden[token].float() for token in tokens]) * self.input_factor

    def expert_values(self, expert: int) -> tuple[Tensor, Tensor]:
        """Codes times the weight factors."""
        w1 = self.w1[expert].float() * self.w1_factor[expert]
        return w1, self.w2[expert].float() * self.w2_factor[expert]

    def activated(self, expert: int, up: Tensor, gate: Tensor) -> Tensor:
        """Round to E4M3 at the intermediate factor."""
        import torch

        values = up * torch.nn.functional.silu(gate) / self.intermediate_factor
        codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.float() * self.intermediate_factor


def make_fp8_bench_layer(workload: Workload, seed: int = 0) -> Fp8BenchLayer:
    """Quantize normal random weights on the GPU."""
    import cupy

    layer = make_fp8_layer(
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_experts=workload.num_experts,
        local=(0, workload.local_num_experts),
        seed=seed,
        xp=cupy,
    )
    return Fp8BenchLayer(workload, "fp8", "whole", layer)
