"""What distinguishes the operations: how tokens, weights and the FC1 output are represented.

The stages (`cupy_moe.reference.stages`) are the same for every number format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupy_moe.codecs import decode_bf16, decode_e4m3, encode_bf16, encode_e4m3, pack_fp4
from cupy_moe.formats import (
    MX_BLOCK,
    NVFP4_BLOCK,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_block_mxfp8,
    quantize_block_nvfp4,
)
from cupy_moe.reference.activation import (
    FP4_ACTIVATIONS,
    FP8_ACTIVATIONS,
    NVFP4_ACTIVATIONS,
    Activation,
)
from cupy_moe.types import ActivationType

__all__ = ["BF16_MXFP4", "FP4_FORMATS", "FP8", "MXFP8_MXFP4", "NVFP4", "NumberFormat", "Quantized"]

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[Any]  # uint8, or uint16 for BF16 bits


@dataclass(frozen=True, eq=False)
class Quantized:
    """Rows of codes with linear block scales, or without scales where the format has none.

    Attributes
    ----------
    codes : numpy.ndarray, shape (rows, K) or (rows, K/2) for packed E2M1, uint8 (BF16: uint16)
    scales : numpy.ndarray, shape (rows, K/block), uint8, or None
    """

    codes: Codes
    scales: NDArray[np.uint8] | None = None

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> Quantized:
        """Select rows."""
        return Quantized(self.codes[rows], None if self.scales is None else self.scales[rows])


Decode: TypeAlias = Callable[[Quantized], F64]


@dataclass(frozen=True)
class NumberFormat:
    """Representations of one operation.

    Attributes
    ----------
    name : str
    activations : mapping
        The activations the operation has.
    tokens, weights, intermediate : callable
        Exact float64 values of `Quantized` hidden states, weight rows and FC1 output.
    quantize : callable
        FC1 output from the FP32 activation result (rows, I) and the output scale (rows, 1), at
        which the result is represented.
    uses_scales : bool
        Whether the three scale vectors have a meaning; if not they are ones.
    scale_block : int
        Elements of K per block scale; 1 where there are no block scales.
    """

    name: str
    activations: Mapping[ActivationType, Activation]
    tokens: Decode
    weights: Decode
    intermediate: Decode
    quantize: Callable[[F32, F32], Quantized]
    uses_scales: bool
    scale_block: int = 1


def _e4m3(x: Quantized) -> F64:
    return np.asarray(decode_e4m3(x.codes), np.float64)


def _bf16(x: Quantized) -> F64:
    return np.asarray(decode_bf16(x.codes), np.float64)


def _nvfp4(x: Quantized) -> F64:
    return np.asarray(dequantize_nvfp4(x.codes, x.scales), np.float64)


def _mxfp8(x: Quantized) -> F64:
    return np.asarray(dequantize_mxfp8(x.codes, x.scales), np.float64)


def _mxfp4(x: Quantized) -> F64:
    return np.asarray(dequantize_mxfp4(x.codes, x.scales), np.float64)


def _quantize_e4m3(r: F32, c: F32) -> Quantized:
    return Quantized(encode_e4m3(r * c))


def _quantize_nvfp4(r: F32, c: F32) -> Quantized:
    codes, scales = quantize_block_nvfp4(r, c)
    return Quantized(pack_fp4(codes), scales)


def _quantize_mxfp8(r: F32, _: F32) -> Quantized:
    return Quantized(*quantize_block_mxfp8(r))


def _quantize_bf16(r: F32, _: F32) -> Quantized:
    return Quantized(encode_bf16(r))


FP8 = NumberFormat(
    name="fp8",
    activations=FP8_ACTIVATIONS,
    tokens=_e4m3,
    weights=_e4m3,
    intermediate=_e4m3,
    quantize=_quantize_e4m3,
    uses_scales=True,
)
NVFP4 = NumberFormat(
    name="nvfp4",
    activations=NVFP4_ACTIVATIONS,
    tokens=_nvfp4,
    weights=_nvfp4,
    intermediate=_nvfp4,
    quantize=_quantize_nvfp4,
    uses_scales=True,
    scale_block=NVFP4_BLOCK,
)
MXFP8_MXFP4 = NumberFormat(
    name="mxfp8",
    activations=FP4_ACTIVATIONS,
    tokens=_mxfp8,
    weights=_mxfp4,
    intermediate=_mxfp8,
    quantize=_quantize_mxfp8,
    uses_scales=False,
    scale_block=MX_BLOCK,
)
BF16_MXFP4 = NumberFormat(
    name="bf16",
    activations=FP4_ACTIVATIONS,
    tokens=_bf16,
    weights=_mxfp4,
    intermediate=_bf16,
    quantize=_quantize_bf16,
    uses_scales=False,
    scale_block=MX_BLOCK,
)

FP4_FORMATS = {f.name: f for f in (NVFP4, MXFP8_MXFP4, BF16_MXFP4)}
"""Formats of the FP4 operations by the name of their activation format."""
