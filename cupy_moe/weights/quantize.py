"""From the expert weights of a BF16 or FP32 model to the arguments of the operations.

The operations take quantized, prepared weights and three FP32 scale vectors with one entry per
local expert. With ``d`` the factor that turns raw FC1 sums into physical values, ``c`` the factor
the intermediate is multiplied by before it is quantized, and ``g2`` the factor the FC2 weights were
multiplied by, the vectors are

* gate scale ``sg = d``, applied inside the nonlinearity,
* output scale ``s1 = c * d``, or ``s1 = c`` for activations without a linear half (Situ, Relu2,
  Silu), whose every use of a raw sum is scaled by ``sg`` already,
* FC2 scale ``s2 = 1 / (c * g2)``.

Weights are given in logical order: FC1 as ``[up; gate]`` (see `stack_projections`). Arrays may be
NumPy, CuPy or torch; results are of the library and device of ``w1``. Experts are quantized one at
a time, so the FP32 copies stay small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from cupy_moe.formats import Array, fp8_quantize, get_xp, mxfp4_quantize, nvfp4_quantize
from cupy_moe.runtime.arrays import to_xp
from cupy_moe.types import ActivationType, WeightLayout
from cupy_moe.weights.activations import nvfp4_tensor_scale
from cupy_moe.weights.array_arguments import E4M3_DTYPE, UE8M0_DTYPE, on_device, to_float32
from cupy_moe.weights.experts import each_expert, expert_matrices, per_expert
from cupy_moe.weights.layouts import (
    prepare_gemm1_scales,
    prepare_gemm1_weights,
    prepare_gemm2_scales,
    prepare_gemm2_weights,
)

__all__ = [
    "Fp4ExpertWeights",
    "Fp8ExpertWeights",
    "physical_to_raw",
    "quantize_experts_fp8",
    "quantize_experts_mxfp4",
    "quantize_experts_nvfp4",
    "stack_projections",
]

LINEAR_HALF = frozenset(
    {
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.SwigluStep,
        ActivationType.Identity,
    }
)
_FP8_ACTIVATIONS = LINEAR_HALF | {ActivationType.Situ, ActivationType.Relu2, ActivationType.Silu}
NVFP4_ACTIVATIONS = LINEAR_HALF - {ActivationType.Identity} | {ActivationType.Situ}


@dataclass(frozen=True, eq=False)
class Fp8ExpertWeights:
    """Expert arguments of the FP8 per-tensor operation, named like them.

    Attributes
    ----------
    gemm1_weights : array (E, M1, H), float8_e4m3fn
        Prepared FC1; M1 = 2I for gated activations, else I.
    gemm2_weights : array (E, H, I), float8_e4m3fn
        Prepared FC2.
    output1_scales_scalar, output1_scales_gate_scalar, output2_scales_scalar : array (E,), float32
        ``s1``, ``sg`` and ``s2``.
    """

    gemm1_weights: Array
    gemm2_weights: Array
    output1_scales_scalar: Array
    output1_scales_gate_scalar: Array
    output2_scales_scalar: Array


@dataclass(frozen=True, eq=False)
class Fp4ExpertWeights:
    """Expert arguments of the FP4 block-scale operation before sharding, named like them.

    Attributes
    ----------
    gemm1_weights : array (E, 2I, H/2), uint8
        Prepared FC1, two E2M1 codes per byte; (E, H/2/block, 2I, block) for ``BlockMajorK``.
    gemm1_weights_scale : array (E, 2I, H/block), float8_e4m3fn (NVFP4) or float8_e8m0fnu (MXFP4)
        In the 128x4 tile order, padded to whole tiles.
    gemm2_weights, gemm2_weights_scale : array (E, H, I/2) and (E, H, I/block)
        The same for FC2.
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar : array (E,), float32
        ``s1``, ``sg`` and ``s2``; ones for MXFP4.
    """

    gemm1_weights: Array
    gemm1_weights_scale: Array
    gemm2_weights: Array
    gemm2_weights_scale: Array
    output1_scale_scalar: Array
    output1_scale_gate_scalar: Array
    output2_scale_scalar: Array


@on_device
def stack_projections(*, up_proj: Array, gate_proj: Array) -> Array:
    """Logical FC1 weights ``[up; gate]`` of a gated activation.

    The nonlinearity acts on ``gate_proj``, so that ``down_proj(act(gate(x)) * up(x))`` is the
    expert. NOTE: fused checkpoints often store ``[gate; up]``; split them first.

    Parameters
    ----------
    up_proj, gate_proj : array (E, I, H), same library and dtype

    Returns
    -------
    array (E, 2I, H), same library and dtype

    Raises
    ------
    ValueError
        The shapes or dtypes differ.
    """
    up, restore = to_xp(up_proj, "stack_projections: up_proj")
    gate, _ = to_xp(gate_proj, "stack_projections: gate_proj")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            "stack_projections: up_proj and gate_proj must have one shape (E, I, H) and dtype, got "
            f"{tuple(up.shape)} {up.dtype.name} and {tuple(gate.shape)} {gate.dtype.name}."
        )
    raw = f"u{up.dtype.itemsize}"  # CuPy copies raw integers only, not ml_dtypes
    stacked = get_xp(up).concatenate([up.view(raw), gate.view(raw)], axis=-2)
    return restore(stacked.view(up.dtype))


@on_device
def quantize_experts_fp8(
    w1: Array,
    w2: Array,
    *,
    activation_type: int,
    input_scale: Array,
    intermediate_scale: Array,
) -> Fp8ExpertWeights:
    """Quantize experts for the FP8 per-tensor operation: one factor per expert and matrix.

    Parameters
    ----------
    w1 : array (E, 2I, H) as ``[up; gate]``, or (E, I, H) if not gated; bfloat16, float16 or float32
        Logical FC1 weights, H and I multiples of 32 (the operation asks for 128).
    w2 : array (E, H, I), same library
        Logical FC2 weights.
    activation_type : ActivationType
        Swiglu, Geglu, SwigluStep, Situ, Relu2, Identity or Silu.
    input_scale : float, or array of shape () or (E,)
        The factor that hidden states are multiplied by before E4M3 rounding (see
        `quantize_activations_fp8`).
    intermediate_scale : float, or array of shape () or (E,)
        ``c``, the factor for the FC1 output (see `calibrate_intermediate_scale`).

    Returns
    -------
    Fp8ExpertWeights

    Raises
    ------
    ValueError
        Shapes do not fit each other or the activation; a weight is not finite; a scale is not
        positive and finite; the activation is not one of the above.
    TypeError
        Weights of another dtype, codes for example.
    """
    name = "quantize_experts_fp8"
    activation = require_activation(name, activation_type, _FP8_ACTIVATIONS)
    w1, w2, restore = expert_matrices(name, w1, w2, gated=activation.is_gated)
    g_x = per_expert(name, "input_scale", input_scale, w1)
    c = per_expert(name, "intermediate_scale", intermediate_scale, w1)
    q1, g1 = each_expert(fp8_quantize, w1, f"{name}: w1")
    q2, g2 = each_expert(fp8_quantize, w2, f"{name}: w2")
    s1, sg, s2 = _scale_vectors(activation, d=1 / (g_x * g1), c=c, g2=g2)
    gemm1 = prepare_gemm1_weights(q1, gated=activation.is_gated)
    return Fp8ExpertWeights(
        gemm1_weights=restore(gemm1.view(E4M3_DTYPE)),
        gemm2_weights=restore(prepare_gemm2_weights(q2).view(E4M3_DTYPE)),
        output1_scales_scalar=restore(s1),
        output1_scales_gate_scalar=restore(sg),
        output2_scales_scalar=restore(s2),
    )


@on_device
def quantize_experts_nvfp4(
    w1: Array,
    w2: Array,
    *,
    activation_type: int,
    input_scale: Array,
    intermediate_scale: Array,
    weight_layout: int = WeightLayout.MajorK,
    block_major_k_bytes: int = 128,
) -> Fp4ExpertWeights:
    """Quantize experts for NVFP4 activations and weights, one global scale per expert and matrix.

    Parameters
    ----------
    w1 : array (E, 2I, H), bfloat16, float16 or float32
        Logical FC1 weights ``[up; gate]``.
    w2 : array (E, H, I), same library
    activation_type : ActivationType
        Swiglu, Geglu, SwigluStep or Situ.
    input_scale : float, or array of shape () or (E,)
        Global scale of the hidden states (see `quantize_activations_nvfp4`).
    intermediate_scale : float, or array of shape () or (E,)
        ``c``, the global scale of the FC1 output (see `calibrate_intermediate_scale`).
    weight_layout, block_major_k_bytes
        See `prepare_gemm1_weights`.

    Returns
    -------
    Fp4ExpertWeights

    Raises
    ------
    TypeError, ValueError
        As in `quantize_experts_fp8`.
    """
    name = "quantize_experts_nvfp4"
    activation = require_activation(name, activation_type, NVFP4_ACTIVATIONS)
    w1, w2, restore = expert_matrices(name, w1, w2, gated=True)
    g_x = per_expert(name, "input_scale", input_scale, w1)
    c = per_expert(name, "intermediate_scale", intermediate_scale, w1)
    q1, sf1, g1 = each_expert(_nvfp4_with_own_scale, w1, f"{name}: w1")
    q2, sf2, g2 = each_expert(_nvfp4_with_own_scale, w2, f"{name}: w2")
    vectors = _scale_vectors(activation, d=1 / (g_x * g1), c=c, g2=g2)
    return fp4_experts(
        (q1, sf1), (q2, sf2), E4M3_DTYPE, vectors, restore, weight_layout, block_major_k_bytes
    )


@on_device
def quantize_experts_mxfp4(
    w1: Array,
    w2: Array,
    *,
    weight_layout: int = WeightLayout.MajorK,
    block_major_k_bytes: int = 128,
) -> Fp4ExpertWeights:
    """Quantize experts to MXFP4, for MXFP8 or BF16 activations.

    Block scales carry the whole range, so there is nothing to calibrate; the scale vectors, which
    the operation asks for, are ones.

    Parameters
    ----------
    w1 : array (E, 2I, H), bfloat16, float16 or float32
        Logical FC1 weights ``[up; gate]``.
    w2 : array (E, H, I), same library
    weight_layout, block_major_k_bytes
        See `prepare_gemm1_weights`.

    Returns
    -------
    Fp4ExpertWeights

    Raises
    ------
    TypeError, ValueError
        As in `quantize_experts_fp8`.
    """
    name = "quantize_experts_mxfp4"
    w1, w2, restore = expert_matrices(name, w1, w2, gated=True)
    ones = get_xp(w1).ones(len(w1), dtype=np.float32)
    return fp4_experts(
        each_expert(mxfp4_quantize, w1, f"{name}: w1"),
        each_expert(mxfp4_quantize, w2, f"{name}: w2"),
        UE8M0_DTYPE,
        (ones, ones.copy(), ones.copy()),
        restore,
        weight_layout,
        block_major_k_bytes,
    )


@on_device
def physical_to_raw(value: Array, gate_scale: Array) -> Array:
    """Convert a limit or an additive constant from physical units to raw accumulator units.

    The operations apply ``gemm1_clamp_limit``, and Swiglu's ``gemm1_beta``, to raw FC1 sums:
    ``raw = value / d`` with ``d`` the gate scale. Not to be converted: ``gemm1_alpha``, and
    ``gemm1_beta`` of Situ, which are physical. For MXFP4 (gate scale 1) both units are the same.

    Parameters
    ----------
    value : float, or array of shape () or (E,)
        In physical units, for example 7.0.
    gate_scale : array (E,), float32
        ``output1_scales_gate_scalar`` or ``output1_scale_gate_scalar``.

    Returns
    -------
    array (E,), float32, of the library of ``gate_scale``
    """
    name = "physical_to_raw"
    d, restore = to_xp(gate_scale, f"{name}: gate_scale")
    physical = to_float32(value, d, f"{name}: value")
    if d.ndim != 1 or physical.shape not in ((), d.shape):
        raise ValueError(
            f"{name}: gate_scale must be (E,), and value a number or as long, got "
            f"{tuple(d.shape)} and {tuple(physical.shape)}."
        )
    return restore((physical / d).astype(np.float32))


# --- parts ----------------------------------------------------------------------------------------


def _scale_vectors(
    activation: ActivationType, *, d: Array, c: Array, g2: Array
) -> tuple[Array, Array, Array]:
    """``s1``, ``sg``, ``s2`` as explained at the top."""
    return (c * d if activation in LINEAR_HALF else c), d, 1 / (c * g2)


def _nvfp4_with_own_scale(w: Array) -> tuple[Array, Array, Array]:
    g = nvfp4_tensor_scale(w)
    return *nvfp4_quantize(w, g), g


def fp4_experts(
    fc1: tuple[Array, ...],
    fc2: tuple[Array, ...],
    scale_dtype: np.dtype[np.generic],
    vectors: tuple[Array, Array, Array],
    restore: Callable[[Array], Array],
    weight_layout: int,
    block_major_k_bytes: int,
) -> Fp4ExpertWeights:
    """Prepare logical codes and linear scales of both matrices."""
    s1, sg, s2 = vectors
    prepare1, prepare2 = (
        partial(prepare, weight_layout=weight_layout, block_major_k_bytes=block_major_k_bytes)
        for prepare in (prepare_gemm1_weights, prepare_gemm2_weights)
    )
    return Fp4ExpertWeights(
        gemm1_weights=restore(prepare1(fc1[0])),
        gemm1_weights_scale=restore(prepare_gemm1_scales(fc1[1]).view(scale_dtype)),
        gemm2_weights=restore(prepare2(fc2[0])),
        gemm2_weights_scale=restore(prepare_gemm2_scales(fc2[1]).view(scale_dtype)),
        output1_scale_scalar=restore(s1),
        output1_scale_gate_scalar=restore(sg),
        output2_scale_scalar=restore(s2),
    )


def require_activation(
    name: str, activation_type: int, allowed: frozenset[ActivationType]
) -> ActivationType:
    """Convert the number of an allowed activation."""
    if activation_type not in allowed:
        names = ", ".join(f"{a.name} ({a.value})" for a in sorted(allowed))
        raise ValueError(f"{name}: activation_type must be one of {names}, got {activation_type}.")
    return ActivationType(activation_type)
