"""Quantized hidden states for the operations, in the library of the caller."""

from __future__ import annotations

from cupy_moe.formats import (
    Array,
    as_float32,
    fp8_quantize,
    get_xp,
    mxfp8_quantize,
    nvfp4_quantize,
    nvfp4_scale,
)
from cupy_moe.runtime.arrays import to_xp
from cupy_moe.weights.array_arguments import E4M3_DTYPE, UE8M0_DTYPE, on_device, to_float32

__all__ = [
    "nvfp4_tensor_scale",
    "quantize_activations_fp8",
    "quantize_activations_mxfp8",
    "quantize_activations_nvfp4",
]


def nvfp4_tensor_scale(x: Array) -> Array:
    """Global scale ``448 * 6 / max|x|`` of a NumPy or CuPy array."""
    xp = get_xp(x)
    return nvfp4_scale(xp.abs(x).max() if x.size else xp.float32(0))


@on_device
def quantize_activations_fp8(x: Array) -> tuple[Array, Array]:
    """Quantize hidden states to E4M3 with one factor, see `cupy_moe.formats.fp8_quantize`.

    Parameters
    ----------
    x : array (T, H), bfloat16 or float32

    Returns
    -------
    q : array (T, H), float8_e4m3fn
    g : array of shape (), float32
        ``448 / max|x|``, the ``input_scale`` of `quantize_experts_fp8`.
    """
    x, restore = to_xp(x, "quantize_activations_fp8: x")
    q, g = fp8_quantize(x)
    return restore(q.view(E4M3_DTYPE)), restore(g)


@on_device
def quantize_activations_mxfp8(x: Array) -> tuple[Array, Array]:
    """Quantize hidden states to MXFP8, see `cupy_moe.formats.mxfp8_quantize`.

    Parameters
    ----------
    x : array (T, H), bfloat16 or float32, H % 32 == 0

    Returns
    -------
    q : array (T, H), float8_e4m3fn
    scales : array (T, H/32), float8_e8m0fnu
    """
    x, restore = to_xp(x, "quantize_activations_mxfp8: x")
    q, scales = mxfp8_quantize(x)
    return restore(q.view(E4M3_DTYPE)), restore(scales.view(UE8M0_DTYPE))


@on_device
def quantize_activations_nvfp4(
    x: Array, global_scale: Array | None = None
) -> tuple[Array, Array, Array]:
    """Quantize hidden states to NVFP4, see `cupy_moe.formats.nvfp4_quantize`.

    Parameters
    ----------
    x : array (T, H), bfloat16 or float32, H % 16 == 0
    global_scale : float or array of shape (), optional
        Default: ``448 * 6 / max|x|``.

    Returns
    -------
    packed : array (T, H/2), uint8
    scales : array (T, H/16), float8_e4m3fn
    global_scale : array of shape (), float32
        The ``input_scale`` of `quantize_experts_nvfp4`.
    """
    x, restore = to_xp(x, "quantize_activations_nvfp4: x")
    x = as_float32(x)
    g = nvfp4_tensor_scale(x) if global_scale is None else to_float32(global_scale, x).reshape(())
    packed, scales = nvfp4_quantize(x, g)
    return restore(packed), restore(scales.view(E4M3_DTYPE)), restore(g)
