"""From FP4 checkpoints to the arguments of the FP4 operations: bytes are reordered, not changed.

Matrices whose sizes are no multiples of what the operations need are padded with zero weights:
pad the columns of the hidden states alike, and cut those of the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_moe.formats import MX_BLOCK, NVFP4_BLOCK, Array, get_xp
from cupy_moe.runtime.arrays import to_xp
from cupy_moe.types import WeightLayout
from cupy_moe.weights.array_arguments import E4M3_DTYPE, UE8M0_DTYPE, on_device
from cupy_moe.weights.experts import per_expert
from cupy_moe.weights.quantize import (
    LINEAR_HALF,
    NVFP4_ACTIVATIONS,
    Fp4ExpertWeights,
    fp4_experts,
    require_activation,
)

__all__ = ["Nvfp4Projection", "experts_from_gpt_oss", "experts_from_nvfp4"]

_MULTIPLE = 128
# Elements of K per block scale, and the byte of 1, by the dtype of the scales.
_BLOCKS = {UE8M0_DTYPE: (MX_BLOCK, 127), E4M3_DTYPE: (NVFP4_BLOCK, 0x38)}


class Nvfp4Projection(NamedTuple):
    """One projection of all experts, as NVFP4 checkpoints store it.

    Attributes
    ----------
    weight : array (E, rows, K/2), uint8
        Two E2M1 codes a byte, the even column in the low half.
    weight_scale : array (E, rows, K/16), float8_e4m3fn or uint8
    weight_scale_2 : array of shape () or (E,), float32
        What codes and scales are multiplied by.
    """

    weight: Array
    weight_scale: Array
    weight_scale_2: Array


@on_device
def experts_from_gpt_oss(
    gate_up_blocks: Array,
    gate_up_scales: Array,
    down_blocks: Array,
    down_scales: Array,
    *,
    hidden_multiple: int = _MULTIPLE,
    intermediate_multiple: int = _MULTIPLE,
    weight_layout: int = WeightLayout.MajorK,
    block_major_k_bytes: int = 128,
) -> Fp4ExpertWeights:
    """Prepare the MXFP4 experts of a layer of gpt-oss, for MXFP8 or BF16 activations.

    Parameters
    ----------
    gate_up_blocks : array (E, 2I, H/32, 16), uint8
        ``mlp.experts.gate_up_proj_blocks``: gate and up rows alternate, gate first.
    gate_up_scales : array (E, 2I, H/32), uint8 or float8_e8m0fnu
        ``mlp.experts.gate_up_proj_scales``, UE8M0.
    down_blocks, down_scales : array (E, H, I/32, 16) and (E, H, I/32), same dtypes
        ``mlp.experts.down_proj_blocks`` and ``..._scales``.
    hidden_multiple, intermediate_multiple : int
        H and I are padded to multiples of these: of 128, or of 256 where a strategy asks for it.
    weight_layout, block_major_k_bytes
        See `prepare_gemm1_weights`.

    Returns
    -------
    Fp4ExpertWeights
        Of the padded sizes, in the library and on the device of ``gate_up_blocks``.

    Raises
    ------
    TypeError
        An array of codes or scales has another dtype.
    ValueError
        Shapes do not fit each other, or a multiple is none of 128.

    Notes
    -----
    The model's activation is Swiglu with alpha 1.702, beta 1 and limit 7. Its biases have no place
    in the operations.
    """
    name = "experts_from_gpt_oss"
    w1, w2 = _bytes_of(name, gate_up_blocks=gate_up_blocks, down_blocks=down_blocks)
    scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
    s1, s2 = _bytes_of(name, UE8M0_DTYPE, **scales)
    fits = (
        w1.ndim == w2.ndim == 4
        and w1.shape[3] == w2.shape[3] == MX_BLOCK // 2
        and w1.shape[:3] == s1.shape
        and w2.shape[:3] == s2.shape
        and w1.shape[0] == w2.shape[0]
        and w1.shape[1] == 2 * MX_BLOCK * w2.shape[2]
        and w2.shape[1] == MX_BLOCK * w1.shape[2]
    )
    if not fits:
        raise ValueError(
            f"{name}: blocks must be (E, 2I, H/32, 16) and (E, H, I/32, 16) with scales (E, 2I, "
            f"H/32) and (E, H, I/32), got {tuple(w1.shape)}, {tuple(w2.shape)}, "
            f"{tuple(s1.shape)} and {tuple(s2.shape)}."
        )
    w1, w2 = (w.reshape(*w.shape[:2], -1) for w in (w1, w2))
    up, gate = ((w1[:, first::2], s1[:, first::2]) for first in (1, 0))
    ones = get_xp(w1).ones(len(w1), np.float32)
    hidden = _padded(name, "hidden_multiple", hidden_multiple, w2.shape[1])
    inter = _padded(name, "intermediate_multiple", intermediate_multiple, w1.shape[1] // 2)
    return fp4_experts(
        _stacked([up, gate], inter, hidden, UE8M0_DTYPE),
        _stacked([(w2, s2)], hidden, inter, UE8M0_DTYPE),
        UE8M0_DTYPE,
        (ones, ones.copy(), ones.copy()),
        to_xp(gate_up_blocks)[1],
        weight_layout,
        block_major_k_bytes,
    )


@on_device
def experts_from_nvfp4(
    up_proj: Nvfp4Projection,
    gate_proj: Nvfp4Projection,
    down_proj: Nvfp4Projection,
    *,
    activation_type: int,
    input_scale: Array,
    intermediate_scale: Array,
    hidden_multiple: int = _MULTIPLE,
    intermediate_multiple: int = _MULTIPLE,
    weight_layout: int = WeightLayout.MajorK,
    block_major_k_bytes: int = 128,
) -> Fp4ExpertWeights:
    """Prepare the experts of an NVFP4 checkpoint, for NVFP4 activations.

    Parameters
    ----------
    up_proj, gate_proj : Nvfp4Projection, (E, I, H)
        The nonlinearity acts on ``gate_proj``.
    down_proj : Nvfp4Projection, (E, H, I)
    activation_type : ActivationType
        Swiglu, Geglu, SwigluStep or Situ.
    input_scale : float, or array of shape () or (E,)
        Global scale that the hidden states are quantized with (`quantize_activations_nvfp4`): the
        inverse of a checkpoint's ``input_scale``.
    intermediate_scale : float, or array of shape () or (E,)
        Global scale of the FC1 output, the inverse of ``input_scale`` of ``down_proj``.
    hidden_multiple, intermediate_multiple, weight_layout, block_major_k_bytes
        As in `experts_from_gpt_oss`.

    Returns
    -------
    Fp4ExpertWeights
        Of the padded sizes, in the library and on the device of ``up_proj.weight``.

    Raises
    ------
    TypeError
        No `Nvfp4Projection`, or an array of codes or scales has another dtype.
    ValueError
        Shapes do not fit each other, a factor is not positive, a multiple is none of 128, or up and
        gate have different global scales with an activation that has one factor for both.
    """
    name = "experts_from_nvfp4"
    activation = require_activation(name, activation_type, NVFP4_ACTIVATIONS)
    projections = {"up_proj": up_proj, "gate_proj": gate_proj, "down_proj": down_proj}
    for argument, projection in projections.items():
        if not isinstance(projection, Nvfp4Projection):
            got = type(projection).__name__
            raise TypeError(f"{name}: {argument} must be an Nvfp4Projection, got {got}.")
    codes = _bytes_of(name, **{f"{n}.weight": p.weight for n, p in projections.items()})
    typed = {f"{n}.weight_scale": p.weight_scale for n, p in projections.items()}
    scales = _bytes_of(name, E4M3_DTYPE, **typed)
    _check_nvfp4_shapes(name, codes, scales)
    weights = codes[0]
    up_scale, gate_scale, down_scale = (
        per_expert(name, f"{n}.weight_scale_2", p.weight_scale_2, weights)
        for n, p in projections.items()
    )
    g_x = per_expert(name, "input_scale", input_scale, weights)
    c = per_expert(name, "intermediate_scale", intermediate_scale, weights)
    if activation not in LINEAR_HALF and bool((up_scale != gate_scale).any()):
        raise ValueError(
            f"{name}: up_proj and gate_proj must have equal weight_scale_2 for {activation.name}, "
            f"which has one factor for both, got {up_scale} and {gate_scale}."
        )
    s1 = c * up_scale / g_x if activation in LINEAR_HALF else c
    up, gate, down = zip(codes, scales, strict=True)
    hidden = _padded(name, "hidden_multiple", hidden_multiple, down[0].shape[1])
    inter = _padded(name, "intermediate_multiple", intermediate_multiple, up[0].shape[1])
    return fp4_experts(
        _stacked([up, gate], inter, hidden, E4M3_DTYPE),
        _stacked([down], hidden, inter, E4M3_DTYPE),
        E4M3_DTYPE,
        (s1, gate_scale / g_x, down_scale / c),
        to_xp(up_proj.weight)[1],
        weight_layout,
        block_major_k_bytes,
    )


def _bytes_of(name: str, typed: np.dtype[Any] | None = None, /, **arrays: Array) -> list[Array]:
    """View as bytes what are such, or of the dtype that these bytes may be typed as."""
    allowed = ("uint8",) if typed is None else ("uint8", typed.name)
    views = []
    for argument, value in arrays.items():
        array, _ = to_xp(value, f"{name}: {argument}")
        if array.dtype.name not in allowed:
            raise TypeError(
                f"{name}: {argument} must be {' or '.join(allowed)}, as the checkpoint stores it, "
                f"got {array.dtype.name}."
            )
        views.append(array.view(np.uint8))
    return views


def _check_nvfp4_shapes(name: str, codes: list[Array], scales: list[Array]) -> None:
    """Refuse projections that do not fit each other; up, gate and down."""
    shapes, scale_shapes = ([tuple(x.shape) for x in arrays] for arrays in (codes, scales))
    up, gate, down = shapes
    fits = len(up) == len(down) == 3 and gate == up
    fits = fits and (down[0], 2 * down[2], down[1]) == (up[0], up[1], 2 * up[2])
    if not fits or scale_shapes != [(*s[:2], 2 * s[2] // NVFP4_BLOCK) for s in shapes]:
        raise ValueError(
            f"{name}: weights must be (E, I, H/2) twice and (E, H, I/2) with scales per 16 columns,"
            f" got {shapes} and {scale_shapes}."
        )


def _padded(name: str, argument: str, multiple: int, size: int) -> int:
    if multiple < 1 or multiple % _MULTIPLE:
        raise ValueError(f"{name}: {argument} must be a multiple of {_MULTIPLE}, got {multiple}.")
    return -(-size // multiple) * multiple


def _stacked(
    parts: list[tuple[Array, Array]], rows: int, k: int, scale_dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Pad and stack to codes (E, parts * rows, k/2) and scales (E, parts * rows, k/block)."""
    xp, experts = get_xp(parts[0][0]), len(parts[0][0])
    block, one = _BLOCKS[scale_dtype]
    codes = xp.zeros((experts, len(parts), rows, k // 2), np.uint8)
    scales = xp.full((experts, len(parts), rows, k // block), one, np.uint8)
    for i, part in enumerate(parts):
        for padded, values in zip((codes, scales), part, strict=True):
            padded[:, i, : values.shape[1], : values.shape[2]] = values
    stacked = (x.reshape(experts, len(parts) * rows, -1) for x in (codes, scales))
    return next(stacked), next(stacked)
