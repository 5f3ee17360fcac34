"""The stages of a mixture-of-experts layer on a GPU, in order, one launch each.

`cupy_moe.stages` says what comes before and after the GEMMs, `cupy_moe.partitioned_launches` where
partitions fork and join. Every call is graph-safe: grids and buffers follow from sizes, counts stay
on the device, nothing synchronizes.

Launches are bound first (sizes and addresses to parameter structs and configurations) and enqueued
then. Binding is a pure function of plain values; its latest results are remembered, so that a layer
that comes back with the same addresses, as from a caching allocator, costs its launches only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

from cupy_moe.gemm_launches import bind_fc1, bind_fc2
from cupy_moe.plan import KernelConfig, MoePlan, plan_moe
from cupy_moe.problem import Addresses, DeviceTraits, MoeProblem
from cupy_moe.runtime.compiler import capability_of
from cupy_moe.runtime.devices import (
    compute_capability,
    device_guard,
    sm_count,
    stream_is_capturing,
)
from cupy_moe.runtime.jit import Function, arch_for, load
from cupy_moe.runtime.launch import BoundLaunch
from cupy_moe.stage_inputs import Functions, StageInputs
from cupy_moe.stages import after_gemms, before_gemms
from cupy_moe.tiling import Tiling

__all__ = [
    "Binding",
    "Stages",
    "bind_stages",
    "compiled_for",
    "overrides",
    "plan_for",
    "tiled_as",
]

_FIRST_PDL_CAPABILITY = (9, 0)  # of the code: older kernels do not wait for their predecessor
_MAX_BOUND_LAYERS = 1024  # remembered, about 3 KiB each

_arch_override: ContextVar[str | None] = ContextVar("arch_override", default=None)
_tiling_override: ContextVar[Tiling | None] = ContextVar("tiling_override", default=None)


@contextmanager
def compiled_for(arch: str) -> Iterator[None]:
    """Run the code of another architecture inside the block, for tests of its code path.

    Parameters
    ----------
    arch : str
        A virtual architecture (``compute_80``), which the driver compiles for the present GPU.
    """
    token = _arch_override.set(arch)
    try:
        yield
    finally:
        _arch_override.reset(token)


@contextmanager
def tiled_as(tiling: Tiling) -> Iterator[None]:
    """Use a tiling instead of the plan's choice inside the block, to measure or compare them.

    Parameters
    ----------
    tiling : Tiling
        One of `cupy_moe.tiling.tile_candidates`.
    """
    token = _tiling_override.set(tiling)
    try:
        yield
    finally:
        _tiling_override.reset(token)


def overrides() -> tuple[str | None, Tiling | None]:
    """Architecture and tiling of the `compiled_for` and `tiled_as` blocks around the caller."""
    return _arch_override.get(), _tiling_override.get()


def _traits(device: int, arch: str | None) -> DeviceTraits:
    arch = arch or arch_for(compute_capability(device))
    return DeviceTraits(arch=arch, num_sms=sm_count(device))


@lru_cache(maxsize=4096)
def plan_for(problem: MoeProblem, device: int, arch: str | None, tiling: Tiling | None) -> MoePlan:
    """Plan for a device and the overrides in force."""
    return plan_moe(problem, _traits(device, arch), tiling)


@lru_cache(maxsize=4096)
def _load(
    problem: MoeProblem, device: int, arch: str | None, tiling: Tiling | None, stream: int
) -> Functions:
    """Load a plan's kernels; `stream` is part of the key only to reach the loader's check."""
    plan = plan_for(problem, device, arch, tiling)
    with device_guard(device):
        capturing = stream_is_capturing(stream)

    def function(config: KernelConfig) -> Function:
        return load(config.spec(), device, capturing=capturing, arch=arch)

    return Functions(
        route=function(plan.route) if plan.route else None,
        permute=function(plan.permute) if plan.permute else None,
        place=function(plan.place) if plan.place else None,
        fc1=function(plan.fc1),
        fc2=function(plan.fc2),
        add_rows=function(plan.add_rows) if plan.add_rows else None,
        finalize=function(plan.finalize) if plan.finalize else None,
    )


class Binding(NamedTuple):
    """All that the launches of a layer follow from, but for streams."""

    problem: MoeProblem
    device: int
    arch: str | None
    tiling: Tiling | None
    enable_pdl: bool | None
    routed_scaling_factor: float
    at: Addresses


class Stages(NamedTuple):
    """Launches of a layer: on the caller's stream, and the GEMMs on one stream per partition."""

    before: tuple[BoundLaunch, ...]
    fc1: tuple[BoundLaunch, ...]
    fc2: tuple[BoundLaunch, ...]
    after: tuple[BoundLaunch, ...]


def _inputs(binding: Binding, stream: int) -> StageInputs:
    problem, device, arch, tiling, enable_pdl, factor, at = binding
    plan = plan_for(problem, device, arch, tiling)
    return StageInputs(
        problem=problem,
        plan=plan,
        functions=_load(problem, device, arch, tiling, stream),
        at=at,
        device=device,
        pdl=enable_pdl is not False and capability_of(plan.arch) >= _FIRST_PDL_CAPABILITY,
        routed_scaling_factor=factor,
        scratch={name: at.scratch + offset for name, offset in plan.scratch.offsets.items()},
    )


@lru_cache(maxsize=_MAX_BOUND_LAYERS)
def bind_stages(binding: Binding, stream: int, partition_streams: tuple[int, ...] = ()) -> Stages:
    """Bind the stages of a layer to streams.

    Kernels may start before their predecessors end. What follows an event of another stream does
    so in captured graphs, and there where it has no second predecessor.

    Parameters
    ----------
    binding : Binding
    stream : int
        Handle of the caller's stream.
    partition_streams : tuple of int
        One per partition; empty without partitions.

    Raises
    ------
    KernelCompileError
        If a kernel does not compile.
    RuntimeError
        If a kernel would have to be loaded during a stream capture.
    """
    layer = _inputs(binding, stream)
    streams = list(enumerate(partition_streams or (stream,)))
    return Stages(
        before=tuple(before_gemms(layer, stream)),
        fc1=tuple(bind_fc1(layer, part, at) for part, at in streams),
        fc2=tuple(bind_fc2(layer, part, at) for part, at in streams),
        after=tuple(after_gemms(layer, stream)),
    )
