"""The layer under test in every form that a contender wants, and the batches that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.workloads import Ids, Work, Workload, make_routings, work_of
from cupy_moe.testing.inputs import (
    INPUT_SCALE,
    INTERMEDIATE_SCALE,
    Fp8Layer,
    make_fp8_layer,
    make_hidden_states,
    to_library,
)
from cupy_moe.weights.layouts import unprepare_gemm1_weights, unprepare_gemm2_weights

__all__ = ["Batch", "BenchLayer", "make_batch", "make_layer"]

Tensor = Any  # torch.Tensor


@dataclass(frozen=True, eq=False)
class BenchLayer:
    """A workload's random layer on the GPU.

    The other forms hold the same numbers and are made at first use.

    Attributes
    ----------
    workload : Workload
    prepared : Fp8Layer
        CuPy arrays, as the operations of this package take them.
    """

    workload: Workload
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


def make_layer(workload: Workload, seed: int = 0) -> BenchLayer:
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
    return BenchLayer(workload, layer)


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens of a call, and the routings of all calls of a graph.

    Attributes
    ----------
    hidden : torch.Tensor (T, H), float8_e4m3fn
    routings : list of numpy.ndarray (T, K), int32
    weights : numpy.ndarray (T, K), float32
        The same in every call.
    work : Work
        Average of the calls.
    """

    hidden: Tensor
    routings: list[Ids]
    weights: NDArray[np.float32]
    work: Work

    @property
    def num_tokens(self) -> int:
        """Tokens of a call."""
        return int(self.hidden.shape[0])


def make_batch(workload: Workload, num_tokens: int, seed: int = 0) -> Batch:
    """Make standard normal hidden states and uniform random routings of equal weights."""
    import cupy

    hidden = make_hidden_states(num_tokens, workload.hidden_size, seed, xp=cupy)
    routings = make_routings(workload, num_tokens, seed)
    return Batch(
        hidden=to_library(hidden, "torch"),
        routings=routings,
        weights=np.full(routings[0].shape, 1 / workload.top_k, np.float32),
        work=work_of(workload, routings),
    )
