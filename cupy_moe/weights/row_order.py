"""Row permutations of prepared weights: interleaving of up and gate, shuffling within blocks.

Logical FC1 of a gated activation is ``[up; gate]``: rows [0, I) are the linear half, rows [I, 2I)
the half that goes through the nonlinearity. Every permutation is local to a block of rows, so a
slice of prepared rows at block boundaries is the preparation of the slice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupy_moe.formats import Array, get_xp
from cupy_moe.weights.array_arguments import moves_bytes

__all__ = [
    "gemm1_row_order",
    "gemm2_row_order",
    "interleave_gated",
    "shuffle_block_rows",
    "shuffle_rows",
    "take_rows",
    "uninterleave_gated",
    "unshuffle_rows",
]


def shuffle_block_rows(epilogue_tile_m: int = 128) -> int:
    """Rows that are permuted among themselves: 32 if ``epilogue_tile_m % 128 == 0``, else 16.

    Raises
    ------
    ValueError
        ``epilogue_tile_m`` is not positive.
    """
    if epilogue_tile_m <= 0:
        raise ValueError(f"epilogue_tile_m must be positive, got {epilogue_tile_m}.")
    return 32 if epilogue_tile_m % 128 == 0 else 16


def _interleaved_order(rows: int) -> NDArray[np.int64]:
    if rows % 2:
        raise ValueError(f"a gated FC1 has an even number of rows (up and gate), got {rows}.")
    order: NDArray[np.int64] = np.arange(rows).reshape(2, rows // 2).T.ravel()
    return order


def gemm2_row_order(rows: int, epilogue_tile_m: int = 128) -> NDArray[np.int64]:
    """Row order of prepared FC2 (and of non-gated FC1): ``prepared[p] = logical[order[p]]``.

    Within a block of B rows, destination ``d`` takes source row ``n * (d % 8) + d // 8`` with
    ``n = B / 8``.

    Parameters
    ----------
    rows : int
        Rows of one expert's matrix, a multiple of the shuffle block (see `shuffle_block_rows`).
    epilogue_tile_m : int
        128 for all operations of this package.

    Returns
    -------
    numpy.ndarray, shape (rows,), int64

    Raises
    ------
    ValueError
        ``rows`` is not a multiple of the block.
    """
    block = shuffle_block_rows(epilogue_tile_m)
    if rows % block:
        raise ValueError(
            f"row shuffling needs a multiple of {block} rows (epilogue_tile_m = "
            f"{epilogue_tile_m}), got {rows}. Pad the rows with zeros."
        )
    order: NDArray[np.int64] = np.arange(rows).reshape(-1, 8, block // 8).swapaxes(1, 2).ravel()
    return order


def gemm1_row_order(rows: int, gated: bool = True, epilogue_tile_m: int = 128) -> NDArray[np.int64]:
    """Row order of prepared FC1: ``prepared[p] = logical[order[p]]``.

    Gated: logical rows ``[up; gate]`` are interleaved (up first), then shuffled.

    Parameters
    ----------
    rows : int
        2 * intermediate_size if gated, else intermediate_size; a multiple of the shuffle block.
    gated : bool
    epilogue_tile_m : int

    Returns
    -------
    numpy.ndarray, shape (rows,), int64

    Raises
    ------
    ValueError
        ``rows`` is not a multiple of the block.
    """
    shuffled = gemm2_row_order(rows, epilogue_tile_m)
    return _interleaved_order(rows)[shuffled] if gated else shuffled


def take_rows(x: Array, order: NDArray[np.int64]) -> Array:
    """Rows of a NumPy or CuPy array (..., rows, K) in the given order, for all experts alike."""
    xp = get_xp(x)
    return xp.take(x, xp.asarray(order), axis=-2)


@moves_bytes
def interleave_gated(x: Array) -> Array:
    """Interleave ``[up; gate]`` rows: row ``2i`` is up row i, row ``2i + 1`` is gate row i.

    Parameters
    ----------
    x : array (..., 2I, K), one-byte dtype

    Returns
    -------
    array, same shape, dtype and library

    Raises
    ------
    ValueError
        The number of rows is odd.
    """
    return take_rows(x, _interleaved_order(x.shape[-2]))


@moves_bytes
def uninterleave_gated(x: Array) -> Array:
    """Inverse of `interleave_gated`."""
    return take_rows(x, np.argsort(_interleaved_order(x.shape[-2])))


@moves_bytes
def shuffle_rows(x: Array, epilogue_tile_m: int = 128) -> Array:
    """Permute rows within blocks, see `gemm2_row_order`.

    Parameters
    ----------
    x : array (..., rows, K), one-byte dtype
    epilogue_tile_m : int

    Returns
    -------
    array, same shape, dtype and library

    Raises
    ------
    ValueError
        The number of rows is not a multiple of the shuffle block.
    """
    return take_rows(x, gemm2_row_order(x.shape[-2], epilogue_tile_m))


@moves_bytes
def unshuffle_rows(x: Array, epilogue_tile_m: int = 128) -> Array:
    """Inverse of `shuffle_rows`."""
    return take_rows(x, np.argsort(gemm2_row_order(x.shape[-2], epilogue_tile_m)))
