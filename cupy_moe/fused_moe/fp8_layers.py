"""The FP8 operations up to the point where work would start: arguments checked, arrays bound.

An operation runs its layer at once, a plan keeps it. Parameters are those of the operations, in
their order.
"""

from __future__ import annotations

from cupy_moe.fused_moe.execution import Layer, bind
from cupy_moe.fused_moe.operands import (
    ACTIVATIONS,
    describe_layer,
    describe_router,
    describe_topk,
    describe_written,
)
from cupy_moe.fused_moe.settings import moe_settings, warn_ignored_groups
from cupy_moe.validate import ArrayLike, Checker, scaling_factor

__all__ = ["logits_layer", "routed_layer"]

_ROUTED = "trtllm_fp8_per_tensor_scale_routed_moe"
_FROM_LOGITS = "trtllm_fp8_per_tensor_scale_moe"


def routed_layer(
    topk_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    routing_bias: ArrayLike | None,
    hidden_states: ArrayLike,
    gemm1_weights: ArrayLike,
    output1_scales_scalar: ArrayLike,
    output1_scales_gate_scalar: ArrayLike,
    gemm2_weights: ArrayLike,
    output2_scales_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = 3,
    routing_replay_out: ArrayLike | None = None,
    output: ArrayLike | None = None,
    gemm1_clamp_limit: ArrayLike | None = None,
    workspace_buffer: ArrayLike | None = None,
) -> Layer:
    """Layer of `cupy_moe.fused_moe.trtllm_fp8_per_tensor_scale_routed_moe`."""
    check = Checker(_ROUTED)
    settings = moe_settings(
        _ROUTED,
        ACTIVATIONS,
        False,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        use_routing_scales_on_input,
        routing_method_type,
        do_finalize,
        enable_pdl,
        tune_max_num_tokens,
        activation_type,
        True,
    )
    scaling_factor(_ROUTED, "routed_scaling_factor", routed_scaling_factor)
    operands = describe_layer(
        check,
        settings,
        hidden_states,
        gemm1_weights,
        output1_scales_scalar,
        output1_scales_gate_scalar,
        gemm2_weights,
        output2_scales_scalar,
        gemm1_clamp_limit,
    )
    describe_topk(check, settings, operands, topk_ids, routing_bias, routing_replay_out)
    describe_written(check, settings, operands, output, workspace_buffer)
    return bind(_ROUTED, settings, operands)


def logits_layer(
    routing_logits: ArrayLike,
    routing_bias: ArrayLike | None,
    hidden_states: ArrayLike,
    gemm1_weights: ArrayLike,
    output1_scales_scalar: ArrayLike,
    output1_scales_gate_scalar: ArrayLike,
    gemm2_weights: ArrayLike,
    output2_scales_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = 3,
    norm_topk_prob: bool = True,
    routing_replay_out: ArrayLike | None = None,
    output: ArrayLike | None = None,
    gemm1_clamp_limit: ArrayLike | None = None,
    workspace_buffer: ArrayLike | None = None,
) -> Layer:
    """Layer of `cupy_moe.fused_moe.trtllm_fp8_per_tensor_scale_moe`."""
    check = Checker(_FROM_LOGITS)
    settings = moe_settings(
        _FROM_LOGITS,
        ACTIVATIONS,
        True,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        use_routing_scales_on_input,
        routing_method_type,
        do_finalize,
        enable_pdl,
        tune_max_num_tokens,
        activation_type,
        norm_topk_prob,
    )
    warn_ignored_groups(_FROM_LOGITS, settings)
    factor = scaling_factor(_FROM_LOGITS, "routed_scaling_factor", routed_scaling_factor)
    operands = describe_layer(
        check,
        settings,
        hidden_states,
        gemm1_weights,
        output1_scales_scalar,
        output1_scales_gate_scalar,
        gemm2_weights,
        output2_scales_scalar,
        gemm1_clamp_limit,
    )
    operands.routed_scaling_factor = factor
    describe_router(check, settings, operands, routing_logits, routing_bias, routing_replay_out)
    describe_written(check, settings, operands, output, workspace_buffer)
    return bind(_FROM_LOGITS, settings, operands)
