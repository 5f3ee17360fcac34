"""The FP4 operations up to the point where work would start: arguments checked, arrays bound.

Parameters of the layers are those of the operations, in their order.
"""

from __future__ import annotations

from typing import Any, cast, get_args

from cupy_moe.fused_moe.execution import Layer, bind
from cupy_moe.fused_moe.fp4_rules import (
    PARTITIONED_ACTIVATIONS,
    WHOLE_ACTIVATIONS,
    describe_fp4_layer,
    require_gated,
    weight_layout_of,
)
from cupy_moe.fused_moe.operands import describe_output, describe_precomputed, describe_router
from cupy_moe.fused_moe.settings import MoeSettings, moe_settings, warn_ignored_groups
from cupy_moe.partitions import MoePartitionResources
from cupy_moe.problem import MoeOperands, Strategy
from cupy_moe.runtime.arrays import HOST
from cupy_moe.types import RoutingInputMode
from cupy_moe.validate import ArgumentKindError, ArrayLike, Checker, integer, scaling_factor

__all__ = ["partitioned_layer", "whole_layer"]

_WHOLE = "prims_ts_fp4_block_scale_moe"
_PARTITIONED = "prims_ts_fp4_block_scale_moe_partitioned"


def whole_layer(
    routing_logits: ArrayLike | None,
    routing_bias: ArrayLike | None,
    hidden_states: ArrayLike,
    hidden_states_scale: ArrayLike | None,
    gemm1_weights: ArrayLike,
    gemm1_weights_scale: ArrayLike,
    gemm1_bias: ArrayLike | None,
    gemm1_alpha: ArrayLike | None,
    gemm1_beta: ArrayLike | None,
    gemm1_clamp_limit: ArrayLike | None,
    gemm2_weights: ArrayLike,
    gemm2_weights_scale: ArrayLike,
    gemm2_bias: ArrayLike | None,
    output1_scale_scalar: ArrayLike,
    output1_scale_gate_scalar: ArrayLike,
    output2_scale_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: ArrayLike | None = None,
    output: ArrayLike | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: ArrayLike | None = None,
    routing_input_mode: int = 0,
    topk_ids: ArrayLike | None = None,
    topk_weights: ArrayLike | None = None,
) -> Layer:
    """Layer of `cupy_moe.fused_moe.prims_ts_fp4_block_scale_moe`."""
    check = Checker(_WHOLE, ArgumentKindError)
    _refuse_unsupported(
        check,
        per_token_scale=per_token_scale,
        gemm1_bias=gemm1_bias,
        gemm2_bias=gemm2_bias,
    )
    mode = _routing_input_mode(check, routing_input_mode)
    _check_routing_inputs(check, mode, routing_logits, topk_weights)
    require_gated(_WHOLE, activation_type, WHOLE_ACTIVATIONS)
    settings = moe_settings(
        _WHOLE,
        WHOLE_ACTIVATIONS,
        mode is RoutingInputMode.FromLogits,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        False,
        routing_method_type,
        do_finalize,
        enable_pdl,
        tune_max_num_tokens,
        activation_type,
        norm_topk_prob,
    )
    if mode is RoutingInputMode.FromLogits:
        warn_ignored_groups(_WHOLE, settings)
    operands = describe_fp4_layer(
        check,
        settings,
        weight_layout_of(_WHOLE, weight_layout),
        None,
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        {
            "output1_scale_scalar": output1_scale_scalar,
            "output1_scale_gate_scalar": output1_scale_gate_scalar,
            "output2_scale_scalar": output2_scale_scalar,
        },
        {
            "gemm1_alpha": gemm1_alpha,
            "gemm1_beta": gemm1_beta,
            "gemm1_clamp_limit": gemm1_clamp_limit,
        },
    )
    is_unpacked = mode is RoutingInputMode.UnpackedPrecomputed
    weights = topk_weights if is_unpacked else None
    routing = (routing_logits, routing_bias, topk_ids, weights, routing_replay_out)
    return _routed(check, settings, operands, None, routed_scaling_factor, *routing, output)


def partitioned_layer(
    routing_logits: ArrayLike | None,
    routing_bias: ArrayLike | None,
    topk_ids: ArrayLike | None,
    topk_weights: ArrayLike | None,
    hidden_states: ArrayLike,
    hidden_states_scale: ArrayLike | None,
    gemm1_weights: list[ArrayLike],
    gemm1_weights_scale: list[ArrayLike],
    gemm2_weights: list[ArrayLike],
    gemm2_weights_scale: list[ArrayLike],
    output1_scale_scalar: ArrayLike,
    output1_scale_gate_scalar: ArrayLike,
    output2_scale_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    partition_resources: MoePartitionResources,
    partition_strategy: str,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: ArrayLike | None = None,
    output: ArrayLike | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: ArrayLike | None = None,
    gemm1_alpha: ArrayLike | None = None,
    gemm1_beta: ArrayLike | None = None,
    gemm1_clamp_limit: ArrayLike | None = None,
) -> Layer:
    """Layer of `cupy_moe.fused_moe.prims_ts_fp4_block_scale_moe_partitioned`."""
    check = Checker(_PARTITIONED, ArgumentKindError)
    _refuse_unsupported(check, per_token_scale=per_token_scale)
    strategy = _strategy(check, partition_strategy)
    _check_resources(check, partition_resources)
    require_gated(_PARTITIONED, activation_type, PARTITIONED_ACTIVATIONS)
    from_logits = routing_logits is not None
    settings = moe_settings(
        _PARTITIONED,
        PARTITIONED_ACTIVATIONS,
        from_logits,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        False,
        routing_method_type,
        do_finalize,
        enable_pdl,
        tune_max_num_tokens,
        activation_type,
        norm_topk_prob,
    )
    if from_logits:
        warn_ignored_groups(_PARTITIONED, settings)
    operands = describe_fp4_layer(
        check,
        settings,
        weight_layout_of(_PARTITIONED, weight_layout),
        strategy,
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        {
            "output1_scale_scalar": output1_scale_scalar,
            "output1_scale_gate_scalar": output1_scale_gate_scalar,
            "output2_scale_scalar": output2_scale_scalar,
        },
        {
            "gemm1_alpha": gemm1_alpha,
            "gemm1_beta": gemm1_beta,
            "gemm1_clamp_limit": gemm1_clamp_limit,
        },
    )
    _check_device(check, partition_resources)
    resources, factor = partition_resources, routed_scaling_factor
    routing = (routing_logits, routing_bias, topk_ids, topk_weights, routing_replay_out)
    return _routed(check, settings, operands, resources, factor, *routing, output)


def _refuse_unsupported(check: Checker, **values: ArrayLike | None) -> None:
    for name, value in values.items():
        if value is not None:
            check.refuse(NotImplementedError, name, "be None", type(value).__name__)


def _routing_input_mode(check: Checker, value: object) -> RoutingInputMode:
    name = "routing_input_mode"
    number = integer(check.operation, name, value)
    if number not in {int(mode) for mode in RoutingInputMode}:
        choices = ", ".join(f"{mode.name} ({int(mode)})" for mode in RoutingInputMode)
        check.refuse(ValueError, name, f"be one of {choices}", str(number))
    return RoutingInputMode(number)


def _check_routing_inputs(
    check: Checker, mode: RoutingInputMode, logits: ArrayLike | None, weights: ArrayLike | None
) -> None:
    label = f"routing_input_mode {mode.name} ({int(mode)})"
    if mode is RoutingInputMode.FromLogits:
        if logits is None:
            next_step = "Pass routing_input_mode 1 for packed topk_ids, 2 for ids and weights."
            check.refuse(ValueError, "routing_logits", f"be given for {label}", "None", next_step)
        return
    if logits is not None:
        got = type(logits).__name__
        check.refuse(ValueError, "routing_logits", f"be None for {label}", got)
    if mode is RoutingInputMode.UnpackedPrecomputed and weights is None:
        check.refuse(ValueError, "topk_weights", f"be given for {label}", "None")
    if mode is RoutingInputMode.PackedPrecomputed and weights is not None:
        next_step = "Plain topk_ids and weights are routing_input_mode 2."
        got = type(weights).__name__
        check.refuse(ValueError, "topk_weights", f"be None for {label}", got, next_step)


def _strategy(check: Checker, value: object) -> Strategy:
    choices = get_args(Strategy)
    if not isinstance(value, str) or value not in choices:
        rule = f"be {' or '.join(map(repr, choices))}"
        check.refuse(ValueError, "partition_strategy", rule, repr(value))
    return cast(Strategy, value)


def _check_resources(check: Checker, value: object) -> None:
    if not isinstance(value, MoePartitionResources):
        kind = ValueError if value is None else check.kind_error
        got = "None" if value is None else type(value).__name__
        next_step = "Arrays in host memory: MoePartitionResources((None, None))."
        check.refuse(kind, "partition_resources", "be a MoePartitionResources", got, next_step)


def _check_device(check: Checker, resources: MoePartitionResources) -> None:
    if resources.device != check.device:
        here, there = (
            "host memory" if device == HOST else f"cuda:{device}"
            for device in (check.device, resources.device)
        )
        rule = f"have streams for {here}, where {check.anchor_name} is"
        check.refuse(ValueError, "partition_resources", rule, f"streams for {there}")


def _routed(
    check: Checker,
    settings: MoeSettings,
    operands: MoeOperands,
    resources: MoePartitionResources | None,
    routed_scaling_factor: float | None,
    logits: ArrayLike | None,
    bias: ArrayLike | None,
    ids: ArrayLike | None,
    weights: ArrayLike | None,
    replay: ArrayLike | None,
    output: Any,
) -> Layer:
    """Check routing from either source, then what is written, and bind the layer."""
    name = "routed_scaling_factor"
    operands.routed_scaling_factor = scaling_factor(check.operation, name, routed_scaling_factor)
    if logits is not None:
        describe_router(check, settings, operands, logits, bias, replay)
    elif ids is None:
        rule = "be given where routing_logits is None"
        check.refuse(ValueError, "topk_ids", rule, "None", "Pass one of the two.")
    else:
        names = ("topk_ids", "topk_weights")
        describe_precomputed(check, settings, operands, names, ids, weights, bias, replay)
    describe_output(check, settings, operands, output)
    return bind(check.operation, settings, operands, resources)
