"""The stages of a mixture-of-experts layer on a GPU, in order, one launch each.

Nothing else knows the sequence. Every call is graph-safe: grids and buffers follow from sizes,
counts stay on the device, nothing synchronizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from cupy_moe.kernels.finalize import FinalizeConfig, launch_finalize
from cupy_moe.kernels.grouped_gemm import (
    TILE_K,
    GemmConfig,
    MainloopKind,
    launch_grouped_gemm,
)
from cupy_moe.kernels.permute import PermuteConfig, launch_permute
from cupy_moe.kernels.route import RouteConfig, launch_route
from cupy_moe.plan import (
    DeviceTraits,
    MoeOperands,
    MoePlan,
    MoeProblem,
    MoeResult,
    RoutingSource,
    Tiling,
    plan_moe,
)
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.runtime.devices import (
    compute_capability,
    device_guard,
    sm_count,
    stream_is_capturing,
)
from cupy_moe.runtime.jit import Function, arch_for, load
from cupy_moe.runtime.scratch import allocate
from cupy_moe.runtime.tensor_map import NO_TENSOR_MAP, encode_tensor_map

__all__ = ["compiled_for", "run_moe", "tiled_as"]

_FIRST_PDL_CAPABILITY = (9, 0)

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
        One of `cupy_moe.plan.tile_candidates`.
    """
    token = _tiling_override.set(tiling)
    try:
        yield
    finally:
        _tiling_override.reset(token)


def _traits(device: int, arch: str | None) -> DeviceTraits:
    arch = arch or arch_for(compute_capability(device))
    return DeviceTraits(arch=arch, num_sms=sm_count(device))


@dataclass(frozen=True, slots=True)
class _Kernels:
    """A plan and its loaded functions."""

    plan: MoePlan
    route: Function | None
    permute: Function
    fc1: Function
    fc2: Function
    finalize: Function | None


@lru_cache(maxsize=4096)
def _prepare(
    problem: MoeProblem, device: int, capturing: bool, arch: str | None, tiling: Tiling | None
) -> _Kernels:
    """Plan and load; `capturing` is part of the key only to reach the loader's check."""
    plan = plan_moe(problem, _traits(device, arch), tiling)

    def function(config: RouteConfig | PermuteConfig | GemmConfig | FinalizeConfig) -> Function:
        return load(config.spec(), device, capturing=capturing, arch=arch)

    return _Kernels(
        plan=plan,
        route=function(plan.route) if plan.route else None,
        permute=function(plan.permute),
        fc1=function(plan.fc1),
        fc2=function(plan.fc2),
        finalize=function(plan.finalize) if plan.finalize else None,
    )


class _Buffers:
    """Buffers of a call: addresses of the scratch by name, and what the caller receives."""

    def __init__(
        self, problem: MoeProblem, operands: MoeOperands, plan: MoePlan, capturing: bool
    ) -> None:
        like = operands.hidden_states
        framework, device = like.framework, like.device
        workspace = operands.workspace_buffer
        if workspace is None or workspace.nbytes < plan.scratch.num_bytes:
            workspace = allocate(framework, plan.scratch.num_bytes, device, capturing=capturing)
        self._scratch = workspace  # keeps the memory until the launches are enqueued
        base = workspace.ptr
        self.addresses = {name: base + at for name, at in plan.scratch.offsets.items()}
        self.result = MoeResult()
        if problem.do_finalize:
            shape = (problem.num_tokens, problem.hidden_size)
            self.result.output = operands.output or framework.empty(shape, "bfloat16", device)
            return
        self.result.gemm2_output = framework.empty(
            (plan.capacity, problem.hidden_size), "bfloat16", device
        )
        self.result.expanded_idx_to_permuted_idx = framework.empty(
            (problem.num_slots,), "int32", device
        )
        self.result.expert_weights = operands.topk_weights or framework.empty(
            (problem.num_tokens, problem.top_k), "bfloat16", device
        )

    def result_or_scratch(self, result: ArrayRef | None, name: str) -> int:
        """Address of an array that the caller receives, else of its place in the scratch."""
        return self.addresses[name] if result is None else result.ptr


def run_moe(problem: MoeProblem, operands: MoeOperands) -> MoeResult:
    """Enqueue one layer on the caller's current stream.

    Parameters
    ----------
    problem : MoeProblem
        Of at least one token.
    operands : MoeOperands
        CUDA arrays of one device, validated against the problem.

    Returns
    -------
    MoeResult
        Arrays of the kind of ``hidden_states``.

    Raises
    ------
    KernelCompileError
        If a kernel does not compile.
    RuntimeError
        If a kernel would have to be loaded during a stream capture, or the driver refuses a launch.
    """
    hidden = operands.hidden_states
    framework, device = hidden.framework, hidden.device
    with device_guard(device):
        stream = framework.current_stream(device)
        capturing = stream_is_capturing(stream)
        kernels = _prepare(
            problem, device, capturing, _arch_override.get(), _tiling_override.get()
        )
        buffers = _Buffers(problem, operands, kernels.plan, capturing)
        pdl = operands.enable_pdl is not False
        pdl = pdl and compute_capability(device) >= _FIRST_PDL_CAPABILITY
        _enqueue(problem, operands, kernels, buffers, stream, pdl)
    return buffers.result


def _address(ref: ArrayRef | None) -> int:
    return 0 if ref is None else ref.ptr


def _weight_map(config: GemmConfig, weights: ArrayRef) -> bytes:
    """Map of [experts, rows, k] weights: boxes of tile_m rows by one step of K."""
    if config.mainloop_kind is not MainloopKind.Wgmma:
        return NO_TENSOR_MAP
    experts, rows, k = weights.shape
    return encode_tensor_map(
        weights.ptr,
        (TILE_K, rows, k // TILE_K, experts),
        (k, TILE_K, rows * k),
        (TILE_K, config.tile_m, 1, 1),
    )


def _enqueue(
    problem: MoeProblem,
    operands: MoeOperands,
    kernels: _Kernels,
    buffers: _Buffers,
    stream: int,
    pdl: bool,
) -> None:
    plan, result, scratch = kernels.plan, buffers.result, buffers.addresses
    to_permuted = buffers.result_or_scratch(
        result.expanded_idx_to_permuted_idx, "expanded_to_permuted"
    )
    gemm2_output = buffers.result_or_scratch(result.gemm2_output, "gemm2_output")
    expert_weights = buffers.result_or_scratch(
        result.expert_weights or operands.topk_weights, "expert_weights"
    )
    weights_are_f32 = problem.expert_weights_dtype == "float32"
    packed = problem.routing_source is RoutingSource.Packed

    topk_ids = _address(operands.topk_ids)
    if kernels.route is not None and plan.route is not None:
        topk_ids = scratch["topk_ids"]
        launch_route(
            kernels.route,
            plan.route,
            problem,
            logits=_address(operands.routing_logits),
            bias=_address(operands.routing_bias),
            topk_ids=topk_ids,
            topk_weights=expert_weights,
            routing_replay_out=_address(operands.routing_replay_out),
            routed_scaling_factor=operands.routed_scaling_factor,
            stream=stream,
            pdl=pdl,
        )
    launch_permute(
        kernels.permute,
        plan.permute,
        topk_ids=topk_ids,
        expert_weights=expert_weights if packed else 0,
        expanded_to_permuted=to_permuted,
        permuted_to_expanded=scratch["permuted_to_expanded"],
        tile_expert=scratch["tile_expert"],
        tile_rows=scratch["tile_rows"],
        expert_first_tile=scratch["expert_first_tile"],
        num_slots=problem.num_slots,
        local_num_experts=problem.local_num_experts,
        local_expert_offset=problem.local_expert_offset,
        tile_n=plan.tile_n,
        stream=stream,
        pdl=pdl,
    )
    launch_grouped_gemm(
        kernels.fc1,
        plan.fc1,
        plan.fc1_grid,
        weight_map=_weight_map(plan.fc1, operands.gemm1_weights),
        weights=operands.gemm1_weights.ptr,
        tokens=operands.hidden_states.ptr,
        permuted_to_expanded=scratch["permuted_to_expanded"],
        tile_expert=scratch["tile_expert"],
        tile_rows=scratch["tile_rows"],
        expert_first_tile=scratch["expert_first_tile"],
        output_scales=operands.output1_scales.ptr,
        gate_scales=operands.output1_gate_scales.ptr,
        clamp_limits=_address(operands.clamp_limit),
        token_scales=expert_weights if problem.scale_input else 0,
        output=scratch["intermediate"],
        m=problem.fc1_rows,
        k=problem.hidden_size,
        top_k=problem.top_k,
        token_scales_are_f32=weights_are_f32,
        local_num_experts=problem.local_num_experts,
        stream=stream,
        pdl=pdl,
    )
    launch_grouped_gemm(
        kernels.fc2,
        plan.fc2,
        plan.fc2_grid,
        weight_map=_weight_map(plan.fc2, operands.gemm2_weights),
        weights=operands.gemm2_weights.ptr,
        tokens=scratch["intermediate"],
        permuted_to_expanded=scratch["permuted_to_expanded"],
        tile_expert=scratch["tile_expert"],
        tile_rows=scratch["tile_rows"],
        expert_first_tile=scratch["expert_first_tile"],
        output_scales=operands.output2_scales.ptr,
        gate_scales=0,
        clamp_limits=0,
        token_scales=0,
        output=gemm2_output,
        m=problem.hidden_size,
        k=problem.intermediate_size,
        top_k=problem.top_k,
        token_scales_are_f32=False,
        local_num_experts=problem.local_num_experts,
        stream=stream,
        pdl=pdl,
    )
    if kernels.finalize is not None and plan.finalize is not None and result.output is not None:
        launch_finalize(
            kernels.finalize,
            plan.finalize,
            num_tokens=problem.num_tokens,
            gemm2_output=gemm2_output,
            expanded_to_permuted=to_permuted,
            expert_weights=0 if problem.scale_input else expert_weights,
            output=result.output.ptr,
            hidden_size=problem.hidden_size,
            top_k=problem.top_k,
            weights_are_f32=weights_are_f32,
            stream=stream,
            pdl=pdl,
        )
