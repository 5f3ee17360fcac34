"""torch's grouped FP8 GEMM: the two GEMMs of the layer, without anything between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.layers import BenchLayer
from cupy_moe.bench.peers.assignments import local_assignments
from cupy_moe.bench.workloads import Ids
from cupy_moe.testing.inputs import make_hidden_states, to_library

__all__ = ["TorchGroupedGemm"]


class TorchGroupedGemm(Contender):
    """``torch._scaled_grouped_mm`` twice, on rows that are gathered and sorted beforehand."""

    key = "torch"
    name = "torch grouped GEMM"
    package = "torch"
    scope = (
        "two GEMMs alone (row scales, fast accumulation); not timed: gather, activation, "
        "quantization, sum"
    )
    whole_layer = False

    @classmethod
    def missing(cls) -> str | None:
        """Reason if this torch or GPU has no such GEMM."""
        import torch

        if not hasattr(torch, "_scaled_grouped_mm"):
            return f"torch {torch.__version__} has no _scaled_grouped_mm (2.7 or newer has)"
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10):
            return "torch._scaled_grouped_mm needs compute capability 9.0 or 10.x"
        return None

    def __init__(self, layer: BenchLayer) -> None:
        """Share the logical weights; expand the scales to one a row."""
        workload = layer.workload
        self._workload = workload
        self._w1, self._w2 = layer.w1.transpose(1, 2), layer.w2.transpose(1, 2)
        rows1, rows2 = 2 * workload.intermediate_size, workload.hidden_size
        self._w1_scales = layer.w1_factor[:, None].repeat(1, rows1)
        self._w2_scales = layer.w2_factor[:, None].repeat(1, rows2)
        self._factors = layer.input_factor, layer.intermediate_factor

    def prepare(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Gather the rows, and make up an FC1 output of normal random numbers."""
        import cupy
        import torch

        assigned = local_assignments(self._workload, ids)
        order = np.argsort(assigned.experts, kind="stable")
        counts = np.bincount(assigned.experts, minlength=self._workload.local_num_experts)
        ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(hidden.device)
        tokens = torch.from_numpy(assigned.tokens[order]).to(hidden.device)
        x = hidden.view(torch.uint8)[tokens].view(hidden.dtype)
        intermediate = make_hidden_states(
            assigned.num_rows, self._workload.intermediate_size, xp=cupy
        )
        y = to_library(intermediate, "torch")
        x_scales, y_scales = (
            torch.full((assigned.num_rows,), factor, dtype=torch.float32, device=hidden.device)
            for factor in self._factors
        )

        def gemm(a: Any, b: Any, a_scales: Any, b_scales: Any) -> Any:
            return torch._scaled_grouped_mm(
                a, b, a_scales, b_scales, ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        def call() -> Any:
            gemm(x, self._w1, x_scales, self._w1_scales)
            return gemm(y, self._w2, y_scales, self._w2_scales)

        return call
