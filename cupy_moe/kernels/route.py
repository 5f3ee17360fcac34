"""Launcher of ``route.cu``: router logits to expert ids and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind
from cupy_moe.types import RoutingMethodType

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = [
    "PARAMS",
    "RouteConfig",
    "RoutingProblem",
    "all_route_configs",
    "bind_route",
    "route_config",
]

PARAMS = ParamLayout(
    ("logits", "ptr"),
    ("bias", "ptr"),
    ("topk_ids", "ptr"),
    ("topk_weights", "ptr"),
    ("routing_replay_out", "ptr"),
    ("num_tokens", "i32"),
    ("num_experts", "i32"),
    ("top_k", "i32"),
    ("experts_per_group", "i32"),
    ("topk_group", "i32"),
    ("routed_scaling_factor", "f32"),
)

WARP_SIZE = 32
EXPERTS_PER_LANE_CHOICES = (4, 8, 16, 64)
MAX_EXPERTS = WARP_SIZE * EXPERTS_PER_LANE_CHOICES[-1]
MAX_TOP_K = WARP_SIZE  # one lane a slot
MAX_GROUPS = 8  # one register a group, its experts across the lanes

_SAME_RULE = {
    RoutingMethodType.RenormalizeNaive: RoutingMethodType.Renormalize,
    RoutingMethodType.Llama4: RoutingMethodType.TopKSigmoid,
}
_UNGROUPED_RULES = (
    RoutingMethodType.Default,
    RoutingMethodType.Renormalize,
    RoutingMethodType.TopK,
    RoutingMethodType.SigmoidRenorm,
    RoutingMethodType.MiniMax2,
    RoutingMethodType.Sigmoid,
    RoutingMethodType.TopKSigmoid,
)
_BIASED_RULES = (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2)


class RoutingProblem(Protocol):
    """Sizes and choices that routing from logits depends on."""

    @property
    def num_tokens(self) -> int:
        """Rows of the logits."""

    @property
    def num_experts(self) -> int:
        """Columns of the logits."""

    @property
    def top_k(self) -> int:
        """Slots a token."""

    @property
    def routing_method(self) -> RoutingMethodType:
        """How logits become ids and weights."""

    @property
    def num_groups(self) -> int:
        """Contiguous expert groups of DeepSeekV3; 0 or 1 is ungrouped."""

    @property
    def topk_group(self) -> int:
        """Groups that stay in the selection."""

    @property
    def norm_topk_prob(self) -> bool:
        """Whether SigmoidRenorm normalizes."""

    @property
    def logits_dtype(self) -> str | None:
        """``float32`` or ``bfloat16``."""

    @property
    def bias_dtype(self) -> str | None:
        """Likewise; ``None`` without a bias."""


@dataclass(frozen=True)
class RouteConfig:
    """Specialization of the routing kernel; a warp serves one token.

    Attributes
    ----------
    method : RoutingMethodType
        One of the distinct rules of ``cuda_src/routing/keys.cuh``.
    experts_per_lane : int
        Keys a lane holds in registers.
    logits_bf16, bias_bf16 : bool
        Element type, FP32 otherwise.
    num_threads : int
        Threads of a block.
    """

    method: RoutingMethodType
    experts_per_lane: int
    logits_bf16: bool
    bias_bf16: bool
    num_threads: int = 128  # one warp for each of an SM's four schedulers

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("route", self, PARAMS)

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Blocks for one warp a token."""
        return (-(-num_tokens // (self.num_threads // WARP_SIZE)), 1, 1)


def _is_grouped(problem: RoutingProblem) -> bool:
    return problem.routing_method is RoutingMethodType.DeepSeekV3 and problem.num_groups > 1


def _distinct_rule(problem: RoutingProblem) -> RoutingMethodType:
    """Fold ``problem`` onto the rule that it shares with other methods or settings."""
    method = problem.routing_method
    if method is RoutingMethodType.DeepSeekV3 and not _is_grouped(problem):
        return RoutingMethodType.MiniMax2
    if method is RoutingMethodType.SigmoidRenorm and not problem.norm_topk_prob:
        return RoutingMethodType.Sigmoid
    return _SAME_RULE.get(method, method)


def _check_capacity(problem: RoutingProblem) -> None:
    experts, groups = problem.num_experts, problem.num_groups
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"route: num_experts must be in [1, {MAX_EXPERTS}], got {experts}.")
    most = min(MAX_TOP_K, experts)
    if not 1 <= problem.top_k <= most:
        raise ValueError(f"route: top_k must be in [1, {most}], got {problem.top_k}.")
    if _is_grouped(problem) and not (
        groups <= MAX_GROUPS
        and experts % groups == 0
        and 2 * groups <= experts <= WARP_SIZE * groups
        and 1 <= problem.topk_group <= groups
    ):
        raise ValueError(
            f"route: at most {MAX_GROUPS} groups of 2 to {WARP_SIZE} experts each, and "
            f"1 <= topk_group <= num_groups; got num_experts = {experts}, num_groups = {groups}, "
            f"topk_group = {problem.topk_group}."
        )


def route_config(problem: RoutingProblem) -> RouteConfig:
    """Choose the specialization for ``problem``.

    Raises
    ------
    ValueError
        Sizes beyond what the kernel holds in registers, or a method without a routing rule.
    """
    _check_capacity(problem)
    rule = _distinct_rule(problem)
    if rule is RoutingMethodType.DeepSeekV3:
        experts_per_lane = MAX_GROUPS
    elif rule in _UNGROUPED_RULES:
        experts_per_lane = next(
            n for n in EXPERTS_PER_LANE_CHOICES if WARP_SIZE * n >= problem.num_experts
        )
    else:
        raise ValueError(f"route: no routing rule belongs to the method {rule!r}.")
    return RouteConfig(
        method=rule,
        experts_per_lane=experts_per_lane,
        logits_bf16=problem.logits_dtype == "bfloat16",
        bias_bf16=rule in _BIASED_RULES and problem.bias_dtype == "bfloat16",
    )


def all_route_configs() -> list[RouteConfig]:
    """Every specialization a plan can ask for."""
    sizes = [(rule, n) for rule in _UNGROUPED_RULES for n in EXPERTS_PER_LANE_CHOICES]
    sizes.append((RoutingMethodType.DeepSeekV3, MAX_GROUPS))
    return [
        RouteConfig(rule, experts_per_lane, logits_bf16, bias_bf16)
        for rule, experts_per_lane in sizes
        for logits_bf16 in (False, True)
        for bias_bf16 in ((False, True) if rule in _BIASED_RULES else (False,))
    ]


def bind_route(
    function: Function,
    config: RouteConfig,
    problem: RoutingProblem,
    *,
    logits: int,
    bias: int,
    topk_ids: int,
    topk_weights: int,
    routing_replay_out: int,
    routed_scaling_factor: float,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config`` on ``stream``.

    Parameters
    ----------
    function : Function
        ``config.spec()``, loaded on the device of the arrays.
    config : RouteConfig
        ``route_config(problem)``.
    problem : RoutingProblem
        At least one token.
    logits : int
        Address of (T, E) FP32 or BF16, contiguous.
    bias : int
        Address of (E,) FP32 or BF16; 0 is a bias of zeros. Methods without a bias ignore it.
    topk_ids : int
        Address of (T, top_k) int32, written in order of decreasing key.
    topk_weights : int
        Address of (T, top_k) BF16, written.
    routing_replay_out : int
        Address of (>= T, top_k) int16 whose first T rows receive the ids; 0 for none.
    routed_scaling_factor : float
        Multiplies the weights of DeepSeekV3 and MiniMax2.
    stream : int
        Stream handle.
    pdl : bool
        Whether the grid may start before its predecessor on the stream has finished.
    """
    params = PARAMS.pack(
        logits,
        bias,
        topk_ids,
        topk_weights,
        routing_replay_out,
        problem.num_tokens,
        problem.num_experts,
        problem.top_k,
        problem.num_experts // problem.num_groups if _is_grouped(problem) else 0,
        problem.topk_group,
        routed_scaling_factor,
    )
    return bind(
        function,
        params,
        grid=config.grid(problem.num_tokens),
        block=config.num_threads,
        smem=0,
        stream=stream,
        pdl=pdl,
    )
