"""Finalize: weighted sum over expert slots, alone and behind a rank reduction with RMSNorm.

Indices select physical rows; an index outside the rows selects a literal zero row, which is never
the product of a loaded row and zero, so NaN in unused rows cannot leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupy_moe.codecs import decode_bf16, encode_bf16

__all__ = ["finalize_terms", "reduce_rows", "tp_moe_finalize_rmsnorm", "weighted_sum"]

BF16Bits: TypeAlias = NDArray[np.uint16]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]


@np.errstate(all="ignore")
def weighted_sum(rows: F32, weights: F32, expanded_idx_to_permuted_idx: I32) -> BF16Bits:
    """Sum every token's expert rows with their routing weights and round once.

    ``out[t] = bf16(sum_k weights[t, k] * rows[idx[t, k]])`` over the slots with ``idx >= 0``, in
    float64, in increasing ``k``, from +0.0.

    Parameters
    ----------
    rows : numpy.ndarray, shape (C, H), float32
        FC2 rows in permuted order; rows that no index names are not read.
    weights : numpy.ndarray, shape (T, K), float32
        The weight of a slot with a negative index is not read either and may be NaN.
    expanded_idx_to_permuted_idx : numpy.ndarray, shape (T * K,), int32

    Returns
    -------
    numpy.ndarray, shape (T, H), uint16
        BF16 bits.
    """
    num_tokens, top_k = weights.shape
    idx = expanded_idx_to_permuted_idx.reshape(num_tokens, top_k)
    out = np.zeros((num_tokens, rows.shape[1]))
    for k in range(top_k):
        live = np.flatnonzero(idx[:, k] >= 0)
        out[live] += weights[live, k, None] * rows[idx[live, k]].astype(np.float64)
    return _to_bf16(out)


@np.errstate(all="ignore")
def reduce_rows(gemm2: Sequence[BF16Bits], idx: Sequence[I32], hidden_size: int) -> BF16Bits:
    """Add every (token, slot) row over the ranks: FP32, from +0.0, in rank order, rounded to BF16.

    Every implementation must reproduce these rows bit for bit.

    Parameters
    ----------
    gemm2 : sequence of numpy.ndarray, shape (R_q, W >= hidden_size), uint16
        BF16 bits of the FC2 rows of rank q. Columns from ``hidden_size`` on are not read.
    idx : sequence of numpy.ndarray, shape (T, K), int32
        Row of each slot on rank q; outside [0, R_q) it stands for a zero row.
    hidden_size : int

    Returns
    -------
    numpy.ndarray, shape (T, K, hidden_size), uint16
        BF16 bits.
    """
    total = np.zeros((*idx[0].shape, hidden_size), np.float32)
    for rank_rows, rank_idx in zip(gemm2, idx, strict=True):
        valid = (rank_idx >= 0) & (rank_idx < rank_rows.shape[0])
        total[valid] += decode_bf16(rank_rows[rank_idx[valid], :hidden_size])
    # A rank without the row adds +0.0, which changes nothing: no sum from +0.0 on is -0.0.
    return np.asarray(encode_bf16(total))


@np.errstate(all="ignore")
def finalize_terms(
    rows: BF16Bits,
    weights: F32,
    norm_weight: BF16Bits,
    *,
    eps: float,
    gain_center: float,
    weight_before_norm: bool,
) -> F64:
    """Normalize each reduced row and scale it by its routing weight, in float64.

    With gain ``g = norm_weight + gain_center`` (FP32)::

        weight_before_norm:  v = row * g,  y = v * rstd(v)
        otherwise:           v = row,      y = v * rstd(v) * g
        rstd(v) = 1 / sqrt(mean(v**2) + eps)

    Parameters
    ----------
    rows : numpy.ndarray, shape (T, K, H), uint16
        BF16 bits, from `reduce_rows`.
    weights : numpy.ndarray, shape (T, K), float32
    norm_weight : numpy.ndarray, shape (H,), uint16
        BF16 bits.
    eps, gain_center : float
    weight_before_norm : bool

    Returns
    -------
    numpy.ndarray, shape (T, K, H), float64
        ``weights[t, k] * y[t, k]``; the sum over k is the output before rounding, the sum of the
        magnitudes measures its cancellation.
    """
    gain = (decode_bf16(norm_weight) + np.float32(gain_center)).astype(np.float64)
    v = decode_bf16(rows).astype(np.float64)
    if weight_before_norm:
        v = v * gain
    mean_square = np.mean(np.square(v), axis=-1, keepdims=True)
    y = v / np.sqrt(mean_square + eps)
    if not weight_before_norm:
        y = y * gain
    return np.asarray(y * weights[..., None].astype(np.float64))


@np.errstate(all="ignore")
def tp_moe_finalize_rmsnorm(
    gemm2: Sequence[BF16Bits],
    weights: F32,
    idx: Sequence[I32],
    norm_weight: BF16Bits,
    *,
    eps: float,
    gain_center: float,
    weight_before_norm: bool,
) -> BF16Bits:
    """Reduce expert rows over the ranks, apply RMSNorm to each and sum them with routing weights.

    The ranks are simulated in one process: list entry q is what rank q would pass. Every rank gets
    the same result.

    Parameters
    ----------
    gemm2 : sequence of numpy.ndarray, shape (R_q, W >= H), uint16
        BF16 bits, see `reduce_rows`.
    weights : numpy.ndarray, shape (T, K), float32
        Routing weights, BF16 ones widened; equal on all ranks.
    idx : sequence of numpy.ndarray, shape (T, K), int32
    norm_weight : numpy.ndarray, shape (H,), uint16
        BF16 bits.
    eps, gain_center : float
    weight_before_norm : bool
        Whether the gain is applied before the norm is taken, see `finalize_terms`.

    Returns
    -------
    numpy.ndarray, shape (T, H), uint16
        BF16 bits.
    """
    rows = reduce_rows(gemm2, idx, norm_weight.shape[0])
    terms = finalize_terms(
        rows,
        weights,
        norm_weight,
        eps=eps,
        gain_center=gain_center,
        weight_before_norm=weight_before_norm,
    )
    return _to_bf16(terms.sum(axis=1, initial=0.0))  # zeros of either sign add to +0.0


def _to_bf16(x: F64) -> BF16Bits:
    return np.asarray(encode_bf16(x.astype(np.float32)))
