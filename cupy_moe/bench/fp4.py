"""FP4 layers of known models: what a call reads and multiplies, and how long it takes.

    bytes = experts hit * 3 * H * I * (1/2 + 1/block)  +  hidden states with scales  +  2 * T * H
    flops = 2 * assignments * 3 * H * I

with one byte of scale per block of 32 weights, or 16 in NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_moe.bench.rows import Timing
from cupy_moe.bench.timing import capture, interleaved_us, median_us, synchronize
from cupy_moe.bench.workloads import Ids, Work, Workload, make_routings, work_of
from cupy_moe.fused_moe import (
    MoePartitionResources,
    prims_ts_fp4_block_scale_moe,
    prims_ts_fp4_block_scale_moe_partitioned,
)
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer, fp4_tokens
from cupy_moe.testing.inputs import to_library

__all__ = [
    "FORMS",
    "FP4_WORKLOADS",
    "MODES",
    "Fp4BenchLayer",
    "Fp4Ceilings",
    "Fp4Row",
    "fp4_work",
    "make_fp4_bench_layer",
    "measure_fp4",
    "measure_fp4_ceilings",
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


def padded(workload: Workload, form: str) -> Workload:
    """Sizes as a form of the operation takes them."""
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


@dataclass(frozen=True)
class Fp4Ceilings:
    """Streaming read, and torch's BF16 product of two 8192 x 8192 matrices, after a rest."""

    read_bytes_per_s: float
    bf16_flops_per_s: float

    def floor_us(self, work: Work) -> float:
        """Time that neither memory nor tensor cores can beat."""
        memory = work.num_bytes / self.read_bytes_per_s
        return 1e6 * max(memory, work.flops / self.bf16_flops_per_s)


def measure_fp4_ceilings(read_bytes_per_s: float, size: int = 8192) -> Fp4Ceilings:
    """Measure the BF16 product on random data."""
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us = median_us(lambda: a @ b.t())
    return Fp4Ceilings(read_bytes_per_s, 2 * size**3 / (1e-6 * us))


@dataclass(frozen=True, eq=False)
class Fp4BenchLayer:
    """A workload's random layer on the GPU.

    Attributes
    ----------
    workload : Workload
        Of padded sizes.
    mode : {"bf16", "mxfp8", "nvfp4"}
    form : {"whole", "tp_n_tp_n", "tp_n_tp_k"}
    arguments : dict
        Keyword arguments of the operation with torch arrays; tokens and routing are any.
    """

    workload: Workload
    mode: str
    form: str
    arguments: dict[str, Any]

    def call(self, tokens: tuple[Any, Any], ids: Ids) -> Callable[[], Any]:
        """Make a call that returns its output; the weights of the slots are equal."""
        import torch

        arguments = self.arguments | {
            "hidden_states": tokens[0],
            "hidden_states_scale": tokens[1],
            "topk_ids": torch.from_numpy(ids).cuda(),
            "topk_weights": torch.full(ids.shape, 1 / ids.shape[1], device="cuda").bfloat16(),
        }
        is_whole = self.form == "whole"
        operation: Callable[..., list[Any]] = (
            prims_ts_fp4_block_scale_moe if is_whole else prims_ts_fp4_block_scale_moe_partitioned
        )
        return lambda: operation(**arguments)[0]

    def tokens(self, num_tokens: int, seed: int = 0) -> tuple[Any, Any]:
        """Make standard normal hidden states of the mode, and their scales."""
        import cupy

        rng = cupy.random.default_rng(seed)
        parts = fp4_tokens(self.mode, num_tokens, self.workload.hidden_size, rng, cupy)
        hidden, scales = (None if p is None else to_library(p, "torch") for p in parts)
        return hidden, scales


def make_fp4_bench_layer(
    workload: Workload,
    mode: str,
    form: str = "whole",
    resources: MoePartitionResources | None = None,
) -> Fp4BenchLayer:
    """Make random weights on the GPU; a partitioned form wants the handle of its partitions."""
    import cupy

    workload = padded(workload, form)
    sizes = Fp4Sizes(
        1,
        hidden=workload.hidden_size,
        inter=workload.intermediate_size,
        experts=workload.num_experts,
        top_k=workload.top_k,
        weights_dtype="bfloat16",
    )

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(v) for v in value]
        return to_library(value, "torch") if hasattr(value, "dtype") else value

    made = fp4_layer(mode, form, sizes, xp=cupy)
    arguments = {name: move(value) for name, value in made.items()}
    if form != "whole":
        arguments["partition_resources"] = resources
    return Fp4BenchLayer(workload, mode, form, arguments)


@dataclass(frozen=True)
class Fp4Row:
    """A layer at one number of tokens."""

    workload: Workload
    mode: str
    form: str
    num_tokens: int
    num_calls: int
    work: Work
    floor_us: float
    timing: Timing

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, units in the keys."""
        us = self.timing.us
        return {
            "workload": self.workload.key,
            "sizes": self.workload.title,
            "mode": self.mode,
            "form": self.form,
            "tokens": self.num_tokens,
            "calls_in_graph": self.num_calls,
            "experts_hit": self.work.experts_hit,
            "floor_us": self.floor_us,
            "us": us,
            "us_min": self.timing.us_min,
            "us_max": self.timing.us_max,
            "tb_per_s": self.work.num_bytes / us / 1e6,
            "tflops": self.work.flops / us / 1e6,
            "share_of_floor": self.floor_us / us,
        }


def measure_fp4(
    layer: Fp4BenchLayer, num_tokens: int, ceilings: Fp4Ceilings, *, replays: int
) -> Fp4Row:
    """Time a graph of calls with different routings, each run after a rest.

    Raises
    ------
    RuntimeError
        The output is not finite, or that of one token alone differs from its row in the batch.
    """
    routings = make_routings(layer.workload, num_tokens)
    tokens = layer.tokens(num_tokens)
    _check(layer, tokens, routings[-1])
    captured = capture([layer.call(tokens, ids) for ids in routings])
    captured.replay()
    synchronize()
    times = interleaved_us({"": captured.replay}, replays)[""]
    work = fp4_work(layer.workload, layer.mode, routings)
    return Fp4Row(
        layer.workload,
        layer.mode,
        layer.form,
        num_tokens,
        len(routings),
        work,
        ceilings.floor_us(work),
        Timing.of(times, len(routings)),
    )


def _check(layer: Fp4BenchLayer, tokens: tuple[Any, Any], ids: Ids) -> None:
    output = layer.call(tokens, ids)()
    last = tuple(None if part is None else part[-1:].clone() for part in tokens)
    alone = layer.call((last[0], last[1]), np.ascontiguousarray(ids[-1:]))()
    what = f"bench: {layer.workload.key}, {layer.mode}, {layer.form}, {len(ids)} tokens"
    if not bool(output.isfinite().all()) or not bool(output.any()):
        raise RuntimeError(f"{what}: the output is zero or not finite.")
    if not bool((alone[0] == output[-1]).all()):
        raise RuntimeError(f"{what}: a token alone gives another row than in the batch.")
