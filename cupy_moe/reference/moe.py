"""Reference of the MoE operations: NumPy in, NumPy out, weights as the operations take them.

The oracle of the tests and the backend for arrays in host memory. Arguments are assumed valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupy_moe.codecs import encode_bf16, round_bf16
from cupy_moe.reference.finalize import weighted_sum
from cupy_moe.reference.number_format import FP4_FORMATS, FP8, Quantized
from cupy_moe.reference.routing import build_permutation
from cupy_moe.reference.stages import ExpertScalars, Layer, fc1, fc2, requantize
from cupy_moe.types import ActivationType

__all__ = ["DEFAULT_TILE", "fp4_layer", "fp4_moe", "fp8_layer", "fp8_moe", "run_layer"]

BF16Bits: TypeAlias = NDArray[np.uint16]
Bytes: TypeAlias = NDArray[np.uint8]
F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
Rows: TypeAlias = tuple[BF16Bits, I32]
Mode: TypeAlias = Literal["nvfp4", "mxfp8", "bf16"]
Strategy: TypeAlias = Literal["tp_n_tp_n", "tp_n_tp_k"]

DEFAULT_TILE = 8
"""Padding granularity of the permuted rows, the smallest the kernels use."""

_NAN_BITS = np.uint16(0x7FC0)


def fp8_layer(
    gemm1: Bytes,
    gemm2: Bytes,
    s1: F32,
    sgate: F32,
    s2: F32,
    *,
    activation: ActivationType,
    clamp_limit: F32 | None = None,
) -> Layer:
    """Layer of the FP8 per-tensor operations; parameters as in `fp8_moe`."""
    return Layer(
        number_format=FP8,
        activation=activation,
        gemm1=(Quantized(gemm1),),
        gemm2=(Quantized(gemm2),),
        scalars=ExpertScalars(s1, sgate, s2, limit=clamp_limit),
    )


def fp4_layer(
    gemm1: Sequence[Bytes],
    gemm1_scales: Sequence[Bytes],
    gemm2: Sequence[Bytes],
    gemm2_scales: Sequence[Bytes],
    s1: F32,
    sgate: F32,
    s2: F32,
    *,
    mode: Mode,
    activation: ActivationType,
    strategy: Strategy = "tp_n_tp_n",
    alpha: F32 | None = None,
    beta: F32 | None = None,
    clamp_limit: F32 | None = None,
) -> Layer:
    """Layer of the FP4 block-scale operations; parameters as in `fp4_moe`."""
    number_format = FP4_FORMATS[mode]
    if not number_format.uses_scales:
        s1 = sgate = s2 = np.ones(gemm1[0].shape[0], np.float32)
    return Layer(
        number_format=number_format,
        activation=activation,
        gemm1=tuple(map(Quantized, gemm1, gemm1_scales)),
        gemm2=tuple(map(Quantized, gemm2, gemm2_scales)),
        scalars=ExpertScalars(s1, sgate, s2, alpha, beta, clamp_limit),
        splits_k=strategy == "tp_n_tp_k",
    )


def run_layer(
    layer: Layer,
    hidden: Quantized,
    ids: I32,
    weights: F32,
    *,
    num_experts: int,
    local_expert_offset: int,
    scale_input: bool = False,
    do_finalize: bool = True,
    tile: int = DEFAULT_TILE,
) -> BF16Bits | Rows:
    """Run the stages of a layer in order.

    Parameters
    ----------
    layer : Layer
    hidden : Quantized, T rows
    ids, weights, num_experts, local_expert_offset, scale_input, do_finalize, tile
        See `fp8_moe`.

    Returns
    -------
    numpy.ndarray or tuple
        See `fp8_moe`.
    """
    permutation = build_permutation(
        ids,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        local_num_experts=layer.local_num_experts,
        tile=tile,
    )
    input_scales = round_bf16(weights).reshape(-1) if scale_input else None
    result = fc1(layer, hidden, permutation, input_scales)
    rows = fc2(layer, requantize(layer, result, permutation), permutation)
    if do_finalize:
        weights = np.ones_like(weights) if scale_input else weights
        return weighted_sum(rows, weights, permutation.expanded_to_permuted)
    gemm2_output = np.full((permutation.capacity, layer.hidden_size), _NAN_BITS)
    gemm2_output[: permutation.num_padded_rows] = encode_bf16(rows)
    return gemm2_output, permutation.expanded_to_permuted


def fp8_moe(
    hidden: Bytes,
    gemm1: Bytes,
    gemm2: Bytes,
    s1: F32,
    sgate: F32,
    s2: F32,
    ids: I32,
    weights: F32,
    *,
    activation: ActivationType,
    num_experts: int,
    local_expert_offset: int,
    clamp_limit: F32 | None = None,
    scale_input: bool = False,
    do_finalize: bool = True,
    tile: int = DEFAULT_TILE,
) -> BF16Bits | Rows:
    """FP8 per-tensor MoE layer with given routing.

    For every live slot with raw sums ``u``, ``v`` of its token with the expert's up and gate rows::

        q = e4m3(s1 * act(u, v; sgate)),   z = bf16(s2 * (q @ W2.T)),   out = bf16(sum_k w_k * z_k)

    Parameters
    ----------
    hidden : numpy.ndarray, shape (T, H), uint8
        E4M3 codes.
    gemm1 : numpy.ndarray, shape (EL, 2I or I, H), uint8
        E4M3 codes, prepared.
    gemm2 : numpy.ndarray, shape (EL, H, I), uint8
        E4M3 codes, prepared.
    s1, sgate, s2 : numpy.ndarray, shape (EL,), float32
    ids : numpy.ndarray, shape (T, K), int32
        Global expert ids; a slot whose expert is not local contributes nothing.
    weights : numpy.ndarray, shape (T, K), float32
        Routing weights, BF16 ones widened. Those of slots that are not live may be NaN.
    activation : ActivationType
        Swiglu, Geglu (tanh form), SwigluStep, Situ, Relu2, Identity or Silu.
    num_experts, local_expert_offset : int
    clamp_limit : numpy.ndarray, shape (EL,), float32, optional
        SwigluStep only, in units of the raw sums.
    scale_input : bool
        Scale the raw sums by the BF16-rounded routing weight instead of weighting at the end.
    do_finalize : bool
    tile : int
        Padding granularity of the permuted rows.

    Returns
    -------
    output : numpy.ndarray, shape (T, H), uint16
        BF16 bits; with ``do_finalize``.
    (gemm2_output, expanded_idx_to_permuted_idx) : tuple
        Without ``do_finalize``: BF16 bits (C, H) of the rows in permuted order, NaN in unused rows,
        and the row of each slot, int32 (T * K,), -1 where not live.
    """
    layer = fp8_layer(gemm1, gemm2, s1, sgate, s2, activation=activation, clamp_limit=clamp_limit)
    return run_layer(
        layer,
        Quantized(hidden),
        ids,
        weights,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        scale_input=scale_input,
        do_finalize=do_finalize,
        tile=tile,
    )


def fp4_moe(
    hidden: NDArray[Any],
    hidden_scales: Bytes | None,
    gemm1: Sequence[Bytes],
    gemm1_scales: Sequence[Bytes],
    gemm2: Sequence[Bytes],
    gemm2_scales: Sequence[Bytes],
    s1: F32,
    sgate: F32,
    s2: F32,
    ids: I32,
    weights: F32,
    *,
    mode: Mode,
    activation: ActivationType,
    num_experts: int,
    local_expert_offset: int,
    strategy: Strategy = "tp_n_tp_n",
    alpha: F32 | None = None,
    beta: F32 | None = None,
    clamp_limit: F32 | None = None,
    do_finalize: bool = True,
    tile: int = DEFAULT_TILE,
) -> BF16Bits | Rows:
    """FP4 block-scale MoE layer with given routing, whole or in partitions.

    Parameters
    ----------
    hidden : numpy.ndarray
        "nvfp4": packed E2M1 (T, H/2) uint8; "mxfp8": E4M3 (T, H) uint8; "bf16": BF16 bits (T, H)
        uint16.
    hidden_scales : numpy.ndarray, uint8, or None
        Linear, T rows: E4M3 per 16 columns ("nvfp4") or UE8M0 per 32 ("mxfp8", whose rows may be
        padded); None for "bf16".
    gemm1, gemm2 : sequence of numpy.ndarray, uint8
        Prepared packed E2M1 weights, one entry per partition (one entry: not partitioned), MajorK
        (EL, rows, K/2) or BlockMajorK (EL, K blocks, rows, block bytes).
    gemm1_scales, gemm2_scales : sequence of numpy.ndarray, uint8
        Their swizzled block scales, any shape.
    s1, sgate, s2 : numpy.ndarray, shape (EL,), float32
        Ignored unless "nvfp4".
    ids : numpy.ndarray, shape (T, K), int32
        Global expert ids; a slot whose expert is not local contributes nothing.
    weights : numpy.ndarray, shape (T, K), float32
        Routing weights; "nvfp4" rounds them to BF16.
    mode : {"nvfp4", "mxfp8", "bf16"}
    activation : ActivationType
        Swiglu, Geglu (quick-GELU) or Situ; SwigluStep too in "nvfp4".
    num_experts, local_expert_offset : int
    strategy : {"tp_n_tp_n", "tp_n_tp_k"}
        FC2 partitioned by output rows, or along K.
    alpha, beta, clamp_limit : numpy.ndarray, shape (EL,), float32, optional
    do_finalize : bool
    tile : int

    Returns
    -------
    See `fp8_moe`.
    """
    layer = fp4_layer(
        gemm1,
        gemm1_scales,
        gemm2,
        gemm2_scales,
        s1,
        sgate,
        s2,
        mode=mode,
        activation=activation,
        strategy=strategy,
        alpha=alpha,
        beta=beta,
        clamp_limit=clamp_limit,
    )
    return run_layer(
        layer,
        Quantized(hidden, _unpadded_scales(hidden_scales, hidden.shape[0], layer)),
        ids,
        round_bf16(weights) if mode == "nvfp4" else weights,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        do_finalize=do_finalize,
        tile=tile,
    )


def _unpadded_scales(scales: Bytes | None, num_tokens: int, layer: Layer) -> Bytes | None:
    """Linear activation scales as (T, H / block), without the padding of their rows."""
    if scales is None:
        return None
    columns = layer.hidden_size // layer.number_format.scale_block
    return scales.reshape(num_tokens, scales.size // max(num_tokens, 1))[:, :columns]
