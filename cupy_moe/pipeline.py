"""The stages of a mixture-of-experts layer on a GPU, in order, one launch each.

Nothing else knows the sequence. Every call is graph-safe: grids and buffers follow from sizes,
counts stay on the device, nothing synchronizes.

Launches are bound first (sizes and addresses to parameter structs and configurations) and enqueued
then. Binding is a pure function of plain values; its latest results are remembered, so that a layer
that comes back with the same addresses, as from a caching allocator, costs its launches only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from cupy_moe.kernels.expand import bind_expand
from cupy_moe.kernels.finalize import bind_finalize
from cupy_moe.kernels.grouped_gemm import (
    TILE_K,
    GemmConfig,
    MainloopKind,
    bind_grouped_gemm,
)
from cupy_moe.kernels.permute import bind_permute
from cupy_moe.kernels.route import bind_route
from cupy_moe.plan import KernelConfig, MoePlan, plan_moe
from cupy_moe.problem import DeviceTraits, MoeProblem, RoutingSource
from cupy_moe.runtime.compiler import capability_of
from cupy_moe.runtime.devices import (
    compute_capability,
    device_guard,
    sm_count,
    stream_is_capturing,
)
from cupy_moe.runtime.jit import Function, arch_for, load
from cupy_moe.runtime.launch import BoundLaunch
from cupy_moe.runtime.tensor_map import NO_TENSOR_MAP, encode_tensor_map
from cupy_moe.tiling import Tiling

__all__ = ["Addresses", "bind_stages", "compiled_for", "overrides", "plan_for", "tiled_as"]

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


@dataclass(frozen=True, slots=True)
class _Functions:
    """The loaded kernels of a plan."""

    route: Function | None
    permute: Function | None
    expand: Function | None
    fc1: Function
    fc2: Function
    finalize: Function | None


@lru_cache(maxsize=4096)
def _load(
    problem: MoeProblem, device: int, arch: str | None, tiling: Tiling | None, stream: int
) -> _Functions:
    """Load a plan's kernels; `stream` is part of the key only to reach the loader's check."""
    plan = plan_for(problem, device, arch, tiling)
    with device_guard(device):
        capturing = stream_is_capturing(stream)

    def function(config: KernelConfig) -> Function:
        return load(config.spec(), device, capturing=capturing, arch=arch)

    return _Functions(
        route=function(plan.route) if plan.route else None,
        permute=function(plan.permute) if plan.permute else None,
        expand=function(plan.expand) if plan.expand else None,
        fc1=function(plan.fc1),
        fc2=function(plan.fc2),
        finalize=function(plan.finalize) if plan.finalize else None,
    )


class Addresses(NamedTuple):
    """Where the arrays of a call are, 0 for none; the last three lie in the scratch then."""

    hidden_states: int
    gemm1_weights: int
    gemm2_weights: int
    output1_scales: int
    output1_gate_scales: int
    output2_scales: int
    clamp_limit: int
    topk_ids: int
    routing_logits: int
    routing_bias: int
    routing_replay_out: int
    scratch: int
    output: int
    expert_weights: int
    gemm2_output: int
    expanded_to_permuted: int


def _weight_map(
    device: int, config: GemmConfig, weights: int, experts: int, rows: int, k: int
) -> bytes:
    """Map of [experts, rows, k] weights: boxes of tile_m rows by one step of K."""
    if config.mainloop_kind is not MainloopKind.Wgmma:
        return NO_TENSOR_MAP
    shape, strides = (TILE_K, rows, k // TILE_K, experts), (k, TILE_K, rows * k)
    with device_guard(device):
        return encode_tensor_map(weights, shape, strides, (TILE_K, config.tile_m, 1, 1))


def _tile_counter(plan: MoePlan, config: GemmConfig, scratch: dict[str, int]) -> int:
    """Address of a GEMM's counter: the number of token tiles, then FC1's and FC2's counters."""
    return scratch["schedule"] + 4 * (1 + config.gemm_stage.value) if plan.take_tiles else 0


def _token_map(device: int, config: GemmConfig, address: int, rows: int, k: int) -> bytes:
    """Map of [rows, k] tokens that are not gathered: boxes of rows by one step of K."""
    if config.mainloop_kind is not MainloopKind.Wgmma or config.gather_tokens:
        return NO_TENSOR_MAP
    with device_guard(device):
        return encode_tensor_map(address, (k, rows), (k,), (TILE_K, config.token_box))


@lru_cache(maxsize=_MAX_BOUND_LAYERS)
def bind_stages(
    problem: MoeProblem,
    device: int,
    arch: str | None,
    tiling: Tiling | None,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    addresses: tuple[int, ...],
    stream: int,
) -> tuple[BoundLaunch, ...]:
    """Bind the stages of a layer, in order, to the fields of `Addresses` and a stream.

    Raises
    ------
    KernelCompileError
        If a kernel does not compile.
    RuntimeError
        If a kernel would have to be loaded during a stream capture.
    """
    at = Addresses(*addresses)
    plan = plan_for(problem, device, arch, tiling)
    functions = _load(problem, device, arch, tiling, stream)
    pdl = enable_pdl is not False and capability_of(plan.arch) >= _FIRST_PDL_CAPABILITY
    scratch = {name: at.scratch + offset for name, offset in plan.scratch.offsets.items()}
    to_permuted = at.expanded_to_permuted or scratch["expanded_to_permuted"]
    gemm2_output = at.gemm2_output or scratch["gemm2_output"]
    expert_weights = at.expert_weights or scratch["expert_weights"]
    weights_are_f32 = problem.expert_weights_dtype == "float32"
    packed = problem.routing_source is RoutingSource.Packed
    experts, hidden_size = problem.local_num_experts, problem.hidden_size
    launches: list[BoundLaunch] = []

    topk_ids = at.topk_ids
    if functions.route is not None and plan.route is not None:
        topk_ids = scratch["topk_ids"]
        launches.append(
            bind_route(
                functions.route,
                plan.route,
                problem,
                logits=at.routing_logits,
                bias=at.routing_bias,
                topk_ids=topk_ids,
                topk_weights=expert_weights,
                routing_replay_out=at.routing_replay_out,
                routed_scaling_factor=routed_scaling_factor,
                stream=stream,
                pdl=pdl,
            )
        )
    if functions.permute is not None and plan.permute is not None:
        launches.append(
            bind_permute(
                functions.permute,
                plan.permute,
                topk_ids=topk_ids,
                expert_weights=expert_weights if packed else 0,
                expanded_to_permuted=to_permuted,
                permuted_to_expanded=scratch["permuted_to_expanded"],
                tile_info=scratch["tile_info"],
                schedule=scratch["schedule"],
                num_slots=problem.num_slots,
                local_num_experts=experts,
                local_expert_offset=problem.local_expert_offset,
                tile_n=plan.tile_n,
                stream=stream,
                pdl=pdl,
            )
        )
    tokens = at.hidden_states
    if functions.expand is not None and plan.expand is not None:
        # NOTE: the copy is dead when FC2 starts to write, and takes half of its output's bytes.
        launches.append(
            bind_expand(
                functions.expand,
                plan.expand,
                plan.expand_grid,
                hidden_states=tokens,
                permuted_to_expanded=scratch["permuted_to_expanded"],
                num_n_tiles=scratch["schedule"],
                output=gemm2_output,
                row_bytes=hidden_size,
                top_k=problem.top_k,
                tile_n=plan.tile_n,
                stream=stream,
                pdl=pdl,
            )
        )
        tokens = gemm2_output
    bind_gemm = partial(
        bind_grouped_gemm,
        permuted_to_expanded=scratch.get("permuted_to_expanded", 0),
        tile_info=scratch.get("tile_info", 0),
        num_n_tiles=scratch.get("schedule", 0),
        topk_ids=topk_ids,
        expert_weights=expert_weights if packed else 0,
        expanded_to_permuted=to_permuted,
        num_slots=problem.num_slots,
        packed_ids=packed,
        local_num_experts=experts,
        local_expert_offset=problem.local_expert_offset,
        top_k=problem.top_k,
        stream_weights=plan.stream_weights,
        stream=stream,
        pdl=pdl,
    )
    launches += [
        bind_gemm(
            functions.fc1,
            plan.fc1,
            plan.fc1_grid,
            token_map=_token_map(device, plan.fc1, tokens, plan.capacity, hidden_size),
            weight_map=_weight_map(
                device, plan.fc1, at.gemm1_weights, experts, problem.fc1_rows, hidden_size
            ),
            weights=at.gemm1_weights,
            tokens=tokens,
            tile_counter=_tile_counter(plan, plan.fc1, scratch),
            output_scales=at.output1_scales,
            gate_scales=at.output1_gate_scales,
            clamp_limits=at.clamp_limit,
            token_scales=expert_weights if problem.scale_input else 0,
            output=scratch["intermediate"],
            m=problem.fc1_rows,
            k=hidden_size,
            token_scales_are_f32=weights_are_f32,
            prefetch_steps=plan.prefetch_steps,
        ),
        bind_gemm(
            functions.fc2,
            plan.fc2,
            plan.fc2_grid,
            token_map=_token_map(
                device, plan.fc2, scratch["intermediate"], plan.capacity, problem.intermediate_size
            ),
            weight_map=_weight_map(
                device, plan.fc2, at.gemm2_weights, experts, hidden_size, problem.intermediate_size
            ),
            weights=at.gemm2_weights,
            tokens=scratch["intermediate"],
            tile_counter=_tile_counter(plan, plan.fc2, scratch),
            output_scales=at.output2_scales,
            gate_scales=0,
            clamp_limits=0,
            token_scales=0,
            output=gemm2_output,
            m=hidden_size,
            k=problem.intermediate_size,
            token_scales_are_f32=False,
            prefetch_steps=0,
        ),
    ]
    if functions.finalize is not None and plan.finalize is not None:
        launches.append(
            bind_finalize(
                functions.finalize,
                plan.finalize,
                num_tokens=problem.num_tokens,
                gemm2_output=gemm2_output,
                expanded_to_permuted=to_permuted,
                expert_weights=0 if problem.scale_input else expert_weights,
                output=at.output,
                hidden_size=hidden_size,
                top_k=problem.top_k,
                weights_are_f32=weights_are_f32,
                stream=stream,
                pdl=pdl,
            )
        )
    return tuple(launches)
