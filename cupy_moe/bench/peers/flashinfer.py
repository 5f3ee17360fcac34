"""FlashInfer's fused layer on CUTLASS kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender, installed
from cupy_moe.bench.layers import BenchLayer
from cupy_moe.bench.workloads import TOKENS, Ids

__all__ = ["FlashInferCutlass"]


class FlashInferCutlass(Contender):
    """``flashinfer.fused_moe.cutlass_fused_moe`` with its best tactics."""

    key = "flashinfer"
    name = "FlashInfer CUTLASS"
    package = "flashinfer-python"
    scope = "whole layer from expert ids, sorting included, tactics tuned beforehand"

    @classmethod
    def missing(cls) -> str | None:
        """Reason if the package is not installed."""
        if installed(cls.package) is None:
            return "flashinfer-python is not installed: pip install flashinfer-python"
        return None

    def __init__(self, layer: BenchLayer) -> None:
        """Share the logical weights: FC1 is ``[up; gate]`` here too."""
        import torch

        workload = layer.workload
        self._weights = layer.w1, layer.w2
        scalar = torch.tensor([1 / layer.intermediate_factor, layer.input_factor]).cuda()
        self._scales = [layer.fc1_factor, scalar[0], layer.fc2_factor, scalar[1]]
        self._num_ranks = workload.num_experts // workload.local_num_experts

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
            )
            return output

        with autotune(True):
            call()
        return call
