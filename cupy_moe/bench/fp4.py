"""FP4 layers as the benchmark runs them: what a call reads and multiplies, whole or in partitions.

    bytes = experts hit * 3 * H * I * (1/2 + 1/block)  +  hidden states with scales  +  2 * T * H
    flops = 2 * assignments * 3 * H * I

with one byte of scale per block of 32 weights, or 16 in NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.layers import BenchLayer, Tensor
from cupy_moe.bench.workloads import Ids, Work, Workload, work_of
from cupy_moe.formats import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    get_xp,
    pack_fp4,
    quantize_block_mxfp8,
    quantize_block_nvfp4,
)
from cupy_moe.fused_moe import (
    MoePartitionResources,
    prims_ts_fp4_block_scale_moe,
    prims_ts_fp4_block_scale_moe_partitioned,
)
from cupy_moe.runtime.arrays import TorchFramework, to_xp
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer, fp4_tokens, partition_weights
from cupy_moe.weights.layouts import (
    unprepare_gemm1_scales,
    unprepare_gemm1_weights,
    unprepare_gemm2_scales,
    unprepare_gemm2_weights,
)

__all__ = [
    "FORMS",
    "FP4_WORKLOADS",
    "MODES",
    "Fp4BenchLayer",
    "Tokens",
    "fp4_work",
    "make_fp4_bench_layer",
    "padded",
]

MODES = ("bf16", "mxfp8", "nvfp4")
FORMS = ("whole", "tp_n_tp_n", "tp_n_tp_k")

FP4_WORKLOADS: Mapping[str, Workload] = {
    workload.key: workload
    for workload in (
        Workload("W-C", "gpt-oss-120b", 2880, 2880, 128, 4, 128),
        Workload("W-D", "Qwen3-235B-A22B", 4096, 1536, 128, 8, 128),
    )
}

_TOKEN_BITS = {"bf16": 16.0, "mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16}
_WHOLE_ONLY = ("gemm1_bias", "gemm2_bias", "routing_input_mode")


def padded(workload: Workload, form: str) -> Workload:
    """Sizes as a form of the operation takes them; all contenders get these."""
    multiple = 128 if form == "whole" else 256

    def up(size: int) -> int:
        return -(-size // multiple) * multiple

    return replace(
        workload,
        hidden_size=up(workload.hidden_size),
        intermediate_size=up(workload.intermediate_size),
    )


def _block(mode: str) -> int:
    return 16 if mode == "nvfp4" else 32


def fp4_work(workload: Workload, mode: str, routings: Sequence[Ids]) -> Work:
    """Count what the calls with these routings read, write and multiply, on average."""
    fp8 = work_of(workload, routings)
    elements = routings[0].shape[0] * workload.hidden_size
    weights = fp8.experts_hit * workload.expert_size * (0.5 + 1 / _block(mode))
    num_bytes = weights + elements * (_TOKEN_BITS[mode] / 8 + 2)
    return Work(fp8.experts_hit, fp8.assignments, num_bytes, fp8.flops)


class Tokens(NamedTuple):
    """Hidden states of a mode, as the operations take them, and their scales."""

    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True, eq=False)
class Fp4BenchLayer(BenchLayer):
    """A workload's random layer; hidden states are `Tokens`.

    Attributes
    ----------
    workload : Workload
        Of padded sizes.
    whole : dict
        Keyword arguments of the operation that is not partitioned, with torch arrays; tokens and
        routing are any.
    shards : dict or None
        What is different in a partition's call.
    """

    whole: dict[str, Any]
    shards: dict[str, Any] | None = None

    @property
    def device(self) -> Any:
        """Of all arrays."""
        return self.whole["gemm2_weights"].device

    @property
    def partition_sms(self) -> tuple[int, ...]:
        """Multiprocessors of each partition; none of a whole layer."""
        resources = (self.shards or {}).get("partition_resources")
        return () if resources is None else tuple(resources.sm_counts)

    @cached_property
    def w1(self) -> Tensor:
        """FC1 weights in logical order, ``[up; gate]``: torch (EL, 2I, H/2), uint8."""
        return unprepare_gemm1_weights(self.whole["gemm1_weights"])

    @cached_property
    def w2(self) -> Tensor:
        """FC2 weights in logical order: torch (EL, H, I/2), uint8."""
        return unprepare_gemm2_weights(self.whole["gemm2_weights"])

    @cached_property
    def w1_scales(self) -> Tensor:
        """Scales of ``w1``: torch (EL, 2I, H/block), uint8."""
        return unprepare_gemm1_scales(self.whole["gemm1_weights_scale"])

    @cached_property
    def w2_scales(self) -> Tensor:
        """Scales of ``w2``: torch (EL, H, I/block), uint8."""
        return unprepare_gemm2_scales(self.whole["gemm2_weights_scale"])

    def in_mode(self, mode: str) -> Fp4BenchLayer:
        """Return the layer for tokens of the other mode with the same weights."""
        assert _block(mode) == _block(self.mode)
        return replace(self, mode=mode)

    def partitioned(self, form: str, resources: MoePartitionResources) -> Fp4BenchLayer:
        """Return the same layer, cut in two."""
        sizes = _sizes(self.workload)
        shards = partition_weights(self.mode, form, sizes, self.whole)
        return replace(self, form=form, shards=shards | {"partition_resources": resources})

    def make_hidden(self, num_tokens: int, seed: int) -> Tokens:
        """Quantize standard normal rows to the mode."""
        xp = get_xp(to_xp(self.whole["gemm2_weights"])[0])
        rng = xp.random.default_rng(seed)
        hidden, scales = fp4_tokens(self.mode, num_tokens, self.workload.hidden_size, rng, xp)
        return Tokens(_to_torch(hidden), None if scales is None else _to_torch(scales))

    def work_of(self, routings: list[Ids]) -> Work:
        """Count half a byte a weight, and the scales."""
        return fp4_work(self.workload, self.mode, routings)

    def call(self, hidden: Tokens, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Make a call with given ids and BF16 weights."""
        import torch

        shape = ids.shape[0], self.workload.hidden_size
        arguments = self.whole | {
            "hidden_states": hidden.values,
            "hidden_states_scale": hidden.scales,
            "topk_ids": torch.from_numpy(ids).to(self.device),
            "topk_weights": torch.from_numpy(weights).to(self.device).bfloat16(),
            "output": torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device),
        }
        operation: Callable[..., list[Any]] = prims_ts_fp4_block_scale_moe
        if self.shards is not None:
            operation = prims_ts_fp4_block_scale_moe_partitioned
            arguments = {n: v for n, v in arguments.items() if n not in _WHOLE_ONLY} | self.shards
        return lambda: operation(**arguments)[0]

    def hidden_values(self, hidden: Tokens, tokens: list[int]) -> Tensor:
        """Widen, or dequantize."""
        if self.mode == "bf16":
            return hidden.values[tokens].float()
        values = _bytes(hidden.values)[tokens]
        scales = _bytes(hidden.scales).reshape(hidden.values.shape[0], -1)[tokens]
        dequantize = dequantize_mxfp8 if self.mode == "mxfp8" else dequantize_nvfp4
        return _to_torch(dequantize(values, scales))

    def expert_values(self, expert: int) -> tuple[Tensor, Tensor]:
        """Dequantize; the scale of FC2's output goes into its weights."""
        one = slice(expert, expert + 1)
        whole = self.whole
        matrices = (
            (unprepare_gemm1_weights, unprepare_gemm1_scales, "gemm1"),
            (unprepare_gemm2_weights, unprepare_gemm2_scales, "gemm2"),
        )
        dequantize = dequantize_nvfp4 if self.mode == "nvfp4" else dequantize_mxfp4
        w1, w2 = (
            _to_torch(
                dequantize(
                    _bytes(weights(whole[f"{name}_weights"][one]))[0],
                    _bytes(scales(whole[f"{name}_weights_scale"][one]))[0],
                )
            )
            for weights, scales, name in matrices
        )
        return w1, w2 * self._scalar("output2_scale_scalar", expert)

    def activated(self, expert: int, up: Tensor, gate: Tensor) -> Tensor:
        """Round to BF16, or quantize and dequantize."""
        import torch

        gate = gate * self._scalar("output1_scale_gate_scalar", expert)
        y = up * torch.nn.functional.silu(gate)
        if self.mode == "bf16":
            return y.bfloat16().float()
        values, _ = to_xp(y)
        if self.mode == "mxfp8":
            return _to_torch(dequantize_mxfp8(*quantize_block_mxfp8(values)))
        factor = self._scalar("output1_scale_scalar", expert)
        codes, scales = quantize_block_nvfp4(values, factor)
        return _to_torch(dequantize_nvfp4(pack_fp4(codes), scales))

    def _scalar(self, name: str, expert: int) -> float:
        """Scale of an expert's output; 1 where the mode has none."""
        return float(self.whole[name][expert]) if self.mode == "nvfp4" else 1.0


def _bytes(array: Tensor) -> Any:
    """NumPy or CuPy view of one-byte elements."""
    return to_xp(array)[0].view(np.uint8)


def _to_torch(array: Any) -> Tensor:
    """Torch tensor over the memory of a NumPy or CuPy array."""
    import torch

    return TorchFramework(torch).export(array)


def _sizes(workload: Workload) -> Fp4Sizes:
    return Fp4Sizes(
        1,
        hidden=workload.hidden_size,
        inter=workload.intermediate_size,
        experts=workload.num_experts,
        top_k=workload.top_k,
        weights_dtype="bfloat16",
    )


def make_fp4_bench_layer(
    workload: Workload,
    mode: str,
    form: str = "whole",
    resources: MoePartitionResources | None = None,
) -> Fp4BenchLayer:
    """Make random weights on the GPU; a partitioned form wants the handle of its partitions."""
    import cupy

    workload = padded(workload, form)
    made = fp4_layer(mode, "whole", _sizes(workload), xp=cupy)
    whole = {n: _to_torch(v) if hasattr(v, "dtype") else v for n, v in made.items()}
    layer = Fp4BenchLayer(workload, mode, "whole", whole)
    return layer if resources is None else layer.partitioned(form, resources)
