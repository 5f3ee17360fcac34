"""Number formats of the operations: element codecs (re-exported) and block quantizers.

Quantizers run the same code on NumPy and CuPy arrays. Scale rules work on the FP32 bit patterns, so
they do not depend on whether the array library flushes subnormals. Two families differ in their
scale rule: `quantize_block_mxfp8` and `quantize_block_nvfp4` are what the operations do to the FC1
output, the others make inputs and weights.

NVFP4 is E2M1 in blocks of 16 with an E4M3 scale, MXFP4 and MXFP8 are E2M1 and E4M3 in blocks of 32
with a UE8M0 scale. Blocks are consecutive elements of the last dimension.

References
----------
OCP microscaling formats (MX) specification 1.0; NVIDIA NVFP4.
"""

from __future__ import annotations

import numpy as np

from cupy_moe.codecs import (
    E2M1,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    Array,
    Minifloat,
    as_float32,
    decode_bf16,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_bf16,
    encode_e2m1,
    encode_e4m3,
    get_xp,
    pack_fp4,
    require_blocks,
    round_bf16,
    unpack_fp4,
)

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "MX_BLOCK",
    "NVFP4_BLOCK",
    "Array",
    "as_float32",
    "decode_bf16",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "encode_bf16",
    "encode_e2m1",
    "encode_e4m3",
    "finite_max",
    "fp8_quantize",
    "fp8_scale",
    "get_xp",
    "mxfp4_quantize",
    "mxfp8_quantize",
    "nvfp4_quantize",
    "nvfp4_scale",
    "pack_fp4",
    "quantize_block_mxfp8",
    "quantize_block_nvfp4",
    "round_bf16",
    "scale_blocks",
    "unpack_fp4",
]

NVFP4_BLOCK = 16
MX_BLOCK = 32


def _blocks(name: str, x: Array, block: int) -> Array:
    """FP32 ``x`` (..., K) as (..., K/block, block)."""
    x = as_float32(x)
    require_blocks(name, x, block)
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _max_magnitude(blocks: Array) -> Array:
    """Largest magnitude along the last axis; NaN elements do not count."""
    xp = get_xp(blocks)
    return xp.where(xp.isnan(blocks), np.float32(0), xp.abs(blocks)).max(axis=-1)


def _merge(blocks: Array) -> Array:
    """Codes (..., K/block, block) back as (..., K)."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


def scale_blocks(values: Array, scales: Array) -> Array:
    """Multiply each block of ``values`` (..., K) with its entry of ``scales`` (..., K/block).

    The block length follows from the two shapes.

    Parameters
    ----------
    values : float32 array (..., K)
    scales : float32 array (..., K/block)

    Returns
    -------
    float32 array (..., K)

    Raises
    ------
    ValueError
        K is not a multiple of the number of scales.
    """
    require_blocks("scale_blocks", values, scales.shape[-1])
    block = values.shape[-1] // scales.shape[-1]
    return _merge(_blocks("scale_blocks", values, block) * scales[..., None])


def _ue8m0_scale(amax: Array, element_max: float, *, round_up: bool) -> Array:
    """UE8M0 byte of ``amax / element_max`` at a power of two, from the exponent of ``amax``.

    Rounding down divides by the power of two below ``element_max``, so the largest element may
    saturate. Rounding up carries into the exponent exactly when the mantissa of ``amax`` exceeds
    that of ``element_max`` (448 = 1.75 * 2**8, 6 = 1.5 * 2**2).
    """
    xp = get_xp(amax)
    bits = amax.view(np.uint32)
    limit = int(np.float32(element_max).view(np.uint32))
    carry = 0x7FFFFF - (limit & 0x7FFFFF) if round_up else 0
    exponent = ((bits + carry) >> 23).astype(np.int32)
    scale = xp.maximum(exponent - ((limit >> 23) - 127), 0)
    if round_up:
        scale = xp.where(xp.isinf(amax), 254, scale)
    return scale.astype(np.uint8)


def _times_ue8m0(blocks: Array, scales: Array) -> Array:
    """Multiply blocks (..., K/block, block) with ``2**(b - 127)``, NaN for byte 0xFF.

    In two exact steps, since 2**-127 is subnormal and CuPy's kernels would flush it to zero.
    """
    exponent = scales.astype(np.int32)[..., None] - 127
    near = exponent // 2
    product = blocks * _power_of_two(near) * _power_of_two(exponent - near)
    return get_xp(scales).where(exponent == 128, np.float32(np.nan), product)


def _power_of_two(exponent: Array) -> Array:
    """FP32 ``2**exponent`` of int32 exponents in the normal range."""
    return ((exponent + 127) << 23).view(np.float32)


def _scale_mx(name: str, values: Array, scales: Array) -> Array:
    return _merge(_times_ue8m0(_blocks(name, values, MX_BLOCK), scales))


def _over_ue8m0(blocks: Array, scales: Array) -> Array:
    """Divide blocks by ``2**(b - 127)``; 0 for b = 0 (the block is too small to represent)."""
    return _times_ue8m0(blocks, 254 - scales) * (scales > 0)[..., None]


# --- quantizers inside the operations (FC1 output) ------------------------------------------------


def quantize_block_nvfp4(r: Array, c: Array) -> tuple[Array, Array]:
    """Quantize the activation result as NVFP4 in blocks of 16, the rule of the FC1 epilogue.

    With ``a = max|r| * c`` over a block: ``scale = e4m3(a / 6)``, ``q = e2m1(r * c / scale)``. The
    value represented is ``q * scale``, an approximation of ``r * c``. NaN elements do not enter the
    maximum.

    Parameters
    ----------
    r : float32 array (..., K), K % 16 == 0
    c : float32 array broadcastable to (..., 1), or a float
        Output scale.

    Returns
    -------
    codes : uint8 array (..., K), one E2M1 code per byte (see `pack_fp4`)
    scales : uint8 array (..., K/16), E4M3

    Raises
    ------
    ValueError
        K is not a multiple of 16.
    """
    blocks = _blocks("quantize_block_nvfp4", r, NVFP4_BLOCK)
    xp = get_xp(blocks)
    c = xp.asarray(c, dtype=np.float32)
    scales = encode_e4m3(_max_magnitude(blocks) * c * np.float32(1 / E2M1_MAX))
    values = decode_e4m3(scales)
    is_zero = values == 0
    multiplier = xp.where(is_zero, np.float32(0), 1 / xp.where(is_zero, np.float32(1), values) * c)
    return _merge(encode_e2m1(blocks * multiplier[..., None])), scales


def quantize_block_mxfp8(r: Array) -> tuple[Array, Array]:
    """Quantize the activation result as MXFP8 in blocks of 32, the rule of the FC1 epilogue.

    The scale is ``2**(floor(log2 max|r|) - 8)``, so the largest element may saturate at 448 (the
    input quantizer `mxfp8_quantize` rounds the scale up instead). Blocks below 2**-118 become 0.

    Parameters
    ----------
    r : float32 array (..., K), K % 32 == 0

    Returns
    -------
    codes : uint8 array (..., K), E4M3
    scales : uint8 array (..., K/32), UE8M0

    Raises
    ------
    ValueError
        K is not a multiple of 32.
    """
    return _quantize_mx("quantize_block_mxfp8", r, E4M3, E4M3_MAX, round_up=False)


def _quantize_mx(
    name: str, x: Array, element: Minifloat, element_max: float, *, round_up: bool
) -> tuple[Array, Array]:
    blocks = _blocks(name, x, MX_BLOCK)
    scales = _ue8m0_scale(_max_magnitude(blocks), element_max, round_up=round_up)
    return _merge(element.encode(_over_ue8m0(blocks, scales))), scales


# --- stand-alone quantizers of inputs and weights -------------------------------------------------


def fp8_scale(amax: Array) -> Array:
    """Factor ``448 / amax`` that maps the largest magnitude to the largest E4M3 value.

    Parameters
    ----------
    amax : float32 array of largest magnitudes, finite

    Returns
    -------
    float32 array, same shape; 1 where ``amax`` is 0
    """
    return _range_factor(amax, E4M3_MAX)


def nvfp4_scale(amax: Array) -> Array:
    """Global scale ``448 * 6 / amax`` of NVFP4: the largest block gets the largest E4M3 scale.

    Parameters and result are those of `fp8_scale`.
    """
    return _range_factor(amax, E4M3_MAX * E2M1_MAX)


def finite_max(x: Array) -> Array:
    """Largest finite magnitude of FP32 ``x``, 0 if there is none; an array of shape ()."""
    xp = get_xp(x)
    if x.size == 0:
        return xp.asarray(0, np.float32)
    magnitude = xp.abs(x)
    return xp.where(magnitude < np.inf, magnitude, np.float32(0)).max()


def _range_factor(amax: Array, largest: float) -> Array:
    xp = get_xp(amax)
    amax = xp.asarray(amax, dtype=np.float32)
    # 2**-110 keeps both the factor and its reciprocal normal FP32 numbers.
    factor = np.float32(largest) / xp.maximum(amax, np.float32(2.0**-110))
    return xp.where(amax > 0, factor, np.float32(1))


def fp8_quantize(x: Array) -> tuple[Array, Array]:
    """Quantize a tensor to E4M3 with one factor: ``q = e4m3(x * g)``, ``g = 448 / max|x|``.

    Parameters
    ----------
    x : float32 or bfloat16 array, any shape
        Infinities and NaN have no part in the factor: they stay the trouble of their own elements.

    Returns
    -------
    q : uint8 array, same shape, E4M3
    g : float32 array of shape (); ``x`` is about ``q / g``
    """
    x = as_float32(x)
    g = fp8_scale(finite_max(x))
    return encode_e4m3(x * g), g


def mxfp8_quantize(x: Array) -> tuple[Array, Array]:
    """Quantize rows to MXFP8: E4M3 in blocks of 32, scale ``max|x| / 448`` rounded up to 2**n.

    Parameters
    ----------
    x : float32 or bfloat16 array (..., K), K % 32 == 0

    Returns
    -------
    q : uint8 array (..., K), E4M3
    scales : uint8 array (..., K/32), UE8M0, linear order

    Raises
    ------
    ValueError
        K is not a multiple of 32.
    """
    return _quantize_mx("mxfp8_quantize", x, E4M3, E4M3_MAX, round_up=True)


def mxfp4_quantize(x: Array) -> tuple[Array, Array]:
    """Quantize rows to MXFP4: E2M1 in blocks of 32, scale ``max|x| / 6`` rounded up to 2**n.

    Parameters
    ----------
    x : float32 or bfloat16 array (..., K), K % 32 == 0

    Returns
    -------
    packed : uint8 array (..., K/2), two E2M1 codes per byte, even index in the low nibble
    scales : uint8 array (..., K/32), UE8M0, linear order

    Raises
    ------
    ValueError
        K is not a multiple of 32.

    Notes
    -----
    Magnitudes from 3.5 * 2**126 on round to 2**128, which is infinite in FP32 and BF16.
    """
    codes, scales = _quantize_mx("mxfp4_quantize", x, E2M1, E2M1_MAX, round_up=True)
    return pack_fp4(codes), scales


def nvfp4_quantize(x: Array, global_scale: Array) -> tuple[Array, Array]:
    """Quantize rows to NVFP4: E2M1 in blocks of 16 with an E4M3 scale under a global scale.

    ``scale = e4m3(G * max|x| / 6)`` per block, ``q = e2m1(x * G / scale)``; G is usually
    ``448 * 6 / max|x|`` over the tensor.

    Parameters
    ----------
    x : float32 or bfloat16 array (..., K), K % 16 == 0
    global_scale : positive float, or float32 array broadcastable to (..., 1)

    Returns
    -------
    packed : uint8 array (..., K/2), two E2M1 codes per byte, even index in the low nibble
    scales : uint8 array (..., K/16), E4M3, linear order; ``x`` is about ``q * scale / G``

    Raises
    ------
    ValueError
        K is not a multiple of 16.
    """
    blocks = _blocks("nvfp4_quantize", x, NVFP4_BLOCK)
    xp = get_xp(blocks)
    g = xp.asarray(global_scale, dtype=np.float32)
    scales = encode_e4m3(g * (_max_magnitude(blocks) * np.float32(1 / E2M1_MAX)))
    values = decode_e4m3(scales) * (np.float32(1) / g)
    is_zero = values == 0
    multiplier = xp.where(is_zero, np.float32(0), 1 / xp.where(is_zero, np.float32(1), values))
    return pack_fp4(_merge(encode_e2m1(blocks * multiplier[..., None]))), scales


def dequantize_fp8(q: Array, g: Array) -> Array:
    """FP32 values ``q / g`` of E4M3 codes; inverse of `fp8_quantize` up to rounding."""
    return decode_e4m3(q) / get_xp(q).asarray(g, dtype=np.float32)


def dequantize_mxfp8(q: Array, scales: Array) -> Array:
    """FP32 values (..., K) of E4M3 codes (..., K) and UE8M0 scales (..., K/32), linear order."""
    return _scale_mx("dequantize_mxfp8", decode_e4m3(q), scales)


def dequantize_mxfp4(packed: Array, scales: Array) -> Array:
    """FP32 values (..., K) of packed E2M1 (..., K/2) and UE8M0 scales (..., K/32), linear order."""
    return _scale_mx("dequantize_mxfp4", decode_e2m1(unpack_fp4(packed)), scales)


def dequantize_nvfp4(packed: Array, scales: Array, global_scale: Array = 1.0) -> Array:
    """FP32 values ``q * scale / global_scale``; inverse of `nvfp4_quantize` up to rounding.

    Parameters
    ----------
    packed : uint8 array (..., K/2), E2M1 pairs
    scales : uint8 array (..., K/16), E4M3, linear order
    global_scale : float, or float32 array broadcastable to (..., K)

    Returns
    -------
    float32 array (..., K)
    """
    values = scale_blocks(decode_e2m1(unpack_fp4(packed)), decode_e4m3(scales))
    return values / get_xp(packed).asarray(global_scale, dtype=np.float32)
