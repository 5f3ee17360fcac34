"""Choice of the intermediate's quantization factor from calibration data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cupy_moe.formats import E2M1_MAX, E4M3_MAX, Array, as_float32, get_xp
from cupy_moe.reference.activation import FP8_ACTIVATIONS, NVFP4_ACTIVATIONS, ActivationScalars
from cupy_moe.runtime.arrays import to_xp
from cupy_moe.types import ActivationType
from cupy_moe.weights.array_arguments import on_device, to_values

__all__ = ["calibrate_intermediate_scale"]

_TINY = 2.0**-110  # keeps factors and their reciprocals normal FP32 numbers
_TARGETS = {
    "fp8": (FP8_ACTIVATIONS, E4M3_MAX),
    "nvfp4": (NVFP4_ACTIVATIONS, E4M3_MAX * E2M1_MAX),
}


@on_device
def calibrate_intermediate_scale(
    x: Array,
    w1: Array,
    *,
    activation_type: int,
    topk_ids: Array | None = None,
    number_format: Literal["fp8", "nvfp4"] = "fp8",
    alpha: float | None = None,
    beta: float | None = None,
    clamp_limit: float | None = None,
    margin: float = 2.0,
) -> Array:
    """Choose the factor ``c`` for the FC1 output of each expert: ``largest / (margin * max|h|)``.

    ``h`` is the physical activation result of the calibration tokens, ``largest`` the largest
    number of the format: 448 for FP8, 448 * 6 for NVFP4. Larger results than ``margin * max|h|``
    saturate later on. A floating-point format pays for a margin of 2 with its lowest binade only.

    Parameters
    ----------
    x : array (T, H), bfloat16, float16 or float32
        Calibration tokens, T >= 1, as they enter the layer (not quantized).
    w1 : array (E, 2I, H) as ``[up; gate]``, or (E, I, H) if not gated; same library
        Logical FC1 weights.
    activation_type : ActivationType
    topk_ids : array (T, K), integer, optional
        Experts of each token, as indices into ``w1``; entries outside are ignored. An expert that
        no token visits takes the smallest factor of the others. Default: every token visits every
        expert.
    number_format : {"fp8", "nvfp4"}
    alpha, beta, clamp_limit : float, optional
        Parameters of the activation, all in physical units.
    margin : float
        Headroom for tokens that were not seen, at least 1.

    Returns
    -------
    array (E,), float32, of the library of ``w1``
        The ``intermediate_scale`` of `quantize_experts_fp8` or `quantize_experts_nvfp4`; 1
        everywhere if all results are 0.

    Raises
    ------
    ValueError
        Unknown format; the activation does not exist for it; shapes do not fit; ``margin`` below 1;
        the results are not finite.

    Notes
    -----
    NumPy computes the FC1 of all visited (token, expert) pairs on the host in FP32, one expert at a
    time: matrix products of CuPy would need cuBLAS, which nothing else here needs. A few hundred
    tokens with their ``topk_ids`` are enough.
    """
    name = "calibrate_intermediate_scale"
    if number_format not in _TARGETS:
        raise ValueError(
            f"{name}: number_format must be one of {', '.join(_TARGETS)}, got {number_format!r}; "
            "MX formats need no calibration."
        )
    activations, largest = _TARGETS[number_format]
    if activation_type not in activations:
        raise ValueError(
            f"{name}: {number_format} has no activation_type {activation_type}; use one of "
            f"{', '.join(f'{a.name} ({a.value})' for a in activations)}."
        )
    if isinstance(margin, bool) or not isinstance(margin, int | float | np.number):
        raise TypeError(f"{name}: margin must be a number, got {type(margin).__name__}.")
    if not 1 <= margin < np.inf:
        raise ValueError(f"{name}: margin must be at least 1 and finite, got {margin}.")
    activation = ActivationType(activation_type)
    tokens, weights, restore = _operands(name, x, w1, gated=activation.is_gated)
    visits = _visits(name, topk_ids, num_tokens=len(tokens), num_experts=len(weights))
    scalars = ActivationScalars(1.0, alpha=alpha, beta=beta, limit=clamp_limit)

    amax = np.zeros(len(weights))
    for expert in np.flatnonzero(visits.any(axis=0)):
        sums = tokens[visits[:, expert]] @ _on_host(weights[expert]).T
        up, gate = np.split(sums, 2, axis=1) if activation.is_gated else (sums, sums)
        with np.errstate(over="ignore"):  # exp(-x) = inf is a sigmoid of 0
            amax[expert] = np.abs(activations[activation](up, gate, scalars)).max()
    if not np.isfinite(amax).all():
        raise ValueError(f"{name}: the FC1 output is not finite for these tokens: max|h| = {amax}.")
    amax[amax == 0] = amax.max()
    factors = np.where(amax > 0, largest / (margin * np.maximum(amax, _TINY)), 1.0)
    return restore(get_xp(weights).asarray(factors, dtype=np.float32))


def _on_host(x: Array) -> NDArray[np.float32]:
    x = as_float32(x)
    return np.asarray(x if isinstance(x, np.ndarray) else x.get(), np.float32)


def _operands(
    name: str, x: Array, w1: Array, *, gated: bool
) -> tuple[NDArray[np.float32], Array, Callable[[Array], Array]]:
    """Tokens on the host, weights where they are, and the way back to the library of ``w1``."""
    tokens, _ = to_values(x, f"{name}: x")
    weights, restore = to_values(w1, f"{name}: w1")
    if (
        tokens.ndim != 2
        or weights.ndim != 3
        or 0 in (*tokens.shape, *weights.shape)
        or tokens.shape[1] != weights.shape[2]
        or (gated and weights.shape[1] % 2)
    ):
        raise ValueError(
            f"{name}: x must be (tokens, hidden_size) and w1 (num_experts, "
            f"{'2*' if gated else ''}intermediate_size, hidden_size), none of them empty, got "
            f"{tuple(tokens.shape)} and {tuple(weights.shape)}."
        )
    return _on_host(tokens), weights, restore


def _visits(
    name: str, topk_ids: Array | None, *, num_tokens: int, num_experts: int
) -> NDArray[np.bool_]:
    """Whether token t visits expert e, (T, E)."""
    if topk_ids is None:
        return np.ones((num_tokens, num_experts), np.bool_)
    ids, _ = to_xp(topk_ids, f"{name}: topk_ids")
    if ids.ndim != 2 or len(ids) != num_tokens or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: topk_ids must be integers of shape (tokens, top_k) = ({num_tokens}, top_k), "
            f"got {ids.dtype.name} of shape {tuple(ids.shape)}."
        )
    ids = ids if isinstance(ids, np.ndarray) else ids.get()
    visits: NDArray[np.bool_] = (ids[:, :, None] == np.arange(num_experts)).any(axis=1)
    return visits
