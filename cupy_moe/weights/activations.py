"""Quantized hidden states for the operations, in the library of the caller."""

from __future__ import annotations

from collections.abc import Callable

from cupy_moe.formats import (
    Array,
    as_float32,
    encode_e4m3,
    finite_max,
    fp8_quantize,
    get_xp,
    mxfp8_quantize,
    nvfp4_quantize,
    nvfp4_scale,
)
from cupy_moe.weights.array_arguments import (
    E4M3_DTYPE,
    UE8M0_DTYPE,
    on_device,
    positive_factor,
    to_values,
)

__all__ = [
    "nvfp4_tensor_scale",
    "quantize_activations_fp8",
    "quantize_activations_mxfp8",
    "quantize_activations_nvfp4",
]


def nvfp4_tensor_scale(x: Array) -> Array:
    """Global scale ``448 * 6 / max|x|`` of an FP32 NumPy or CuPy array, of its finite elements."""
    return nvfp4_scale(finite_max(x))


@on_device
def quantize_activations_fp8(x: Array, input_scale: Array | None = None) -> tuple[Array, Array]:
    """Quantize hidden states to E4M3 with one factor, see `cupy_moe.formats.fp8_quantize`.

    Parameters
    ----------
    x : array (T, H), bfloat16, float16 or float32
    input_scale : float or array of shape (), optional
        Factor that the experts were quantized for: positive and finite. Default: ``448 / max|x|``,
        for calibration; the experts' factor belongs to every batch that they are called with.

    Returns
    -------
    q : array (T, H), float8_e4m3fn
    g : array of shape (), float32
        The factor, the ``input_scale`` of `quantize_experts_fp8`.

    Raises
    ------
    TypeError
        ``x`` has another dtype.
    ValueError
        ``input_scale`` is no single number, or, in host memory, not positive and finite.
    """
    name = "quantize_activations_fp8"
    x, restore = _hidden_states(x, name)
    if input_scale is None:
        q, g = fp8_quantize(x)
    else:
        g = _factor_of_experts(input_scale, x, f"{name}: input_scale")
        q = encode_e4m3(as_float32(x) * g)
    return restore(q.view(E4M3_DTYPE)), restore(g)


@on_device
def quantize_activations_mxfp8(x: Array) -> tuple[Array, Array]:
    """Quantize hidden states to MXFP8, see `cupy_moe.formats.mxfp8_quantize`.

    Parameters
    ----------
    x : array (T, H), bfloat16, float16 or float32, H % 32 == 0

    Returns
    -------
    q : array (T, H), float8_e4m3fn
    scales : array (T, H/32), float8_e8m0fnu
    """
    x, restore = _hidden_states(x, "quantize_activations_mxfp8")
    q, scales = mxfp8_quantize(x)
    return restore(q.view(E4M3_DTYPE)), restore(scales.view(UE8M0_DTYPE))


@on_device
def quantize_activations_nvfp4(
    x: Array, global_scale: Array | None = None
) -> tuple[Array, Array, Array]:
    """Quantize hidden states to NVFP4, see `cupy_moe.formats.nvfp4_quantize`.

    Parameters
    ----------
    x : array (T, H), bfloat16, float16 or float32, H % 16 == 0
    global_scale : float or array of shape (), optional
        Factor that the experts were quantized for: positive and finite. Default: ``448 * 6 /
        max|x|``, for calibration; the experts' factor belongs to every batch that they are called
        with.

    Returns
    -------
    packed : array (T, H/2), uint8
    scales : array (T, H/16), float8_e4m3fn
    global_scale : array of shape (), float32
        The ``input_scale`` of `quantize_experts_nvfp4`.
    """
    name = "quantize_activations_nvfp4"
    x, restore = _hidden_states(x, name)
    x = as_float32(x)
    if global_scale is None:
        g = nvfp4_tensor_scale(x)
    else:
        g = _factor_of_experts(global_scale, x, f"{name}: global_scale")
    packed, scales = nvfp4_quantize(x, g)
    return restore(packed), restore(scales.view(E4M3_DTYPE)), restore(g)


def _hidden_states(x: Array, name: str) -> tuple[Array, Callable[[Array], Array]]:
    """Rows one after another, as the operations want what becomes of them, and the way back."""
    x, restore = to_values(x, f"{name}: x")
    return get_xp(x).ascontiguousarray(x), restore


def _factor_of_experts(value: Array, x: Array, argument: str) -> Array:
    """Not read in GPU memory: every batch would wait for the GPU."""
    return positive_factor(value, x, argument, {"a number": ()}, waits=False)
