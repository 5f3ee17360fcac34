"""Marlin's layer with MXFP4 weights, which comes with vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.contenders import Contender, import_failure, not_installed
from cupy_moe.bench.fp4 import Fp4BenchLayer, Tokens
from cupy_moe.bench.workloads import Ids

__all__ = ["Marlin"]

# Where the function has been, newest first.
HOMES = (
    "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
    "vllm.model_executor.layers.fused_moe.fused_marlin_moe",
)
UTILITIES = "vllm.model_executor.layers.quantization.utils"
GROUP = 32


def _fused_marlin_moe() -> Callable[..., Any]:
    for home in HOMES:
        try:
            function: Callable[..., Any] = import_module(home).fused_marlin_moe
        except (ImportError, AttributeError):
            continue
        return function
    raise ImportError(f"no fused_marlin_moe in {' or '.join(HOMES)}")


def _import_all() -> None:
    _fused_marlin_moe()
    import_module(f"{UTILITIES}.marlin_utils_fp4")


class Marlin(Contender):
    """``fused_marlin_moe`` of vLLM."""

    key = "marlin"
    name = "Marlin W4A16"
    package = "vllm"
    scope = "whole layer from expert ids, sorting included, its own choice of blocks"

    @classmethod
    def missing(cls) -> str | None:
        """Reason if vLLM is not installed or has no such layer."""
        # An extension that was built for another torch raises anything.
        return not_installed(cls.package) or import_failure(cls.package, _import_all)

    def __init__(self, layer: Fp4BenchLayer) -> None:
        """Repack weights and scales; FC1 is ``[gate; up]`` here."""
        import torch

        def swapped(matrix: Any) -> Any:
            up, gate = matrix.chunk(2, dim=1)
            return torch.cat([gate, up], dim=1)

        self._w1, self._w2 = _repacked(swapped(layer.w1)), _repacked(layer.w2)
        self._w1_scales = _permuted(swapped(layer.w1_scales))
        self._w2_scales = _permuted(layer.w2_scales)

    def prepare(self, hidden: Tokens, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Bind the arguments that this version takes."""
        import torch
        from vllm.scalar_type import scalar_types

        function, device = _fused_marlin_moe(), hidden.values.device
        arguments = {
            "hidden_states": hidden.values,
            "w1": self._w1,
            "w2": self._w2,
            "bias1": None,
            "bias2": None,
            "w1_scale": self._w1_scales,
            "w2_scale": self._w2_scales,
            "topk_weights": torch.from_numpy(weights).to(device),
            "topk_ids": torch.from_numpy(ids).to(device),
            "quant_type_id": scalar_types.float4_e2m1f.id,
        }
        if "gating_output" in inspect.signature(function).parameters:
            arguments["gating_output"] = None
        return lambda: function(**arguments)


def _repacked(weights: Any) -> Any:
    """Weights (E, N, K/2) in Marlin's order."""
    import torch
    from vllm import _custom_ops

    no_order = torch.empty(0, dtype=torch.int, device=weights.device)
    _, size_n, size_bytes = weights.shape
    return torch.stack(
        [
            _custom_ops.gptq_marlin_repack(
                b_q_weight=matrix.view(torch.int32).T.contiguous(),
                perm=no_order,
                size_k=2 * size_bytes,
                size_n=size_n,
                num_bits=4,
            )
            for matrix in weights
        ]
    )


def _permuted(scales: Any) -> Any:
    """UE8M0 scales (E, N, K/32) in Marlin's order."""
    import torch

    permute = import_module(f"{UTILITIES}.marlin_utils").marlin_permute_scales
    process = import_module(f"{UTILITIES}.marlin_utils_fp4").mxfp4_marlin_process_scales
    _, size_n, num_groups = scales.shape
    wide = scales.view(torch.float8_e8m0fnu).bfloat16()
    sizes = {"size_k": num_groups * GROUP, "size_n": size_n, "group_size": GROUP}
    return torch.stack([process(permute(s=matrix.T, **sizes)) for matrix in wide])
