"""Element formats on NumPy or CuPy arrays: E4M3, E2M1, UE8M0, BF16, FP4 packing.

Every function runs the same code on both libraries; codes travel as raw bytes (``uint8``, BF16 as
``uint16``), and decoders take arrays of the types of ``ml_dtypes`` as well. Encoders work on the
FP32 bit patterns, so they do not depend on whether the array library flushes subnormals (CuPy's
kernels do). All rounding is to nearest, ties to even.

E4M3 is 1-4-3 with bias 7, without infinity, 448 at most; E2M1 is 1-2-1 with bias 1, 6 at most; a
UE8M0 byte ``b`` is ``2**(b - 127)``, 0xFF is NaN.

References
----------
OCP 8-bit floating point specification 1.0; OCP microscaling formats (MX) specification 1.0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "E2M1",
    "E2M1_MAX",
    "E4M3",
    "E4M3_MAX",
    "Array",
    "Minifloat",
    "as_float32",
    "decode_bf16",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "encode_bf16",
    "encode_e2m1",
    "encode_e4m3",
    "get_xp",
    "pack_fp4",
    "require_blocks",
    "round_bf16",
    "unpack_fp4",
]

Array: TypeAlias = Any
"""A ``numpy.ndarray`` or ``cupy.ndarray``; CuPy is optional, hence no static type."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_F32_INF = 0x7F800000


def get_xp(x: Array) -> ModuleType:
    """Array library of ``x``: ``cupy`` for a CuPy array, else ``numpy``."""
    if type(x).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"]
    return np


def as_float32(x: Array) -> Array:
    """``x`` as FP32; BF16 arrays are widened through their bits (CuPy cannot convert them).

    Parameters
    ----------
    x : array of any real dtype, including those of ``ml_dtypes``

    Returns
    -------
    array, same shape, float32 (``x`` itself when it already is)

    Raises
    ------
    TypeError
        It is not numbers, or complex ones.
    """
    x = get_xp(x).asarray(x)
    if x.dtype.name == "bfloat16":
        return decode_bf16(x.view(np.uint16))
    if x.dtype.kind in "cOSUMm":
        raise TypeError(f"expected real numbers, got {x.dtype.name}.")
    return x.astype(np.float32, copy=False)


def _codes(x: Array, typed: str) -> Array:
    """Codes as integers, also those of an array of the type that they stand for."""
    x = get_xp(x).asarray(x)
    if x.dtype.name == typed:
        return x.view(f"u{x.dtype.itemsize}")
    if x.dtype.kind not in "ui":
        raise TypeError(f"expected codes as integers or {typed}, got {x.dtype.name}.")
    return x


# --- element formats ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minifloat:
    """Sign-magnitude format without infinities, narrower than FP32 in both fields."""

    mantissa_bits: int
    bias: int
    code_bits: int
    max_code: int  # magnitude code that overflow saturates to
    nan_code: int

    def encode(self, x: Array) -> Array:
        """Saturating round-to-nearest-even codes of FP32 ``x``."""
        x = as_float32(x)
        xp = get_xp(x)
        bits = xp.atleast_1d(x).view(np.uint32)
        magnitude = bits & 0x7FFFFFFF
        drop = 23 - self.mantissa_bits
        # A carry out of the mantissa runs into the exponent, which is the correctly rounded code.
        rounded = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
        smallest_normal = (127 + 1 - self.bias) << 23
        rebias = (127 - self.bias) << self.mantissa_bits
        codes = xp.minimum(xp.maximum(rounded, rebias) - rebias, self.max_code)
        tiny = xp.minimum(magnitude, smallest_normal).view(np.float32)
        steps = xp.rint(tiny * np.float32(2.0 ** (self.bias - 1 + self.mantissa_bits)))
        codes = xp.where(magnitude < smallest_normal, steps.astype(np.uint32), codes)
        sign = (bits >> 31) << (self.code_bits - 1)
        codes = xp.where(magnitude > _F32_INF, self.nan_code, codes | sign)
        return codes.astype(np.uint8).reshape(x.shape)

    def decode_table(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """FP32 value of every code."""
        codes = np.arange(1 << self.code_bits)
        magnitude = codes & ((1 << (self.code_bits - 1)) - 1)
        exponent = magnitude >> self.mantissa_bits
        fraction = magnitude & ((1 << self.mantissa_bits) - 1)
        hidden = np.where(exponent > 0, 1 << self.mantissa_bits, 0)
        power = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        values = np.ldexp((fraction + hidden).astype(np.float32), power)
        values = np.where(magnitude > self.max_code, np.float32(np.nan), values)
        signed: np.ndarray[Any, np.dtype[np.float32]] = np.copysign(
            values, np.where(codes == magnitude, np.float32(1), np.float32(-1))
        )
        return signed


E4M3 = Minifloat(mantissa_bits=3, bias=7, code_bits=8, max_code=0x7E, nan_code=0x7F)
E2M1 = Minifloat(mantissa_bits=1, bias=1, code_bits=4, max_code=0x7, nan_code=0x7)

_E4M3_VALUES = E4M3.decode_table()
_E2M1_VALUES = E2M1.decode_table()
_UE8M0_VALUES = np.append(
    np.ldexp(np.float32(1), np.arange(-127, 128, dtype=np.int32)), np.float32(np.nan)
).astype(np.float32)


def _lookup(table: np.ndarray[Any, np.dtype[np.float32]], codes: Array, typed: str) -> Array:
    codes = _codes(codes, typed)
    return get_xp(codes).asarray(table)[codes]


def encode_e4m3(x: Array) -> Array:
    """E4M3 codes of FP32 values: saturating, ties to even, NaN to 0x7F, zero keeps its sign.

    Parameters
    ----------
    x : float32 array

    Returns
    -------
    uint8 array, same shape
    """
    return E4M3.encode(x)


def decode_e4m3(codes: Array) -> Array:
    """FP32 values of E4M3 codes (uint8); 0x7F and 0xFF are NaN."""
    return _lookup(_E4M3_VALUES, codes, "float8_e4m3fn")


def encode_e2m1(x: Array) -> Array:
    """E2M1 codes 0..15 of FP32 values: saturating, ties to even, NaN to 7, zero keeps its sign.

    Parameters
    ----------
    x : float32 array

    Returns
    -------
    uint8 array, same shape, one code per byte
    """
    return E2M1.encode(x)


def decode_e2m1(codes: Array) -> Array:
    """FP32 values of E2M1 codes (uint8, 0..15, one per byte)."""
    return _lookup(_E2M1_VALUES, codes, "float4_e2m1fn")


def decode_ue8m0(codes: Array) -> Array:
    """FP32 values ``2**(b - 127)`` of UE8M0 bytes; 0 is the subnormal 2**-127, 0xFF is NaN."""
    return _lookup(_UE8M0_VALUES, codes, "float8_e8m0fnu")


def require_blocks(name: str, x: Array, block: int) -> None:
    """Raise ValueError unless the last dimension of ``x`` is a multiple of ``block``."""
    if x.ndim == 0 or x.shape[-1] % block:
        raise ValueError(
            f"{name}: the last dimension must be a multiple of {block}, got shape {tuple(x.shape)}."
        )


def pack_fp4(codes: Array) -> Array:
    """Pack E2M1 codes (..., K) two per byte into (..., K/2), even index in the low nibble.

    Raises
    ------
    ValueError
        The last dimension is odd.
    """
    require_blocks("pack_fp4", codes, 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Array) -> Array:
    """Codes (..., 2 * Kb), one per byte, of packed bytes (..., Kb)."""
    xp = get_xp(packed)
    return xp.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def encode_bf16(x: Array) -> Array:
    """BF16 bit patterns (uint16) of FP32 values: ties to even, overflow to infinity, NaN stays NaN.

    Parameters
    ----------
    x : float32 array

    Returns
    -------
    uint16 array, same shape
    """
    x = as_float32(x)
    xp = get_xp(x)
    bits = xp.atleast_1d(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    codes = xp.where((bits & 0x7FFFFFFF) > _F32_INF, quiet_nan, rounded)
    return codes.astype(np.uint16).reshape(x.shape)


def decode_bf16(codes: Array) -> Array:
    """FP32 values of BF16 bit patterns (uint16)."""
    codes = _codes(codes, "bfloat16")
    xp = get_xp(codes)
    return (xp.atleast_1d(codes).astype(np.uint32) << 16).view(np.float32).reshape(codes.shape)


def round_bf16(x: Array) -> Array:
    """FP32 values rounded to BF16 and widened again."""
    return decode_bf16(encode_bf16(x))
