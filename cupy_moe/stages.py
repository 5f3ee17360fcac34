"""The stages before and after the GEMMs of a layer as launches, bound to what they work on."""

from __future__ import annotations

from collections.abc import Iterator

from cupy_moe.kernels.add_rows import bind_add_rows
from cupy_moe.kernels.finalize import bind_finalize
from cupy_moe.kernels.permute import bind_permute
from cupy_moe.kernels.place_tokens import bind_place_tokens
from cupy_moe.kernels.route import bind_route
from cupy_moe.plan import PARTIAL_SUMS
from cupy_moe.runtime.launch import BoundLaunch
from cupy_moe.stage_inputs import StageInputs

__all__ = ["after_gemms", "before_gemms"]


def before_gemms(layer: StageInputs, stream: int) -> Iterator[BoundLaunch]:
    """Route, order the rows, and make token rows as FC1 reads them."""
    problem, plan, functions, at = layer.problem, layer.plan, layer.functions, layer.at
    scratch, pdl = layer.scratch, layer.pdl
    if functions.route is not None and plan.route is not None:
        yield bind_route(
            functions.route,
            plan.route,
            problem,
            logits=at.routing_logits,
            bias=at.routing_bias,
            topk_ids=layer.topk_ids,
            topk_weights=layer.expert_weights,
            routing_replay_out=at.routing_replay_out,
            routed_scaling_factor=layer.routed_scaling_factor,
            stream=stream,
            pdl=pdl,
        )
    if functions.permute is not None and plan.permute is not None:
        yield bind_permute(
            functions.permute,
            plan.permute,
            topk_ids=layer.topk_ids,
            expert_weights=layer.expert_weights if layer.is_packed else 0,
            expanded_to_permuted=layer.expanded_to_permuted,
            permuted_to_expanded=scratch["permuted_to_expanded"],
            tile_info=scratch["tile_info"],
            schedule=scratch["schedule"],
            num_slots=problem.num_slots,
            local_num_experts=problem.local_num_experts,
            local_expert_offset=problem.local_expert_offset,
            tile_n=plan.tile_n,
            stream=stream,
            pdl=pdl,
        )
    if functions.place is not None and plan.place is not None:
        yield bind_place_tokens(
            functions.place,
            plan.place,
            num_tokens=problem.num_tokens,
            hidden_states=at.hidden_states,
            scales=at.hidden_states_scale,
            expanded_to_permuted=0 if plan.fc1.gather_tokens else layer.expanded_to_permuted,
            output=layer.tokens,
            topk_weights=at.unrounded_weights,
            expert_weights=layer.expert_weights if at.unrounded_weights else 0,
            hidden_size=problem.hidden_size,
            scale_pitch=problem.token_scale_pitch,
            top_k=problem.top_k,
            stream=stream,
            pdl=pdl,
        )


def after_gemms(layer: StageInputs, stream: int) -> Iterator[BoundLaunch]:
    """Add what the partitions have, and then the slots of a token."""
    problem, plan, functions = layer.problem, layer.plan, layer.functions
    partial_sums = [layer.scratch.get(name, 0) for name in PARTIAL_SUMS]
    if functions.add_rows is not None and plan.add_rows is not None:
        yield bind_add_rows(
            functions.add_rows,
            plan.add_rows,
            num_rows=plan.capacity,
            first=partial_sums[0],
            second=partial_sums[1],
            output=layer.gemm2_output,
            hidden_size=problem.hidden_size,
            stream=stream,
            pdl=layer.pdl,
        )
    if functions.finalize is not None and plan.finalize is not None:
        yield bind_finalize(
            functions.finalize,
            plan.finalize,
            num_tokens=problem.num_tokens,
            gemm2_output=layer.gemm2_output or partial_sums[0],
            partial_output=partial_sums[1],
            expanded_to_permuted=layer.expanded_to_permuted,
            expert_weights=0 if problem.scale_input else layer.expert_weights,
            output=layer.at.output,
            hidden_size=problem.hidden_size,
            top_k=problem.top_k,
            weights_are_f32=layer.weights_are_f32,
            stream=stream,
            pdl=layer.pdl,
        )
