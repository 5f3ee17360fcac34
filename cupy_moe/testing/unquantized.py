"""The layer that quantized operations approximate, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.reference.activation import FP8_ACTIVATIONS, ActivationScalars
from cupy_moe.types import ActivationType

__all__ = ["unquantized_moe"]


def unquantized_moe(
    x: NDArray[Any],
    w1: NDArray[Any],
    w2: NDArray[Any],
    topk_ids: NDArray[np.integer[Any]],
    topk_weights: NDArray[Any],
    *,
    activation_type: int = ActivationType.Swiglu,
) -> NDArray[np.float64]:
    """Mixture-of-experts layer without any rounding.

    ``out[t] = sum_k topk_weights[t, k] * W2[e] @ act(W1[e] @ x[t])`` with ``e = topk_ids[t, k]``.

    Parameters
    ----------
    x : numpy.ndarray, shape (T, H)
    w1 : numpy.ndarray, shape (E, 2I, H) as ``[up; gate]``, or (E, I, H) if not gated
        Logical FC1 weights.
    w2 : numpy.ndarray, shape (E, H, I)
        Logical FC2 weights.
    topk_ids : numpy.ndarray, shape (T, K), integer
        Indices into ``w1`` and ``w2``; a slot with any other id contributes nothing.
    topk_weights : numpy.ndarray, shape (T, K)
    activation_type : ActivationType
        One of the FP8 operations'.

    Returns
    -------
    numpy.ndarray, shape (T, H), float64
    """
    activation = ActivationType(activation_type)
    tokens = x.astype(np.float64)
    out = np.zeros_like(tokens)
    for expert in np.intersect1d(topk_ids, np.arange(len(w1))):
        rows, slots = np.nonzero(topk_ids == expert)
        sums = tokens[rows] @ w1[expert].astype(np.float64).T
        up, gate = np.split(sums, 2, axis=1) if activation.is_gated else (sums, sums)
        hidden = FP8_ACTIVATIONS[activation](up, gate, ActivationScalars())
        weighted = topk_weights[rows, slots].astype(np.float64)[:, None]
        np.add.at(out, rows, weighted * (hidden @ w2[expert].astype(np.float64).T))
    return out
