"""Humming: GEMMs compiled at run time, composed to a layer as its documentation shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender, import_failure, not_installed
from cupy_moe.bench.fp4 import Fp4BenchLayer, Tokens
from cupy_moe.bench.fp8 import Fp8BenchLayer
from cupy_moe.bench.peers.assignments import expert_order, local_assignments
from cupy_moe.bench.peers.humming_gemm import HummingGemm, swiglu
from cupy_moe.bench.peers.weighted_sum import weighted_sum
from cupy_moe.bench.workloads import Ids, Workload

__all__ = ["Humming", "HummingMxfp4Grouped", "HummingMxfp4Indexed"]

E4M3_WEIGHTS = {"b_dtype": "float8e4m3", "bs_dtype": "float32", "weight_scale_type": "tensor"}
E4M3_INPUTS = {"a_dtype": "float8e4m3", "input_quant_mode": "static_tensor"}
MXFP4_WEIGHTS = {
    "b_dtype": "float4e2m1",
    "bs_dtype": "float8e8m0",
    "weight_scale_group_size": 32,
}


class _Humming(Contender):
    """FC1, SwiGLU, FC2 and a weighted sum, a launch each; subclasses make the two GEMMs.

    Attributes
    ----------
    grouped : bool
        Whether tokens are gathered in the order of the experts first, or the GEMMs find them by
        index.
    """

    package = "humming-kernels"
    grouped: ClassVar[bool] = False

    _workload: Workload
    _fc1: HummingGemm
    _fc2: HummingGemm

    @classmethod
    def missing(cls) -> str | None:
        """Reason if the package is not installed or cannot be imported."""
        requirement = f'"{cls.package}[cu13]" (or cu12, as torch is built)'
        # It looks for GPU, compiler and launcher when imported.
        return not_installed(cls.package, requirement) or import_failure(
            cls.package, lambda: import_module("humming")
        )

    def _take_over(
        self,
        layer: Fp4BenchLayer | Fp8BenchLayer,
        scales: Iterable[Any],
        weight_format: dict[str, Any],
        *,
        input_format: dict[str, Any] | None = None,
        input_factors: Iterable[float | None] = (None, None),
    ) -> None:
        """Transform the weights of FC1 and FC2, each with its scales and static factor."""
        self._workload = layer.workload
        weights = (layer.w1, layer.w2)
        self._fc1, self._fc2 = (
            HummingGemm.make(
                weight, scale, weight_format, input_format=input_format, input_factor=factor
            )
            for weight, scale, factor in zip(weights, scales, input_factors, strict=True)
        )

    def prepare(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Sort the local slots by expert.

        Where only some slots are local, or the GEMMs are grouped, their tokens' rows are gathered
        first, in the timed part.
        """
        import torch

        assigned = local_assignments(self._workload, ids)
        num_experts = self._workload.local_num_experts
        gathers = self.grouped or not assigned.is_every_slot
        if self.grouped:
            assigned = expert_order(assigned)
            counts = np.bincount(assigned.experts, minlength=num_experts)
            fc1, fc2 = self._fc1.grouped(counts), self._fc2.grouped(counts)
        else:
            slots_per_row = 1 if gathers else ids.shape[1]
            fc1 = self._fc1.indexed(assigned.experts, num_experts, slots_per_row)
            fc2 = self._fc2.indexed(assigned.experts, num_experts, 1)
        tokens, row_of_slot, slot_weights = (
            torch.from_numpy(array).to(hidden.device)
            for array in (assigned.tokens, assigned.row_of_slot, weights)
        )
        output = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
        words = hidden.view(torch.int64)

        def call() -> Any:
            x = words.index_select(0, tokens).view(hidden.dtype) if gathers else hidden
            rows = fc2(swiglu(self._fc2, fc1(x)))
            return weighted_sum(rows, row_of_slot, slot_weights, output)

        return call


class Humming(_Humming):
    """E4M3 with static scales per tensor."""

    key = "humming"
    name = "Humming W8A8"
    scope = "whole layer, its own choice of tiles; not timed: sorting by expert"

    def __init__(self, layer: Fp8BenchLayer) -> None:
        """Transform the weights, one scale an expert."""
        self._take_over(
            layer,
            (layer.w1_factor, layer.w2_factor),
            E4M3_WEIGHTS,
            input_format=E4M3_INPUTS,
            input_factors=(layer.input_factor, layer.intermediate_factor),
        )


class HummingMxfp4Indexed(_Humming):
    """MXFP4 weights and BF16 rows that the GEMMs find by index."""

    key = "humming-indexed"
    name = "Humming W4A16 indexed"
    scope = "whole layer, its own choice of tiles; not timed: sorting by expert"

    def __init__(self, layer: Fp4BenchLayer) -> None:
        """Transform the weights."""
        import torch

        scales = (layer.w1_scales, layer.w2_scales)
        self._take_over(layer, (s.view(torch.float8_e8m0fnu) for s in scales), MXFP4_WEIGHTS)

    def prepare(self, hidden: Tokens, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Take BF16 hidden states."""
        return super().prepare(hidden.values, ids, weights)


class HummingMxfp4Grouped(HummingMxfp4Indexed):
    """As indexed, on a copy of the rows in the order of the experts."""

    key = "humming-grouped"
    name = "Humming W4A16 grouped"
    scope = "whole layer, its own choice of tiles, gather included; not timed: sorting by expert"
    grouped = True
