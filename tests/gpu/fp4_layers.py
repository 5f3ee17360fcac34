"""What the GPU tests of FP4 layers share: kernels, partitions, arrays on either side."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from cupy_moe.cli import precompile
from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.plan import all_specializations
from cupy_moe.runtime.streams import GreenPartitions
from cupy_moe.testing.compare import FP4_BF16, FP4_MXFP8, FP4_NVFP4, to_host
from cupy_moe.testing.fp4_inputs import HOST_RESOURCES
from cupy_moe.testing.inputs import to_library
from cupy_moe.types import MoeFormat
from tests.fp8_calls import aligned

__all__ = [
    "TOLERANCES",
    "compile_kernels",
    "on_host",
    "on_library",
    "partition_resources",
]

TOLERANCES = {"nvfp4": FP4_NVFP4, "mxfp8": FP4_MXFP8, "bf16": FP4_BF16}


@cache
def compile_kernels() -> None:
    """Fill the kernel cache for this GPU, many kernels at a time."""
    for arch in precompile.present_architectures():
        formats = [dict(spec.config).get("moe_format") for spec in all_specializations(arch)]
        wanted = [i for i, f in enumerate(formats) if f not in (None, MoeFormat.Fp8)]
        jobs = min(len(wanted), os.cpu_count() or 1)
        assert not any(precompile._compile_all(arch, wanted, jobs))


@cache
def partition_resources() -> MoePartitionResources:
    """Two halves of the GPU, for all tests."""
    partitions = GreenPartitions(0)
    resources = MoePartitionResources(partitions.streams)
    _kept.append(partitions)
    return resources


_kept: list[GreenPartitions] = []


def on_library(
    arguments: dict[str, Any], library: str, resources: MoePartitionResources | None = None
) -> dict[str, Any]:
    """Move every array, also those in lists, to a library in CUDA memory.

    A partitioned call gets its resources.
    """

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(v) for v in value]
        return to_library(value, library) if hasattr(value, "dtype") else value

    moved = {name: move(value) for name, value in arguments.items()}
    if "partition_resources" in moved:
        moved["partition_resources"] = resources or partition_resources()
    return moved


def on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call on arrays in host memory, which runs the reference; nothing is shared."""
    written = ("output", "routing_replay_out")

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(v) for v in value]
        return aligned(to_host(value)) if hasattr(value, "dtype") else value

    moved = {n: move(v) for n, v in arguments.items() if n not in written}
    if "partition_resources" in moved:
        moved["partition_resources"] = HOST_RESOURCES
    return moved
