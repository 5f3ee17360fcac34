"""Packed routing words: expert id and BF16 weight of a slot in one int32."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cupy_moe.formats import Array, as_float32, encode_bf16, get_xp
from cupy_moe.runtime.arrays import to_xp
from cupy_moe.weights.array_arguments import on_device

__all__ = ["pack_topk_ids", "unpack_topk_ids"]

_INT16 = np.iinfo(np.int16)


@on_device
def pack_topk_ids(topk_ids: Array, topk_weights: Array) -> Array:
    """Pack routing decisions: ``word = (id << 16) | bits of bf16(weight)``.

    Any weight is legal, negative ones and NaN included: the low half holds its sixteen bits and
    never touches the id.

    Parameters
    ----------
    topk_ids : array (T, K), integer
        Expert ids. Ids that do not fit int16 become -1, an unused slot, as -1 itself is.
    topk_weights : array (T, K), bfloat16 or a wider float
        Routing weights, rounded to BF16 (nearest, ties to even).

    Returns
    -------
    array (T, K), int32, contiguous, of the library and device of ``topk_ids``

    Raises
    ------
    TypeError
        ``topk_ids`` is not an integer array, or ``topk_weights`` is one.
    ValueError
        The shapes differ.
    """
    ids, restore = to_xp(topk_ids, "pack_topk_ids: topk_ids")
    weights, _ = to_xp(topk_weights, "pack_topk_ids: topk_weights")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"pack_topk_ids: topk_ids must be integers, got {ids.dtype.name}.")
    if weights.dtype.name not in ("bfloat16", "float32"):
        raise TypeError(
            "pack_topk_ids: topk_weights must be bfloat16 or float32, which is rounded once, got "
            f"{weights.dtype.name}."
        )
    if ids.shape != weights.shape:
        raise ValueError(
            "pack_topk_ids: topk_ids and topk_weights must have one shape (T, K), got "
            f"{tuple(ids.shape)} and {tuple(weights.shape)}."
        )
    xp = get_xp(ids)
    fits = (ids >= _INT16.min) & (ids <= _INT16.max)
    high = xp.where(fits, ids, -1).astype(np.int32) << 16
    low = encode_bf16(as_float32(weights)).astype(np.int32)  # zero-extends: the mask 0xFFFF
    return restore(xp.ascontiguousarray(high | low))  # the operations refuse transposed arrays


@on_device
def unpack_topk_ids(packed: Array) -> tuple[Array, Array]:
    """Ids and weights of packed routing words; inverse of `pack_topk_ids`.

    Parameters
    ----------
    packed : array (T, K), int32

    Returns
    -------
    topk_ids : array (T, K), int32, contiguous
        The high halves with their sign.
    topk_weights : array (T, K), bfloat16, contiguous
        The low halves.

    Raises
    ------
    TypeError
        ``packed`` is not int32.
    """
    words, restore = to_xp(packed, "unpack_topk_ids: packed")
    if words.dtype != np.int32:
        raise TypeError(f"unpack_topk_ids: packed words are int32, got {words.dtype.name}.")
    words = get_xp(words).ascontiguousarray(words)
    weights = (words & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16)
    return restore(words >> 16), restore(weights)
