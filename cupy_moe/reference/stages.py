"""The stages of a fused MoE layer, one function each, the same for every number format.

::

    ids -> permutation -> fc1 -> requantize -> fc2 -> weighted_sum

Arrays between the stages are in permuted order (see `cupy_moe.reference.routing.Permutation`).
Sums are float64 over the live rows of one expert at a time; values are rounded exactly where the
operation rounds: FC1 output to its format, FC2 rows to BF16, the output to BF16. NaN and infinities
are data: they cause no warnings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupy_moe.codecs import round_bf16
from cupy_moe.reference.activation import ActivationScalars
from cupy_moe.reference.number_format import NumberFormat, Quantized
from cupy_moe.reference.routing import Permutation
from cupy_moe.types import ActivationType, WeightLayout
from cupy_moe.weights.layouts import unprepare_gemm1_scales, unprepare_gemm1_weights

__all__ = ["ExpertScalars", "Layer", "fc1", "fc2", "requantize"]

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ExpertScalars:
    """Scalars per local expert, each float32 of shape (EL,); the optional ones may be None.

    Attributes
    ----------
    output1, gate, output2 : numpy.ndarray
        Factor of the FC1 output, dequantization factor inside the nonlinearity, factor of FC2.
    alpha, beta, limit : numpy.ndarray or None
        See `cupy_moe.reference.activation.ActivationScalars`.
    """

    output1: F32
    gate: F32
    output2: F32
    alpha: F32 | None = None
    beta: F32 | None = None
    limit: F32 | None = None

    def activation(self, expert: int) -> ActivationScalars:
        """Scalars of one expert's activation."""
        optional = (self.alpha, self.beta, self.limit)
        return ActivationScalars(
            float(self.gate[expert]), *(None if x is None else float(x[expert]) for x in optional)
        )


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of the local experts, and what is computed with them.

    Attributes
    ----------
    number_format : NumberFormat
    activation : ActivationType
    gemm1, gemm2 : tuple of Quantized
        Prepared weights and swizzled block scales, one entry per partition: codes (EL, rows,
        K bytes) or BlockMajorK (EL, K blocks, rows, block bytes), scales (any shape) one byte per
        (expert, row, K block). FC1 is partitioned by rows: entry p holds up and gate rows of its
        range of intermediate columns.
    scalars : ExpertScalars
    splits_k : bool
        How FC2 is partitioned: False by output rows; True along K, where each partial sum is
        rounded to BF16 and the partial sums are added in FP32, in partition order.
    """

    number_format: NumberFormat
    activation: ActivationType
    gemm1: tuple[Quantized, ...]
    gemm2: tuple[Quantized, ...]
    scalars: ExpertScalars
    splits_k: bool = False

    @property
    def local_num_experts(self) -> int:
        """Experts whose weights the layer has."""
        return int(self.gemm1[0].codes.shape[0])

    @property
    def intermediate_size(self) -> int:
        """Columns of the FC1 output, all partitions together."""
        rows = sum(_num_rows(w) for w in self.gemm1)
        return rows // 2 if self.activation.is_gated else rows

    @property
    def hidden_size(self) -> int:
        """Columns of the FC2 output."""
        rows = [_num_rows(w) for w in self.gemm2]
        return rows[0] if self.splits_k else sum(rows)


def _num_rows(weights: Quantized) -> int:
    return int(weights.codes.shape[-2])


def _logical_weights(layer: Layer, weights: Quantized, expert: int, gated: bool) -> F64:
    """Values (rows, K) of one expert's prepared weights, rows in logical order.

    FC2 rows are prepared like those of a non-gated FC1.
    """
    codes = weights.codes[expert]
    block_major = weights.codes.ndim == 4
    layout = WeightLayout.BlockMajorK if block_major else WeightLayout.MajorK
    logical = unprepare_gemm1_weights(codes, gated=gated, weight_layout=layout)
    scales = None
    if weights.scales is not None:
        swizzled = weights.scales.reshape(layer.local_num_experts, _num_rows(weights), -1)
        scales = unprepare_gemm1_scales(swizzled[expert], gated=gated)
    return layer.number_format.weights(Quantized(logical, scales))


@np.errstate(all="ignore")
def fc1(
    layer: Layer,
    hidden: Quantized,
    permutation: Permutation,
    input_scales: F32 | None = None,
) -> F32:
    """Multiply tokens with FC1 and apply the activation (output scale not yet included).

    Parameters
    ----------
    layer : Layer
    hidden : Quantized, T rows
        Only rows of tokens with a live slot are read.
    permutation : Permutation
    input_scales : numpy.ndarray, shape (T * K,), float32, optional
        Factor of both raw sums of a slot.

    Returns
    -------
    numpy.ndarray, shape (num_padded_rows, I), float32
        Activation results in permuted order; padding rows are 0.
    """
    activation = layer.number_format.activations[layer.activation]
    gated = layer.activation.is_gated
    result = np.zeros((permutation.num_padded_rows, layer.intermediate_size), np.float32)
    for expert, rows, slots in permutation.segments():
        tokens = layer.number_format.tokens(hidden[slots // permutation.top_k])
        scalars = layer.scalars.activation(expert)
        parts = []
        for weights in layer.gemm1:
            sums = tokens @ _logical_weights(layer, weights, expert, gated).T
            if input_scales is not None:
                sums *= input_scales[slots, None]
            width = sums.shape[1] // 2 if gated else sums.shape[1]
            parts.append(activation(sums[:, :width], sums[:, -width:], scalars))
        result[rows] = np.concatenate(parts, axis=1)
    return result


@np.errstate(all="ignore")
def requantize(layer: Layer, result: F32, permutation: Permutation) -> Quantized:
    """Round the activation results to the format of the FC1 output, at the output scale.

    Parameters
    ----------
    layer : Layer
    result : numpy.ndarray, shape (num_padded_rows, I), float32
        From `fc1`.
    permutation : Permutation

    Returns
    -------
    Quantized, num_padded_rows rows
    """
    scales = np.ones((permutation.num_padded_rows, 1), np.float32)
    for expert, rows, _ in permutation.segments():
        scales[rows] = layer.scalars.output1[expert]
    return layer.number_format.quantize(result, scales)


@np.errstate(all="ignore")
def fc2(layer: Layer, intermediate: Quantized, permutation: Permutation) -> F32:
    """Multiply the intermediate rows with FC2.

    Parameters
    ----------
    layer : Layer
    intermediate : Quantized, num_padded_rows rows
        From `requantize`.
    permutation : Permutation

    Returns
    -------
    numpy.ndarray, shape (num_padded_rows, H), float32
        Rows in permuted order, NaN in padding rows. BF16 values; with ``layer.splits_k`` the FP32
        sums of one BF16 value per partition.
    """
    out = np.full((permutation.num_padded_rows, layer.hidden_size), np.nan, np.float32)
    for expert, rows, _ in permutation.segments():
        values = layer.number_format.intermediate(intermediate[rows])
        scale = np.float64(layer.scalars.output2[expert])
        inputs = [values] * len(layer.gemm2)
        if layer.splits_k:
            inputs = np.split(values, len(layer.gemm2), axis=1)
        parts = [
            round_bf16(scale * (x @ _logical_weights(layer, w, expert, gated=False).T))
            for x, w in zip(inputs, layer.gemm2, strict=True)
        ]
        out[rows] = np.add.reduce(parts) if layer.splits_k else np.concatenate(parts, axis=1)
    return out
