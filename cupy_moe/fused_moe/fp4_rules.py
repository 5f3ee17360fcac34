"""Array arguments of the FP4 operations: rules, and the operands that they become.

Sizes of the rules below: EL local experts, H and I the hidden and intermediate size, ``block`` the
elements of K per weight scale. Partition p of two has half of the intermediate columns in FC1
(``I`` of the ``2I`` prepared rows); in FC2 half of the rows (``tp_n_tp_n``) or half of K
(``tp_n_tp_k``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupy_moe.fused_moe.settings import SIZE_MULTIPLE, MoeSettings
from cupy_moe.problem import MoeOperands, Strategy, partition_names
from cupy_moe.runtime.arrays import HOST, ArrayRef
from cupy_moe.types import ActivationType, MoeFormat, WeightLayout
from cupy_moe.validate import (
    E4M3_SCALES,
    F32,
    PACKED_FP4,
    UE8M0_SCALES,
    VECTOR_ALIGNMENT,
    ArrayLike,
    Checker,
    integer,
)

__all__ = [
    "PARTITIONED_ACTIVATIONS",
    "WHOLE_ACTIVATIONS",
    "describe_fp4_layer",
    "require_gated",
    "weight_layout_of",
]

PARTITIONED_ACTIVATIONS = frozenset(
    {ActivationType.Swiglu, ActivationType.Geglu, ActivationType.Situ}
)
WHOLE_ACTIVATIONS = PARTITIONED_ACTIVATIONS | {ActivationType.SwigluStep}  # that one in NVFP4 only

BLOCK_BYTES = (64, 128)  # of BlockMajorK
# Kernels load scales by 32 bytes; NumPy's allocator guarantees no more than 16 in host memory.
SCALE_ALIGNMENT = 32
PADDED_SCALES = 16  # scales per token of MXFP8 tokens may be padded to a multiple

_MODES = {"uint8": MoeFormat.Nvfp4, "float8_e4m3fn": MoeFormat.Mxfp8, "bfloat16": MoeFormat.Bf16}


def require_gated(operation: str, value: object, allowed: frozenset[ActivationType]) -> None:
    """Refuse activations that exist but not here; unknown numbers are left to the settings."""
    number = integer(operation, "activation_type", value)
    known = {int(a) for a in ActivationType} - {int(ActivationType.InvalidType)}
    if number in known and number not in allowed:
        activation = ActivationType(number)
        reason = "has no FP4 form" if activation.is_gated else "is not gated"
        if activation in WHOLE_ACTIVATIONS:
            reason = "has no partitioned form"
        names = ", ".join(f"{a.name} ({a.value})" for a in sorted(allowed))
        raise NotImplementedError(
            f"{operation}: activation_type {activation.name} ({number}) {reason}; "
            f"FP4 layers have {names}."
        )


def _check_step(check: Checker, settings: MoeSettings, mode: MoeFormat) -> None:
    if settings.activation is ActivationType.SwigluStep and mode is not MoeFormat.Nvfp4:
        raise NotImplementedError(
            f"{check.operation}: activation_type SwigluStep (7) needs hidden_states in NVFP4, got "
            f"{mode.name.upper()}. Pass Swiglu (3) with gemm1_clamp_limit for a limit before the "
            "SiLU."
        )


def weight_layout_of(operation: str, value: object) -> WeightLayout:
    """Convert a layout that the operations read."""
    number = integer(operation, "weight_layout", value)
    if number in (WeightLayout.MajorK, WeightLayout.BlockMajorK):
        return WeightLayout(number)
    raise ValueError(
        f"{operation}: weight_layout must be MajorK (0) or BlockMajorK (2), got {number}. Prepare "
        "with cupy_moe.weights.prepare_gemm1_weights and prepare_gemm2_weights."
    )


def describe_fp4_layer(
    check: Checker,
    settings: MoeSettings,
    layout: WeightLayout,
    strategy: Strategy | None,
    hidden_states: ArrayLike,
    hidden_states_scale: ArrayLike | None,
    gemm1_weights: Any,
    gemm1_weights_scale: Any,
    gemm2_weights: Any,
    gemm2_weights_scale: Any,
    scalars: dict[str, ArrayLike],
    activation_scalars: dict[str, ArrayLike | None],
) -> MoeOperands:
    """Check the tokens and the experts; routing and what is written are still missing.

    Parameters
    ----------
    check : Checker
    settings : MoeSettings
    layout : WeightLayout
    strategy : {"tp_n_tp_n", "tp_n_tp_k"} or None
        None: weights and scales are single arrays, else they are pairs.
    hidden_states, hidden_states_scale, gemm1_weights, ..., gemm2_weights_scale
        As the caller gave them.
    scalars : dict
        The three vectors of the FC outputs by name, in the order s1, sg, s2.
    activation_scalars : dict
        alpha, beta and limit by name, in this order.
    """
    operation = "FP4 MoE" if strategy is None else "Partitioned FP4 MoE"
    hidden, mode = _describe_hidden_states(check, operation, hidden_states)
    hidden_size = hidden.shape[1] * (2 if mode is MoeFormat.Nvfp4 else 1)
    _check_step(check, settings, mode)
    _check_sizes(check, settings, mode, strategy, hidden_size)
    scales = _describe_token_scales(check, mode, hidden.shape[0], hidden_size, hidden_states_scale)
    fc1, fc2 = _geometries(settings, strategy, hidden_size)
    w1, s1 = _describe_matrix(
        check, settings, mode, layout, strategy, fc1, gemm1_weights, gemm1_weights_scale
    )
    w2, s2 = _describe_matrix(
        check, settings, mode, layout, strategy, fc2, gemm2_weights, gemm2_weights_scale
    )
    if layout is WeightLayout.BlockMajorK:
        _check_equal_blocks(check, {"gemm1_weights": w1, "gemm2_weights": w2})
    output1, gate, output2 = (_scalar_vector(check, settings, *item) for item in scalars.items())
    alpha, beta, limit = (
        _activation_vector(check, settings, *item) for item in activation_scalars.items()
    )
    return MoeOperands(
        moe_format=mode,
        strategy=strategy,
        hidden_states=hidden,
        hidden_states_scale=scales,
        gemm1_weights=w1,
        gemm1_scales=s1,
        gemm2_weights=w2,
        gemm2_scales=s2,
        output1_scales=output1,
        output1_gate_scales=gate,
        output2_scales=output2,
        alpha=alpha,
        beta=beta,
        clamp_limit=limit,
        enable_pdl=settings.enable_pdl,
    )


# --- tokens ---------------------------------------------------------------------------------------


def _describe_hidden_states(
    check: Checker, operation: str, value: ArrayLike
) -> tuple[ArrayRef, MoeFormat]:
    name = "hidden_states"
    ref = check.anchor(name, value)
    mode = _MODES.get(ref.dtype)
    if mode is None:
        raise check.kind_error(
            f"{check.operation}: {operation} supports NVFP4, MXFP8, or BF16 activations: "
            f"hidden_states must be uint8 (packed E2M1), float8_e4m3fn or bfloat16, got "
            f"{ref.dtype}. Quantize with cupy_moe.weights."
        )
    columns = "hidden_size/2" if mode is MoeFormat.Nvfp4 else "hidden_size"
    if len(ref.shape) != 2:
        got = f"shape {tuple(ref.shape)}"
        check.refuse(ValueError, name, f"be (num_tokens, {columns})", got)
    symbols = f"(num_tokens, {columns})"
    check.array(name, ref, (ref.dtype,), ref.shape, symbols, align=VECTOR_ALIGNMENT)
    return ref, mode


def _check_sizes(
    check: Checker, settings: MoeSettings, mode: MoeFormat, strategy: Strategy | None, hidden: int
) -> None:
    """Every partition has whole 128x4 tiles of scales (and with them whole shuffle blocks)."""
    multiple, why = SIZE_MULTIPLE, ""
    if strategy == "tp_n_tp_n":
        multiple, why = 2 * SIZE_MULTIPLE, " with tp_n_tp_n, which halves the rows of FC2"
    if hidden % multiple or not hidden:
        rule = f"have a hidden_size that is a positive multiple of {multiple}{why}"
        next_step = "Pad tokens and weights with zero columns."
        check.refuse(ValueError, "hidden_states", rule, str(hidden), next_step)
    multiple = 2 * 4 * mode.scale_block
    if strategy == "tp_n_tp_k" and settings.intermediate_size % multiple:
        rule = f"be a multiple of {multiple} with tp_n_tp_k, which halves K of FC2"
        got = str(settings.intermediate_size)
        check.refuse(ValueError, "intermediate_size", rule, got, "Pass tp_n_tp_n.")


def _describe_token_scales(
    check: Checker, mode: MoeFormat, num_tokens: int, hidden_size: int, value: ArrayLike | None
) -> ArrayRef | None:
    name = "hidden_states_scale"
    if mode is MoeFormat.Bf16:
        if value is not None:
            rule = "be None for hidden_states in bfloat16"
            check.refuse(ValueError, name, rule, type(value).__name__)
        return None
    if value is None:
        rule = f"be given for hidden_states in {mode.name.upper()}"
        check.refuse(ValueError, name, rule, "None", "Quantize with cupy_moe.weights.")
    columns = hidden_size // mode.scale_block
    padded = -(-columns // PADDED_SCALES) * PADDED_SCALES
    widths = [columns, padded] if mode is MoeFormat.Mxfp8 and padded > columns else [columns]
    sizes = tuple(num_tokens * width for width in widths)
    symbols = f"num_tokens * hidden_size/{mode.scale_block}"
    return check.bytes_of(name, value, _scale_dtypes(mode), sizes, symbols)


def _scale_dtypes(mode: MoeFormat) -> tuple[str, ...]:
    return E4M3_SCALES if mode is MoeFormat.Nvfp4 else UE8M0_SCALES


# --- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Geometry:
    """One matrix of an expert, as one partition has it: its rows by its columns (K)."""

    name: str
    rows: int
    columns: int
    row_symbol: str
    byte_symbol: str  # of K, two columns a byte


def _geometries(
    settings: MoeSettings, strategy: Strategy | None, hidden_size: int
) -> tuple[_Geometry, _Geometry]:
    size = settings.intermediate_size
    rows1, symbol1 = 2 * size, "2*intermediate_size"
    rows2, symbol2, columns2, bytes2 = hidden_size, "hidden_size", size, "intermediate_size/2"
    if strategy is not None:
        rows1, symbol1 = size, "intermediate_size"
    if strategy == "tp_n_tp_n":
        rows2, symbol2 = hidden_size // 2, "hidden_size/2"
    elif strategy == "tp_n_tp_k":
        columns2, bytes2 = size // 2, "intermediate_size/4"
    return (
        _Geometry("gemm1_weights", rows1, hidden_size, symbol1, "hidden_size/2"),
        _Geometry("gemm2_weights", rows2, columns2, symbol2, bytes2),
    )


def _describe_matrix(
    check: Checker,
    settings: MoeSettings,
    mode: MoeFormat,
    layout: WeightLayout,
    strategy: Strategy | None,
    geometry: _Geometry,
    weights: Any,
    scales: Any,
) -> tuple[tuple[ArrayRef, ...], tuple[ArrayRef, ...]]:
    """Check one matrix in all its partitions: weights, and their scales."""
    name, scale_name = geometry.name, f"{geometry.name}_scale"
    if strategy is None:
        weights, scales = [weights], [scales]
    else:
        weights = _two_shards(check, name, weights)
        scales = _two_shards(check, scale_name, scales)
    count = settings.local_num_experts * geometry.rows * (geometry.columns // mode.scale_block)
    symbols = f"local_num_experts * {geometry.row_symbol} * K/{mode.scale_block}"
    align = VECTOR_ALIGNMENT if check.device == HOST else SCALE_ALIGNMENT

    def describe_scales(name: str, value: ArrayLike | None) -> ArrayRef:
        _require(check, name, value)
        return check.bytes_of(name, value, _scale_dtypes(mode), (count,), symbols, align=align)

    names, scale_names = (partition_names(n, len(weights)) for n in (name, scale_name))
    return (
        tuple(
            _describe_weights(check, settings, layout, geometry, *item)
            for item in zip(names, weights, strict=True)
        ),
        tuple(map(describe_scales, scale_names, scales)),
    )


def _two_shards(check: Checker, name: str, value: Any) -> Sequence[Any]:
    is_sequence = isinstance(value, list | tuple)
    if not is_sequence or len(value) != 2:
        got = f"{len(value)} of them" if is_sequence else type(value).__name__
        next_step = "Cut prepared weights with cupy_moe.weights.shard_prepared_moe_weights."
        rule = "be a list of exactly two shards, one per partition"
        check.refuse(ValueError, name, rule, got, next_step)
    shards: Sequence[Any] = value
    return shards


def _describe_weights(
    check: Checker,
    settings: MoeSettings,
    layout: WeightLayout,
    geometry: _Geometry,
    name: str,
    value: ArrayLike | None,
) -> ArrayRef:
    _require(check, name, value)
    ref = check.describe(name, value)
    num_bytes = geometry.columns // 2
    shape: tuple[int, ...] = (settings.local_num_experts, geometry.rows, num_bytes)
    symbols = f"(local_num_experts, {geometry.row_symbol}, {geometry.byte_symbol})"
    if layout is WeightLayout.BlockMajorK:
        block = ref.shape[3] if len(ref.shape) == 4 else 0
        if block not in BLOCK_BYTES or num_bytes % block:
            rule = (
                f"be (local_num_experts, {geometry.byte_symbol}/block, {geometry.row_symbol}, "
                f"block) for weight_layout BlockMajorK (2), block 64 or 128 bytes of the "
                f"{num_bytes} in a row"
            )
            check.refuse(ValueError, name, rule, f"shape {tuple(ref.shape)}")
        shape = (settings.local_num_experts, num_bytes // block, geometry.rows, block)
        symbols = (
            f"(local_num_experts, {geometry.byte_symbol}/{block}, {geometry.row_symbol}, {block})"
        )
    return check.array(name, ref, PACKED_FP4, shape, symbols, align=VECTOR_ALIGNMENT)


def _check_equal_blocks(check: Checker, matrices: dict[str, tuple[ArrayRef, ...]]) -> None:
    blocks = {
        name: ref.shape[3]
        for matrix, refs in matrices.items()
        for name, ref in zip(partition_names(matrix, len(refs)), refs, strict=True)
    }
    first, expected = next(iter(blocks.items()))
    for name, block in blocks.items():
        if block != expected:
            rule = f"have blocks of {expected} bytes like {first}"
            check.refuse(ValueError, name, rule, str(block))


# --- scalars --------------------------------------------------------------------------------------


def _require(check: Checker, name: str, value: object) -> None:
    if value is None:
        check.refuse(ValueError, name, "be given", "None")


def _scalar_vector(check: Checker, settings: MoeSettings, name: str, value: ArrayLike) -> ArrayRef:
    _require(check, name, value)
    return check.rows(name, value, F32, (settings.local_num_experts,), "(local_num_experts,)")


def _activation_vector(
    check: Checker, settings: MoeSettings, name: str, value: ArrayLike | None
) -> ArrayRef | None:
    if value is None:
        return None
    activation = settings.activation
    takes_limit = activation is ActivationType.SwigluStep and name == "gemm1_clamp_limit"
    if activation not in (ActivationType.Swiglu, ActivationType.Situ) and not takes_limit:
        rule = f"be None for activation_type {activation.name} ({int(activation)})"
        next_step = "Swiglu (3) and Situ (10) take it."
        check.refuse(ValueError, name, rule, type(value).__name__, next_step)
    return _scalar_vector(check, settings, name, value)
