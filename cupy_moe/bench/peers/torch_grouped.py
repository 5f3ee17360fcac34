"""torch's grouped GEMMs: in FP8 the two GEMMs alone, in BF16 the layer around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.fp4 import Fp4BenchLayer, Tokens
from cupy_moe.bench.fp8 import Fp8BenchLayer
from cupy_moe.bench.peers.assignments import Assignments, expert_order, local_assignments
from cupy_moe.bench.peers.weighted_sum import weighted_sum
from cupy_moe.bench.workloads import Ids, Workload
from cupy_moe.testing.inputs import make_hidden_states, to_library

__all__ = ["TorchBf16", "TorchGroupedGemm"]


def _sorted_rows(workload: Workload, ids: Ids, device: Any) -> tuple[Assignments, Any, Any]:
    """Pairs in the order of the experts; their tokens and the experts' ends as tensors."""
    import torch

    assigned = expert_order(local_assignments(workload, ids))
    counts = np.bincount(assigned.experts, minlength=workload.local_num_experts)
    ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(device)
    return assigned, torch.from_numpy(assigned.tokens).to(device), ends


def _missing(name: str, since: str) -> str | None:
    import torch

    if not hasattr(torch, name):
        return f"torch {torch.__version__} has no {name} ({since} or newer has)"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10):
        return f"torch.{name} needs compute capability 9.0 or 10.x"
    return None


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
        return _missing("_scaled_grouped_mm", "2.7")

    def __init__(self, layer: Fp8BenchLayer) -> None:
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

        assigned, tokens, ends = _sorted_rows(self._workload, ids, hidden.device)
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


class TorchBf16(Contender):
    """``torch._grouped_mm`` on dequantized weights: a layer that was not quantized."""

    key = "torch"
    name = "torch BF16"
    package = "torch"
    scope = (
        "whole layer on BF16 copies of the weights (3.8 times the bytes): gather, grouped GEMM, "
        "SwiGLU of torch, grouped GEMM, weighted sum; not timed: sorting by expert"
    )

    @classmethod
    def missing(cls) -> str | None:
        """Reason if this torch or GPU has no such GEMM."""
        return _missing("_grouped_mm", "2.8")

    def __init__(self, layer: Fp4BenchLayer) -> None:
        """Dequantize; BF16 holds every MXFP4 number."""
        import torch

        experts = range(layer.workload.local_num_experts)
        pairs = [[w.bfloat16() for w in layer.expert_values(expert)] for expert in experts]
        self._w1, self._w2 = (
            torch.stack(matrices).transpose(1, 2) for matrices in zip(*pairs, strict=True)
        )
        self._workload = layer.workload

    def prepare(self, hidden: Tokens, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Sort the local slots by expert."""
        import torch

        x = hidden.values
        assigned, tokens, ends = _sorted_rows(self._workload, ids, x.device)
        row_of_slot = torch.from_numpy(assigned.row_of_slot).to(x.device)
        slot_weights = torch.from_numpy(weights).to(x.device)
        output, words = torch.empty_like(x), x.view(torch.int64)

        def call() -> Any:
            rows = words.index_select(0, tokens).view(x.dtype)
            up, gate = torch._grouped_mm(rows, self._w1, offs=ends).chunk(2, dim=1)
            y = up * torch.nn.functional.silu(gate)
            z = torch._grouped_mm(y, self._w2, offs=ends)
            return weighted_sum(z, row_of_slot, slot_weights, output)

        return call
