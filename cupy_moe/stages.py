"""The stages of a layer as launches, bound to what they work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_moe.gemm_launches import Places, bind_fc1, bind_fc2
from cupy_moe.kernels.add_rows import bind_add_rows
from cupy_moe.kernels.cast import bind_cast
from cupy_moe.kernels.expand import bind_expand
from cupy_moe.kernels.finalize import bind_finalize
from cupy_moe.kernels.permute import bind_permute
from cupy_moe.kernels.route import bind_route
from cupy_moe.plan import PARTIAL_SUMS, MoePlan
from cupy_moe.problem import Addresses, MoeProblem, RoutingSource
from cupy_moe.runtime.jit import Function
from cupy_moe.runtime.launch import BoundLaunch

__all__ = ["Functions", "StageInputs", "after_gemms", "before_gemms", "fc1", "fc2"]


@dataclass(frozen=True, slots=True)
class Functions:
    """The loaded kernels of a plan."""

    route: Function | None
    permute: Function | None
    expand: Function | None
    cast: Function | None
    fc1: Function
    fc2: Function
    add_rows: Function | None
    finalize: Function | None


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What the stages of a layer are bound with."""

    problem: MoeProblem
    plan: MoePlan
    functions: Functions
    at: Addresses
    device: int
    pdl: bool  # where a stage follows another one on its stream
    routed_scaling_factor: float
    scratch: dict[str, int]

    @property
    def tokens(self) -> int:
        """What FC1 reads: the caller's array, what it was cast to, or a permuted copy of either."""
        if not self.plan.expand:
            return self.given_tokens
        # NOTE: the copy is dead when FC2 starts to write its output, which takes no fewer bytes.
        # Partial sums of one partition are written while the other one still reads.
        return self.scratch.get("permuted_tokens") or self.gemm2_output

    @property
    def given_tokens(self) -> int:
        """Tokens in the caller's order, as the main loop reads them."""
        return self.scratch["tokens"] if self.plan.cast else self.at.hidden_states

    @property
    def gemm2_output(self) -> int:
        """FC2's rows; 0 where they are partial sums only."""
        return self.at.gemm2_output or self.scratch.get("gemm2_output", 0)

    @property
    def expert_weights(self) -> int:
        """Routing weights of the slots."""
        return self.at.expert_weights or self.scratch["expert_weights"]

    @property
    def expanded_to_permuted(self) -> int:
        """Row of each slot."""
        return self.at.expanded_to_permuted or self.scratch["expanded_to_permuted"]

    @property
    def topk_ids(self) -> int:
        """Expert ids, or words that hold them."""
        return self.scratch["topk_ids"] if self.plan.route else self.at.topk_ids

    @property
    def is_packed(self) -> bool:
        """Whether ids and weights come in words."""
        return self.problem.routing_source is RoutingSource.Packed

    @property
    def weights_are_f32(self) -> bool:
        """Whether routing weights are FP32, else BF16."""
        return self.problem.expert_weights_dtype == "float32"

    def places(self) -> Places:
        """Arrays that the GEMMs share."""
        return Places(
            at=self.at,
            scratch=self.scratch,
            tokens=self.tokens,
            gemm2_output=self.gemm2_output,
            topk_ids=self.topk_ids,
            expert_weights=self.expert_weights,
            expanded_to_permuted=self.expanded_to_permuted,
        )


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
    if functions.cast is not None and plan.cast is not None:
        yield bind_cast(
            functions.cast,
            plan.cast,
            num_tokens=problem.num_tokens,
            hidden_states=at.hidden_states,
            scales=at.hidden_states_scale,
            output=layer.given_tokens,
            topk_weights=at.unrounded_weights,
            expert_weights=layer.expert_weights if at.unrounded_weights else 0,
            hidden_size=problem.hidden_size,
            scale_pitch=problem.token_scale_pitch,
            top_k=problem.top_k,
            stream=stream,
            pdl=pdl,
        )
    if functions.expand is not None and plan.expand is not None:
        yield bind_expand(
            functions.expand,
            plan.expand,
            plan.expand_grid,
            hidden_states=layer.given_tokens,
            permuted_to_expanded=scratch["permuted_to_expanded"],
            num_n_tiles=scratch["schedule"],
            output=layer.tokens,
            row_bytes=problem.hidden_size * (2 if plan.cast else 1),
            top_k=problem.top_k,
            tile_n=plan.tile_n,
            stream=stream,
            pdl=pdl,
        )


def fc1(layer: StageInputs, part: int, stream: int, *, pdl: bool) -> BoundLaunch:
    """Multiply with W1 and activate, in one partition."""
    function, places = layer.functions.fc1, layer.places()
    return bind_fc1(function, layer.problem, layer.plan, places, part, layer.device, stream, pdl)


def fc2(layer: StageInputs, part: int, stream: int, *, pdl: bool) -> BoundLaunch:
    """Multiply with W2, in one partition."""
    function, places = layer.functions.fc2, layer.places()
    return bind_fc2(function, layer.problem, layer.plan, places, part, layer.device, stream, pdl)


def after_gemms(layer: StageInputs, stream: int, *, pdl: bool) -> Iterator[BoundLaunch]:
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
            pdl=pdl,
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
            pdl=pdl,
        )
