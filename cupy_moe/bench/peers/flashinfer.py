"""FlashInfer's fused layer on CUTLASS kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender, import_failure, installed, not_installed
from cupy_moe.bench.fp4 import Fp4BenchLayer, Tokens
from cupy_moe.bench.fp8 import Fp8BenchLayer
from cupy_moe.bench.workloads import TOKENS, Ids

__all__ = ["FlashInferCutlass", "FlashInferMxfp4"]


class _FlashInfer(Contender):
    """``flashinfer.fused_moe.cutlass_fused_moe`` with its best tactics."""

    key = "flashinfer"
    name = "FlashInfer CUTLASS"
    package = "flashinfer-python"
    scope = "whole layer from expert ids, sorting included, tactics tuned beforehand"
    options: ClassVar[dict[str, Any]] = {}

    _weights: tuple[Any, Any]
    _scales: list[Any]
    _num_ranks: int

    @classmethod
    def missing(cls) -> str | None:
        """Reason if the package is not installed."""
        return not_installed(cls.package)

    def prepare(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Tune for the number of tokens."""
        import torch
        from flashinfer import autotune
        from flashinfer.fused_moe import cutlass_fused_moe

        device_ids = torch.from_numpy(ids).to(hidden.device)
        device_weights = torch.from_numpy(weights).to(hidden.device)
        output = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)

        def call() -> Any:
            cutlass_fused_moe(
                hidden,
                device_ids,
                device_weights,
                *self._weights,
                torch.bfloat16,
                quant_scales=self._scales,
                ep_size=self._num_ranks,
                ep_rank=0,
                output=output,
                tune_max_num_tokens=max(TOKENS),
                **self.options,
            )
            return output

        with autotune(True):
            call()
        return call


class FlashInferCutlass(_FlashInfer):
    """FP8 with scales per tensor."""

    def __init__(self, layer: Fp8BenchLayer) -> None:
        """Share the logical weights: FC1 is ``[up; gate]`` here too."""
        import torch

        workload = layer.workload
        self._weights = layer.w1, layer.w2
        scalar = torch.tensor([1 / layer.intermediate_factor, layer.input_factor]).cuda()
        self._scales = [layer.fc1_factor, scalar[0], layer.fc2_factor, scalar[1]]
        self._num_ranks = workload.num_experts // workload.local_num_experts


class FlashInferMxfp4(_FlashInfer):
    """MXFP4 weights and BF16 hidden states, which it has on Hopper only."""

    options: ClassVar[dict[str, Any]] = {"use_w4_group_scaling": True}

    @classmethod
    def missing(cls) -> str | None:
        """Reason if the package, its layouts or the GPU are missing."""
        if reason := super().missing():
            return reason
        import torch

        if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
            return "FlashInfer's layer of MXFP4 weights and BF16 tokens needs capability 9.0"
        if reason := import_failure("flashinfer", lambda: import_module("flashinfer.fused_moe")):
            return reason
        from flashinfer import fused_moe

        if not hasattr(fused_moe, "interleave_moe_weights_for_sm90_mixed_gemm"):
            return f"flashinfer-python {installed(cls.package)} has other layouts of MXFP4 weights"
        return None

    def __init__(self, layer: Fp4BenchLayer) -> None:
        """Interleave weights and scales: FC1 is ``[up; gate]`` here too."""
        import torch
        from flashinfer import fused_moe

        workload = layer.workload
        interleave = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm
        self._weights = interleave(layer.w1, "fp4"), interleave(layer.w2, "fp4")
        self._scales = [
            fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales).view(torch.int32)
            for scales in (layer.w1_scales, layer.w2_scales)
        ]
        self._num_ranks = workload.num_experts // workload.local_num_experts

    def prepare(self, hidden: Tokens, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Take BF16 hidden states."""
        return super().prepare(hidden.values, ids, weights)
