"""Prepared layouts of expert weights and block scales, and their inverses.

The kernels read matrices of *rows* (output features) by K bytes whose rows are permuted so that a
thread finds the rows it needs side by side. Preparation only moves bytes::

    logical -> interleave (gated FC1) -> shuffle rows -> weights: MajorK or BlockMajorK
                                                      -> scales:  128x4 swizzle

Logical FC1 of a gated activation is ``[up; gate]``: rows [0, I) are the linear half, rows [I, 2I)
the half that goes through the nonlinearity. Every permutation is local to a block of rows, so a
slice of prepared rows at block boundaries is the preparation of the slice.

All functions take NumPy, CuPy or torch arrays of any one-byte dtype with any number of leading
(expert) dimensions, and return a new array of the same library, device and dtype. A wider dtype, or
an object that is no array, is a TypeError.

References
----------
The layouts of FlashInfer's TensorRT-LLM MoE operations (``shuffle_matrix_a``,
``block_scale_interleave``, ``convert_to_block_layout``); the 128x4 scale order is the one of
cuBLAS block-scaled matrix multiplication.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupy_moe.formats import Array, get_xp
from cupy_moe.types import WeightLayout
from cupy_moe.weights.array_arguments import moves_bytes
from cupy_moe.weights.row_order import (
    gemm1_row_order,
    gemm2_row_order,
    interleave_gated,
    shuffle_block_rows,
    shuffle_rows,
    take_rows,
    uninterleave_gated,
    unshuffle_rows,
)

__all__ = [
    "SCALE_TILE_COLUMNS",
    "SCALE_TILE_ROWS",
    "from_block_major_k",
    "gemm1_row_order",
    "gemm2_row_order",
    "interleave_gated",
    "prepare_gemm1_scales",
    "prepare_gemm1_weights",
    "prepare_gemm2_scales",
    "prepare_gemm2_weights",
    "shuffle_block_rows",
    "shuffle_rows",
    "swizzle_scales_r128c4",
    "to_block_major_k",
    "uninterleave_gated",
    "unprepare_gemm1_scales",
    "unprepare_gemm1_weights",
    "unprepare_gemm2_scales",
    "unprepare_gemm2_weights",
    "unshuffle_rows",
    "unswizzle_scales_r128c4",
]

SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4


@moves_bytes
def swizzle_scales_r128c4(x: Array) -> Array:
    """Reorder block scales into 512-byte tiles of 128 rows by 4 columns.

    Byte (m, k) of one expert goes to offset ``((m // 128) * Ct + k // 4) * 512 + (m % 32) * 16 +
    ((m % 128) // 32) * 4 + k % 4`` with ``Ct = ceil(columns / 4)``. Missing rows and columns of the
    last tiles are zero bytes.

    Parameters
    ----------
    x : array (..., rows, columns), one-byte dtype
        Linear scales; a column covers one block of K.

    Returns
    -------
    array (..., round_up(rows, 128), round_up(columns, 4)), same dtype and library
        Only the order of the bytes has a meaning, the last two dimensions merely count them.
    """
    *experts, rows, columns = x.shape
    row_tiles = -(-rows // SCALE_TILE_ROWS)
    column_tiles = -(-columns // SCALE_TILE_COLUMNS)
    padded = (*experts, row_tiles * SCALE_TILE_ROWS, column_tiles * SCALE_TILE_COLUMNS)
    linear = get_xp(x).zeros(padded, dtype=np.uint8)
    linear[..., :rows, :columns] = x
    tiles = linear.reshape(*experts, row_tiles, 4, 32, column_tiles, SCALE_TILE_COLUMNS)
    return tiles.swapaxes(-4, -2).reshape(padded)


@moves_bytes
def unswizzle_scales_r128c4(x: Array, rows: int | None = None, columns: int | None = None) -> Array:
    """Inverse of `swizzle_scales_r128c4`.

    Parameters
    ----------
    x : array (..., padded rows, padded columns), one-byte dtype
    rows, columns : int, optional
        Size without padding; default: keep the padding.

    Returns
    -------
    array (..., rows, columns), same dtype and library

    Raises
    ------
    ValueError
        The last two dimensions are not whole 128 x 4 tiles.
    """
    *experts, padded_rows, padded_columns = x.shape
    if padded_rows % SCALE_TILE_ROWS or padded_columns % SCALE_TILE_COLUMNS:
        raise ValueError(
            f"unswizzle_scales_r128c4: swizzled scales are whole tiles of {SCALE_TILE_ROWS} rows x "
            f"{SCALE_TILE_COLUMNS} columns, got shape {tuple(x.shape)}. Reshape flat scales to "
            "(experts, rows, columns) first."
        )
    tiles = x.reshape(
        *experts,
        padded_rows // SCALE_TILE_ROWS,
        padded_columns // SCALE_TILE_COLUMNS,
        32,
        4,
        SCALE_TILE_COLUMNS,
    )
    return tiles.swapaxes(-4, -2).reshape(x.shape)[..., :rows, :columns]


@moves_bytes
def to_block_major_k(x: Array, block_bytes: int = 128) -> Array:
    """Cut K into blocks: ``y[e, kb, m, j] = x[e, m, kb * B + j]``.

    Parameters
    ----------
    x : array (..., M, K bytes), one-byte dtype
    block_bytes : int
        Width B of a block in bytes, 128 (or 64 for FP4).

    Returns
    -------
    array (..., K bytes / B, M, B), same dtype and library

    Raises
    ------
    ValueError
        The row length is not a multiple of ``block_bytes``.
    """
    *experts, rows, row_bytes = x.shape
    if block_bytes <= 0 or row_bytes % block_bytes:
        raise ValueError(
            f"to_block_major_k: the row length {row_bytes} must be a multiple of block_bytes, got "
            f"{block_bytes}."
        )
    blocks = x.reshape(*experts, rows, row_bytes // block_bytes, block_bytes)
    return blocks.swapaxes(-3, -2)


@moves_bytes
def from_block_major_k(x: Array) -> Array:
    """Inverse of `to_block_major_k`: (..., blocks, M, B) back to (..., M, blocks * B)."""
    if x.ndim < 3:
        raise ValueError(
            f"from_block_major_k: needs (..., K blocks, rows, bytes), got shape {tuple(x.shape)}."
        )
    *experts, blocks, rows, block_bytes = x.shape
    return x.swapaxes(-3, -2).reshape(*experts, rows, blocks * block_bytes)


# --- whole preparations ---------------------------------------------------------------------------


def _prepare(x: Array, order: NDArray[np.int64], layout: int, block_bytes: int) -> Array:
    _require_layout(layout)
    rows = take_rows(x, order)
    return to_block_major_k(rows, block_bytes) if layout == WeightLayout.BlockMajorK else rows


def _require_layout(layout: int) -> None:
    if layout not in (WeightLayout.MajorK, WeightLayout.BlockMajorK):
        raise ValueError(
            f"weight_layout must be MajorK (0) or BlockMajorK (2), got {layout!r}; MajorMn (1) is "
            "not supported."
        )


def _major_k(x: Array, layout: int) -> Array:
    _require_layout(layout)
    return from_block_major_k(x) if layout == WeightLayout.BlockMajorK else x


@moves_bytes
def prepare_gemm1_weights(
    x: Array,
    *,
    gated: bool = True,
    weight_layout: int = WeightLayout.MajorK,
    block_major_k_bytes: int = 128,
    epilogue_tile_m: int = 128,
) -> Array:
    """Prepare FC1 weights: interleave (if gated), shuffle rows, optionally cut K into blocks.

    Parameters
    ----------
    x : array (E, M1, K bytes), one-byte dtype
        Logical rows, ``[up; gate]`` with M1 = 2I if gated, else M1 = I. FP8 has one element per
        byte, packed FP4 two.
    gated : bool
        ``ActivationType.is_gated`` of the activation.
    weight_layout : WeightLayout
        ``MajorK`` or ``BlockMajorK``.
    block_major_k_bytes : int
        Block width of ``BlockMajorK``.
    epilogue_tile_m : int
        128 for all operations of this package.

    Returns
    -------
    array, same dtype and library
        (E, M1, K bytes), or (E, K bytes / block, M1, block) for ``BlockMajorK``.

    Raises
    ------
    TypeError
        The dtype is wider than one byte, or ``x`` is no array.
    ValueError
        Rows or row bytes are not whole blocks; ``MajorMn``.
    """
    order = gemm1_row_order(x.shape[-2], gated, epilogue_tile_m)
    return _prepare(x, order, weight_layout, block_major_k_bytes)


@moves_bytes
def unprepare_gemm1_weights(
    x: Array,
    *,
    gated: bool = True,
    weight_layout: int = WeightLayout.MajorK,
    epilogue_tile_m: int = 128,
) -> Array:
    """Inverse of `prepare_gemm1_weights`; returns logical rows (E, M1, K bytes)."""
    x = _major_k(x, weight_layout)
    return take_rows(x, np.argsort(gemm1_row_order(x.shape[-2], gated, epilogue_tile_m)))


@moves_bytes
def prepare_gemm2_weights(
    x: Array,
    *,
    weight_layout: int = WeightLayout.MajorK,
    block_major_k_bytes: int = 128,
    epilogue_tile_m: int = 128,
) -> Array:
    """Prepare FC2 weights (E, H, K bytes): shuffle rows, optionally cut K into blocks.

    Parameters, result and errors are those of `prepare_gemm1_weights`.
    """
    order = gemm2_row_order(x.shape[-2], epilogue_tile_m)
    return _prepare(x, order, weight_layout, block_major_k_bytes)


@moves_bytes
def unprepare_gemm2_weights(
    x: Array, *, weight_layout: int = WeightLayout.MajorK, epilogue_tile_m: int = 128
) -> Array:
    """Inverse of `prepare_gemm2_weights`; returns logical rows (E, H, K bytes)."""
    x = _major_k(x, weight_layout)
    return take_rows(x, np.argsort(gemm2_row_order(x.shape[-2], epilogue_tile_m)))


@moves_bytes
def prepare_gemm1_scales(x: Array, *, gated: bool = True, epilogue_tile_m: int = 128) -> Array:
    """Prepare FC1 block scales: the row order of the weights, then the 128x4 swizzle.

    Parameters
    ----------
    x : array (E, M1, K / block), one-byte dtype
        Linear scales of the logical rows ``[up; gate]``.
    gated : bool
    epilogue_tile_m : int

    Returns
    -------
    array (E, round_up(M1, 128), round_up(K / block, 4)), same dtype and library
        See `swizzle_scales_r128c4`.

    Raises
    ------
    TypeError
        The dtype is wider than one byte, or ``x`` is no array.
    ValueError
        The number of rows is not a multiple of the shuffle block.
    """
    order = gemm1_row_order(x.shape[-2], gated, epilogue_tile_m)
    return swizzle_scales_r128c4(take_rows(x, order))


@moves_bytes
def unprepare_gemm1_scales(
    x: Array,
    *,
    gated: bool = True,
    rows: int | None = None,
    columns: int | None = None,
    epilogue_tile_m: int = 128,
) -> Array:
    """Inverse of `prepare_gemm1_scales`; ``rows`` and ``columns`` remove the padding, if any."""
    x = unswizzle_scales_r128c4(x, rows, columns)
    return take_rows(x, np.argsort(gemm1_row_order(x.shape[-2], gated, epilogue_tile_m)))


@moves_bytes
def prepare_gemm2_scales(x: Array, *, epilogue_tile_m: int = 128) -> Array:
    """Prepare FC2 block scales (E, H, K / block): shuffle rows, then the 128x4 swizzle.

    Result and errors are those of `prepare_gemm1_scales`.
    """
    return swizzle_scales_r128c4(take_rows(x, gemm2_row_order(x.shape[-2], epilogue_tile_m)))


@moves_bytes
def unprepare_gemm2_scales(
    x: Array,
    *,
    rows: int | None = None,
    columns: int | None = None,
    epilogue_tile_m: int = 128,
) -> Array:
    """Inverse of `prepare_gemm2_scales`; ``rows`` and ``columns`` remove the padding, if any."""
    x = unswizzle_scales_r128c4(x, rows, columns)
    return take_rows(x, np.argsort(gemm2_row_order(x.shape[-2], epilogue_tile_m)))
