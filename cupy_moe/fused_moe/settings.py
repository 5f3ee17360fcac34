"""The plain (non-array) arguments of the MoE operations: rules, limits and conversion."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from cupy_moe.types import ActivationType, RoutingMethodType
from cupy_moe.validate import flag, integer, optional_flag, optional_integer, remember_accepted

__all__ = ["SIZE_MULTIPLE", "MoeSettings", "moe_settings", "warn_ignored_groups"]

SIZE_MULTIPLE = 128  # of hidden_size and intermediate_size: whole shuffle blocks and tiles

# Routing from logits.
MAX_ROUTED_EXPERTS = 2048
MAX_ROUTED_TOP_K = 32
# DeepSeekV3 with groups.
MAX_GROUPED_TOP_K = 22
MAX_EXPERTS = 2**31 - 1  # ids are int32
MAX_GROUPS = 8
MAX_TOPK_GROUPS = 4
MAX_GROUP_SIZE = 32
MIN_GROUP_SIZE = 2  # a group is scored by its two largest keys


@dataclass(frozen=True, slots=True, eq=False)
class MoeSettings:
    """The plain arguments of an MoE operation, checked and converted.

    Compared by identity: equal arguments yield the same object (until the cache of
    `moe_settings` drops it), which makes it a cheap key of further caches.

    Attributes
    ----------
    num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts : int
    activation : ActivationType
    routing_method : RoutingMethodType
    num_groups, topk_group : int
        0 where not given.
    norm_topk_prob, scale_input, do_finalize : bool
    enable_pdl : bool or None
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    activation: ActivationType
    routing_method: RoutingMethodType
    num_groups: int
    topk_group: int
    norm_topk_prob: bool
    scale_input: bool
    do_finalize: bool
    enable_pdl: bool | None

    @property
    def is_grouped(self) -> bool:
        """Whether experts are selected within groups."""
        return self.routing_method is RoutingMethodType.DeepSeekV3 and self.num_groups > 1


@remember_accepted
def moe_settings(
    operation: str,
    activations: frozenset[ActivationType],
    from_logits: bool,
    num_experts: object,
    top_k: object,
    n_group: object,
    topk_group: object,
    intermediate_size: object,
    local_expert_offset: object,
    local_num_experts: object,
    use_routing_scales_on_input: object,
    routing_method_type: object,
    do_finalize: object,
    enable_pdl: object,
    tune_max_num_tokens: object,
    activation_type: object,
    norm_topk_prob: object,
) -> MoeSettings:
    """Check and convert the plain arguments of an MoE operation (positional arguments only).

    Parameters
    ----------
    operation : str
        Public name, first in every message.
    activations : frozenset of ActivationType
        What the operation supports.
    from_logits : bool
        Whether the operation selects the experts; adds the limits of routing.
    num_experts, ..., norm_topk_prob
        As the caller gave them.

    Returns
    -------
    MoeSettings

    Raises
    ------
    TypeError
        An argument is of another kind; bool and float do not pass for integers.
    ValueError
        A value is out of range, or two arguments contradict each other.
    NotImplementedError
        More experts than routing from logits supports.
    """
    if integer(operation, "tune_max_num_tokens", tune_max_num_tokens) < 1:
        raise ValueError(
            f"{operation}: tune_max_num_tokens must be at least 1, got {tune_max_num_tokens}."
        )
    settings = MoeSettings(
        num_experts=integer(operation, "num_experts", num_experts),
        top_k=integer(operation, "top_k", top_k),
        intermediate_size=integer(operation, "intermediate_size", intermediate_size),
        local_expert_offset=integer(operation, "local_expert_offset", local_expert_offset),
        local_num_experts=integer(operation, "local_num_experts", local_num_experts),
        activation=_activation(operation, activations, activation_type),
        routing_method=_routing_method(operation, routing_method_type),
        num_groups=optional_integer(operation, "n_group", n_group),
        topk_group=optional_integer(operation, "topk_group", topk_group),
        norm_topk_prob=flag(operation, "norm_topk_prob", norm_topk_prob),
        scale_input=flag(operation, "use_routing_scales_on_input", use_routing_scales_on_input),
        do_finalize=flag(operation, "do_finalize", do_finalize),
        enable_pdl=optional_flag(operation, "enable_pdl", enable_pdl),
    )
    _check_sizes(operation, settings)
    _check_llama4(operation, settings)
    if from_logits:
        _check_routing_from_logits(operation, settings)
    if settings.is_grouped:
        _check_groups(operation, settings, from_logits)
    for name, number in (("n_group", settings.num_groups), ("topk_group", settings.topk_group)):
        if number < 0:
            raise ValueError(f"{operation}: {name} must not be negative, got {number}.")
    return settings


def _activation(
    operation: str, supported: frozenset[ActivationType], value: object
) -> ActivationType:
    number = integer(operation, "activation_type", value)
    if number in supported:
        return ActivationType(number)
    is_known = 0 <= number < ActivationType.InvalidType
    got = f"{ActivationType(number).name} ({number})" if is_known else f"{number}"
    choices = ", ".join(f"{a.name} ({int(a)})" for a in sorted(supported))
    raise ValueError(f"{operation}: activation_type must be one of {choices}, got {got}.")


def _routing_method(operation: str, value: object) -> RoutingMethodType:
    number = integer(operation, "routing_method_type", value)
    if 0 <= number < RoutingMethodType.Unspecified:
        return RoutingMethodType(number)
    raise ValueError(
        f"{operation}: routing_method_type must be 0 (Default) to 9 (TopKSigmoid), got {number}. "
        "RoutingMethodType lists the methods."
    )


def _check_sizes(operation: str, s: MoeSettings) -> None:
    if s.intermediate_size < 1 or s.intermediate_size % SIZE_MULTIPLE:
        raise ValueError(
            f"{operation}: intermediate_size must be a positive multiple of {SIZE_MULTIPLE}, got "
            f"{s.intermediate_size}. Pad the experts with zero rows and columns."
        )
    if s.num_experts < 1:
        raise ValueError(f"{operation}: num_experts must be at least 1, got {s.num_experts}.")
    if s.num_experts > MAX_EXPERTS:
        raise ValueError(
            f"{operation}: num_experts must be at most {MAX_EXPERTS}, got {s.num_experts}."
        )
    if not 1 <= s.top_k <= s.num_experts:
        raise ValueError(
            f"{operation}: top_k must be in [1, num_experts] = [1, {s.num_experts}], got {s.top_k}."
        )
    if not 1 <= s.local_num_experts <= s.num_experts:
        raise ValueError(
            f"{operation}: local_num_experts must be in [1, num_experts] = [1, {s.num_experts}], "
            f"got {s.local_num_experts}."
        )
    last_offset = s.num_experts - s.local_num_experts
    if not 0 <= s.local_expert_offset <= last_offset:
        raise ValueError(
            f"{operation}: local_expert_offset must be in [0, num_experts - local_num_experts] = "
            f"[0, {last_offset}], got {s.local_expert_offset}."
        )


def _check_llama4(operation: str, s: MoeSettings) -> None:
    is_llama4 = s.routing_method is RoutingMethodType.Llama4
    if is_llama4 and s.top_k != 1:
        raise ValueError(
            f"{operation}: top_k must be 1 for routing_method_type Llama4 (3), got {s.top_k}."
        )
    if s.scale_input and not is_llama4:
        raise ValueError(
            f"{operation}: use_routing_scales_on_input needs routing_method_type Llama4 (3), got "
            f"{s.routing_method.name} ({int(s.routing_method)}). Pass False to apply the weights "
            "in the final sum."
        )


def _check_routing_from_logits(operation: str, s: MoeSettings) -> None:
    if s.num_experts > MAX_ROUTED_EXPERTS:
        raise NotImplementedError(
            f"{operation}: routing from logits supports num_experts up to {MAX_ROUTED_EXPERTS}, "
            f"got {s.num_experts}. Select the experts beforehand and pass topk_ids."
        )
    if s.top_k > MAX_ROUTED_TOP_K:
        raise ValueError(
            f"{operation}: top_k must be at most {MAX_ROUTED_TOP_K} when routing from logits, got "
            f"{s.top_k}. Select the experts beforehand and pass topk_ids."
        )


def _check_groups(operation: str, s: MoeSettings, from_logits: bool) -> None:
    """Limits of DeepSeekV3 with groups; two of them hold for pre-computed routing as well."""
    rules = [
        (s.top_k <= MAX_GROUPED_TOP_K, f"top_k <= {MAX_GROUPED_TOP_K}"),
        (s.topk_group <= MAX_TOPK_GROUPS, f"topk_group <= {MAX_TOPK_GROUPS}"),
    ]
    if from_logits:
        rules += _selection_rules(s)
    for holds, rule in rules:
        if not holds:
            raise ValueError(
                f"{operation}: DeepSeekV3 (2) with n_group > 1 needs {rule}, got num_experts "
                f"{s.num_experts}, n_group {s.num_groups}, topk_group {s.topk_group}, top_k "
                f"{s.top_k}. Pass n_group=None for no groups."
            )


def _selection_rules(s: MoeSettings) -> list[tuple[bool, str]]:
    groups, experts = s.num_groups, s.num_experts
    return [
        (groups <= MAX_GROUPS, f"n_group <= {MAX_GROUPS}"),
        (experts % 4 == 0, "num_experts % 4 == 0"),
        (experts % groups == 0, "num_experts % n_group == 0"),
        (experts >= MIN_GROUP_SIZE * groups, f"num_experts / n_group >= {MIN_GROUP_SIZE}"),
        (experts <= MAX_GROUP_SIZE * groups, f"num_experts / n_group <= {MAX_GROUP_SIZE}"),
        (1 <= s.topk_group <= groups, "1 <= topk_group <= n_group"),
        (
            s.top_k * groups <= s.topk_group * experts,
            "top_k <= topk_group * num_experts / n_group",
        ),
    ]


def warn_ignored_groups(operation: str, settings: MoeSettings) -> None:
    """Warn the caller of a public operation that Llama4 routing does not look at groups."""
    if settings.routing_method is RoutingMethodType.Llama4 and (
        settings.num_groups > 1 or settings.topk_group > 1
    ):
        warnings.warn(
            f"{operation}: routing_method_type Llama4 (3) ignores n_group and topk_group.",
            stacklevel=4,  # the caller of an operation or of its plan
        )
