"""Array arguments of the FP8 operations, and those that every operation has: rules and operands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupy_moe.fused_moe.settings import SIZE_MULTIPLE, MoeSettings
from cupy_moe.problem import MoeOperands
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.types import ActivationType, MoeFormat, RoutingMethodType
from cupy_moe.validate import (
    BF16,
    BF16_OR_F32,
    E4M3,
    F32,
    INT16,
    INT32,
    VECTOR_ALIGNMENT,
    ArrayLike,
    Checker,
)

__all__ = [
    "ACTIVATIONS",
    "describe_layer",
    "describe_output",
    "describe_precomputed",
    "describe_router",
    "describe_topk",
    "describe_written",
    "named_arrays",
    "operand_of",
]

ACTIVATIONS = frozenset(
    {
        ActivationType.Silu,
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.Relu2,
        ActivationType.SwigluStep,
        ActivationType.Identity,
        ActivationType.Situ,
    }
)
_BIASED_METHODS = (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2)

# Public arguments by the field of `MoeOperands`, where the two differ.
_FP8_ARGUMENTS = {
    "output1_scales": "output1_scales_scalar",
    "output1_gate_scales": "output1_scales_gate_scalar",
    "output2_scales": "output2_scales_scalar",
    "clamp_limit": "gemm1_clamp_limit",
    "topk_weights": "topk_ids[1]",
}
_FP4_ARGUMENTS = {
    "gemm1_scales": "gemm1_weights_scale",
    "gemm2_scales": "gemm2_weights_scale",
    "output1_scales": "output1_scale_scalar",
    "output1_gate_scales": "output1_scale_gate_scalar",
    "output2_scales": "output2_scale_scalar",
    "alpha": "gemm1_alpha",
    "beta": "gemm1_beta",
    "clamp_limit": "gemm1_clamp_limit",
}
_FIELDS = {
    "topk_ids[0]": "topk_ids",
    **{v: k for names in (_FP8_ARGUMENTS, _FP4_ARGUMENTS) for k, v in names.items()},
}


def named_arrays(operands: MoeOperands) -> Iterator[tuple[str, ArrayRef]]:
    """All arrays of a call under the names of the public arguments."""
    names = _FP8_ARGUMENTS if operands.moe_format is MoeFormat.Fp8 else _FP4_ARGUMENTS
    for name, ref in operands.arrays():
        field, bracket, index = name.partition("[")
        yield f"{names.get(field, field)}{bracket}{index}", ref


def operand_of(argument: str) -> str:
    """Name in `MoeOperands.arrays` of an array argument, ``name[i]`` where it is in a pair."""
    name, bracket, index = argument.partition("[")
    return _FIELDS.get(argument) or f"{_FIELDS.get(name, name)}{bracket}{index}"


def describe_layer(
    check: Checker,
    settings: MoeSettings,
    hidden_states: ArrayLike,
    gemm1_weights: ArrayLike,
    output1_scales_scalar: ArrayLike,
    output1_scales_gate_scalar: ArrayLike,
    gemm2_weights: ArrayLike,
    output2_scales_scalar: ArrayLike,
    gemm1_clamp_limit: ArrayLike | None,
) -> MoeOperands:
    """Check the tokens and the experts; routing and what is written are still missing."""
    hidden = _describe_hidden_states(check, hidden_states)
    hidden_size = hidden.shape[1]
    intermediate_size, local_num_experts = settings.intermediate_size, settings.local_num_experts
    rows, rows_symbol, hint = _gemm1_rows(settings.activation, intermediate_size)
    vector = (local_num_experts,)
    vector_symbol = "(local_num_experts,)"
    w1 = check.array(
        "gemm1_weights",
        gemm1_weights,
        E4M3,
        (local_num_experts, rows, hidden_size),
        rows_symbol,
        align=VECTOR_ALIGNMENT,
        hint=hint,
    )
    w2 = check.array(
        "gemm2_weights",
        gemm2_weights,
        E4M3,
        (local_num_experts, hidden_size, intermediate_size),
        "(local_num_experts, hidden_size, intermediate_size)",
        align=VECTOR_ALIGNMENT,
    )
    operands = MoeOperands(
        moe_format=MoeFormat.Fp8,
        hidden_states=hidden,
        gemm1_weights=(w1,),
        gemm2_weights=(w2,),
        output1_scales=check.array(
            "output1_scales_scalar", output1_scales_scalar, F32, vector, vector_symbol
        ),
        output1_gate_scales=check.array(
            "output1_scales_gate_scalar", output1_scales_gate_scalar, F32, vector, vector_symbol
        ),
        output2_scales=check.array(
            "output2_scales_scalar", output2_scales_scalar, F32, vector, vector_symbol
        ),
        enable_pdl=settings.enable_pdl,
    )
    if gemm1_clamp_limit is not None:
        if settings.activation is not ActivationType.SwigluStep:
            got = f"an array with {settings.activation.name} ({int(settings.activation)})"
            rule = "be None unless activation_type is SwigluStep (7)"
            check.refuse(ValueError, "gemm1_clamp_limit", rule, got)
        operands.clamp_limit = check.array(
            "gemm1_clamp_limit", gemm1_clamp_limit, F32, vector, vector_symbol
        )
    return operands


def _describe_hidden_states(check: Checker, value: ArrayLike) -> ArrayRef:
    name = "hidden_states"
    ref = check.anchor(name, value)
    if ref.dtype in ("bfloat16", "float16"):
        next_step = "Quantize with cupy_moe.weights.quantize_activations_fp8."
        check.refuse(NotImplementedError, name, "be float8_e4m3fn", ref.dtype, next_step)
    shape = ref.shape
    if len(shape) != 2:
        check.refuse(ValueError, name, "be (num_tokens, hidden_size)", f"shape {tuple(shape)}")
    check.array(name, ref, E4M3, shape, "(num_tokens, hidden_size)", align=VECTOR_ALIGNMENT)
    if shape[1] % SIZE_MULTIPLE or not shape[1]:
        rule = f"have a hidden_size that is a positive multiple of {SIZE_MULTIPLE}"
        next_step = "Pad tokens and weights with zero columns."
        check.refuse(ValueError, name, rule, str(shape[1]), next_step)
    return ref


@cache
def _gemm1_rows(activation: ActivationType, intermediate_size: int) -> tuple[int, str, str]:
    """Rows of one expert's first matrix, the whole shape in words, and what to do otherwise."""
    label = f"{activation.name} ({int(activation)})"
    others = sorted(a for a in ACTIVATIONS if a.is_gated is not activation.is_gated)
    choices = ", ".join(str(int(a)) for a in others)
    if activation.is_gated:
        return (
            2 * intermediate_size,
            "(local_num_experts, 2*intermediate_size, hidden_size)",
            f"{label} is gated; not gated? Pass activation_type {choices}.",
        )
    return (
        intermediate_size,
        "(local_num_experts, intermediate_size, hidden_size)",
        f"{label} is not gated; gated? Pass activation_type {choices}.",
    )


def describe_topk(
    check: Checker,
    settings: MoeSettings,
    operands: MoeOperands,
    topk_ids: ArrayLike | tuple[ArrayLike, ...],
    routing_bias: ArrayLike | None,
    routing_replay_out: ArrayLike | None,
) -> None:
    """Check pre-computed routing, packed or a tuple; see `describe_precomputed`."""
    weights, names = None, ("topk_ids", "")
    if isinstance(topk_ids, tuple):
        if len(topk_ids) != 2:
            rule = "be a packed array or a tuple of two arrays (ids, weights)"
            check.refuse(ValueError, "topk_ids", rule, f"a tuple of {len(topk_ids)}")
        topk_ids, weights = topk_ids
        names = ("topk_ids[0]", "topk_ids[1]")
        if weights is None:  # which would mean packed words below
            check.describe(names[1], weights)
    describe_precomputed(
        check, settings, operands, names, topk_ids, weights, routing_bias, routing_replay_out
    )


def describe_precomputed(
    check: Checker,
    settings: MoeSettings,
    operands: MoeOperands,
    names: tuple[str, str],
    topk_ids: ArrayLike,
    topk_weights: ArrayLike | None,
    routing_bias: ArrayLike | None,
    routing_replay_out: ArrayLike | None,
) -> None:
    """Check packed words, or ids and weights under their two names.

    Bias and replay buffer have no effect and are no operands.
    """
    shape, symbols = (operands.hidden_states.shape[0], settings.top_k), "(num_tokens, top_k)"
    operands.topk_ids = check.array(names[0], topk_ids, INT32, shape, symbols)
    if topk_weights is not None:
        operands.topk_weights = check.array(names[1], topk_weights, BF16_OR_F32, shape, symbols)
    if routing_bias is not None:
        _describe_bias(check, settings, routing_bias)
    if routing_replay_out is not None:
        check.rows("routing_replay_out", routing_replay_out, INT16, shape, symbols)


def describe_router(
    check: Checker,
    settings: MoeSettings,
    operands: MoeOperands,
    routing_logits: ArrayLike,
    routing_bias: ArrayLike | None,
    routing_replay_out: ArrayLike | None,
) -> None:
    """Check what experts are selected from, and the buffer that receives the selection."""
    num_tokens = operands.hidden_states.shape[0]
    shape = (num_tokens, settings.num_experts)
    operands.routing_logits = check.array(
        "routing_logits", routing_logits, BF16_OR_F32, shape, "(num_tokens, num_experts)"
    )
    if routing_bias is not None:
        bias = _describe_bias(check, settings, routing_bias)
        operands.routing_bias = bias if settings.routing_method in _BIASED_METHODS else None
    if routing_replay_out is not None:
        name, shape = "routing_replay_out", (num_tokens, settings.top_k)
        replay = check.rows(name, routing_replay_out, INT16, shape, "(num_tokens, top_k)")
        _check_written(check, operands, name, replay)
        operands.routing_replay_out = replay


def _describe_bias(check: Checker, settings: MoeSettings, value: ArrayLike) -> ArrayRef:
    shape = (settings.num_experts,)
    return check.array("routing_bias", value, BF16_OR_F32, shape, "(num_experts,)")


def describe_written(
    check: Checker,
    settings: MoeSettings,
    operands: MoeOperands,
    output: ArrayLike | None,
    workspace_buffer: ArrayLike | None,
) -> None:
    """Check the arrays that the call writes, after all that it reads are known."""
    describe_output(check, settings, operands, output)
    if workspace_buffer is not None:
        if not settings.do_finalize:
            rule = "be None unless do_finalize is True"
            check.refuse(ValueError, "workspace_buffer", rule, "a buffer with do_finalize=False")
        ref = check.workspace("workspace_buffer", workspace_buffer)
        _check_written(check, operands, "workspace_buffer", ref)
        operands.workspace_buffer = ref


def describe_output(
    check: Checker, settings: MoeSettings, operands: MoeOperands, output: ArrayLike | None
) -> None:
    """Check the caller's output, which has no meaning unless the layer finalizes."""
    if output is not None and settings.do_finalize:
        shape = (operands.hidden_states.shape[0], operands.hidden_size)
        symbols = "(num_tokens, hidden_size)"
        ref = check.array("output", output, BF16, shape, symbols, align=VECTOR_ALIGNMENT)
        _check_written(check, operands, "output", ref)
        operands.output = ref


def _check_written(check: Checker, operands: MoeOperands, name: str, ref: ArrayRef) -> None:
    check.writable(name, ref, named_arrays(operands))
