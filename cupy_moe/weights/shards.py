"""Prepared expert weights cut in two, for a layer that runs in two partitions.

Every permutation of the preparation is local to a block of rows, so a slice of prepared rows at
block boundaries is the preparation of the slice, and slices along K commute with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, TypeAlias

import numpy as np

from cupy_moe.formats import Array
from cupy_moe.runtime.arrays import HOST, ArrayRef, describe, to_xp
from cupy_moe.runtime.devices import device_guard
from cupy_moe.weights.layouts import SCALE_TILE_COLUMNS, SCALE_TILE_ROWS
from cupy_moe.weights.prepared import PreparedWeightLayout, dtype_name_of
from cupy_moe.weights.row_order import shuffle_block_rows

__all__ = ["MoeShardedWeights", "shard_prepared_moe_weights"]

Allocate: TypeAlias = Callable[[int, tuple[int, ...], Any], Array]

_NAME = "shard_prepared_moe_weights"
_STRATEGIES = ("tp_n_tp_n", "tp_n_tp_k")
_TILE_BYTES = SCALE_TILE_ROWS * SCALE_TILE_COLUMNS
WEIGHT_ALIGNMENT = 16
SCALE_ALIGNMENT = 32  # in CUDA memory; NumPy's allocator guarantees no more than 16


@dataclass(frozen=True, eq=False)
class MoeShardedWeights:
    """Shards of both weights and of their scales; entry p is that of partition p.

    Attributes
    ----------
    fc1, fc2 : list of two arrays
        Contiguous copies of the rank of what they were cut from.
    fc1_scale, fc2_scale : list of two arrays, or None
        Block scales are flat; scales per tensor or expert are whole copies. None without scales.
    """

    fc1: list[Array]
    fc2: list[Array]
    fc1_scale: list[Array] | None
    fc2_scale: list[Array] | None


def shard_prepared_moe_weights(
    fc1_weight: Array,
    fc2_weight: Array,
    *,
    strategy: str,
    hidden_size: int,
    intermediate_size: int,
    fc1_layout: PreparedWeightLayout,
    fc2_layout: PreparedWeightLayout,
    fc1_scale: Array | None = None,
    fc2_scale: Array | None = None,
    fc1_epilogue_tile_m: int = 128,
    fc2_epilogue_tile_m: int = 128,
    alloc: Allocate | None = None,
) -> MoeShardedWeights:
    """Cut the prepared weights of a gated layer in two.

    Partition p has the prepared FC1 rows ``[p*I, (p+1)*I)`` and, of FC2, the rows
    ``[p*H/2, (p+1)*H/2)`` (tp_n_tp_n) or the columns ``[p*I/2, (p+1)*I/2)`` (tp_n_tp_k).

    Parameters
    ----------
    fc1_weight, fc2_weight : array
        Prepared weights of E experts in the storage of their layouts: (E, 2I, K = H) and
        (E, H, K = I) for major_k, (E, K blocks, rows, block) for block_major_k.
    strategy : {"tp_n_tp_n", "tp_n_tp_k"}
    hidden_size, intermediate_size : int
        H and I in elements, both even.
    fc1_layout, fc2_layout : PreparedWeightLayout
        See `cupy_moe.weights.prepared_weight_layouts`.
    fc1_scale, fc2_scale : array, optional
        Block scales in the 128x4 order, of any shape; or, if the layout has no block scales, scales
        per tensor or expert.
    fc1_epilogue_tile_m, fc2_epilogue_tile_m : int
        What the rows were shuffled for: in blocks of 32 rows for multiples of 128, else of 16.
    alloc : callable, optional
        ``alloc(partition, shape, dtype)`` makes each destination; dtype is that of the source.

    Returns
    -------
    MoeShardedWeights
        Arrays of the library and on the device of what they were cut from.

    Raises
    ------
    TypeError
        An argument is no array, or no layout.
    ValueError
        A size, shape, dtype, device or alignment does not fit; a cut would go through a shuffle
        block, a byte, a block of K, a scale group or a tile of scales; ``alloc`` returned something
        else than what it was asked for.
    """
    _check_choices(strategy, hidden_size, intermediate_size)
    for name, layout in (("fc1_layout", fc1_layout), ("fc2_layout", fc2_layout)):
        if not isinstance(layout, PreparedWeightLayout):
            got = type(layout).__name__
            raise TypeError(f"{_NAME}: {name} must be a PreparedWeightLayout, got {got}.")
    fc1 = describe(fc1_weight, f"{_NAME}: fc1_weight")
    num_experts = fc1.shape[0] if fc1.shape else 0
    if num_experts < 1:
        _refuse("fc1_weight", "have at least one expert", f"shape {tuple(fc1.shape)}")
    splits_k = strategy == "tp_n_tp_k"
    fc1_matrix = _Matrix(
        "fc1", fc1_layout, num_experts, 2 * intermediate_size, hidden_size, fc1_epilogue_tile_m
    )
    fc2_matrix = _Matrix(
        "fc2",
        fc2_layout,
        num_experts,
        hidden_size,
        intermediate_size,
        fc2_epilogue_tile_m,
        splits_k,
    )
    fc2 = describe(fc2_weight, f"{_NAME}: fc2_weight")
    sources = ((fc1_matrix, fc1, fc1_scale), (fc2_matrix, fc2, fc2_scale))
    for matrix, weight, scale in sources:  # everything is checked before anything is allocated
        matrix.check_weight(weight, fc1.device)
        matrix.check_cut()
        if scale is not None:
            matrix.check_scale(describe(scale, f"{_NAME}: {matrix.name}_scale"), fc1.device)
    with device_guard(fc1.device):
        return MoeShardedWeights(
            fc1_matrix.cut_weight(fc1_weight, alloc),
            fc2_matrix.cut_weight(fc2_weight, alloc),
            None if fc1_scale is None else fc1_matrix.cut_scale(fc1_scale, alloc),
            None if fc2_scale is None else fc2_matrix.cut_scale(fc2_scale, alloc),
        )


def _refuse(name: str, rule: str, got: object, next_step: str = "") -> NoReturn:
    raise ValueError(f"{_NAME}: {name} must {rule}, got {got}. {next_step}".rstrip())


def _check_choices(strategy: str, hidden_size: int, intermediate_size: int) -> None:
    if strategy not in _STRATEGIES:
        _refuse("strategy", f"be {' or '.join(map(repr, _STRATEGIES))}", repr(strategy))
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size <= 0 or size % 2:
            _refuse(name, "be positive and even", size)


@dataclass(frozen=True)
class _Matrix:
    """One prepared matrix of every expert, and the axis it is cut along."""

    name: str
    layout: PreparedWeightLayout
    num_experts: int
    rows: int
    columns: int  # K in elements
    tile_m: int
    splits_k: bool = False

    def check_weight(self, ref: ArrayRef, device: int) -> None:
        """Storage, shape and place of the weights."""
        name, layout = f"{self.name}_weight", self.layout
        dtype = layout.weight_dtype
        if dtype is not None and ref.dtype != dtype_name_of(dtype):
            _refuse(name, f"be {dtype_name_of(dtype)}, the weight_dtype of its layout", ref.dtype)
        shape = self._stored_shape(ref.itemsize)
        if tuple(ref.shape) != shape:
            _refuse(name, f"be {shape} in layout {layout.kind}", tuple(ref.shape))
        _check_place(name, ref, device, WEIGHT_ALIGNMENT)

    def _stored_shape(self, itemsize: int) -> tuple[int, ...]:
        bits = self.columns * self.layout.storage_bits
        if bits % (8 * itemsize):
            rule = f"have whole elements of {itemsize} bytes in a row of K = {self.columns}"
            _refuse(f"{self.name}_weight", rule, f"{bits} bits")
        block = self.layout.block_major_k_bytes
        if block is None:
            return self.num_experts, self.rows, bits // (8 * itemsize)
        if (bits // 8) % block or block % itemsize:
            rule = f"have rows of whole blocks of {block} bytes"
            _refuse(f"{self.name}_weight", rule, f"{bits // 8} bytes")
        return self.num_experts, bits // 8 // block, self.rows, block // itemsize

    def check_cut(self) -> None:
        """Whole blocks on both sides of the cut."""
        if self.tile_m <= 0:
            _refuse(f"{self.name}_epilogue_tile_m", "be positive", self.tile_m)
        block = shuffle_block_rows(self.tile_m)
        if self.splits_k:
            self._check_cut_of_k()
        elif self.rows // 2 % block:
            rule = f"have a multiple of {block} rows (one shuffle block) in each shard"
            _refuse(f"{self.name}_weight", rule, self.rows // 2)

    def _check_cut_of_k(self) -> None:
        """Blocks and scales; half of I is whole bytes, as I is whole shuffle blocks of FC1."""
        half, block = self.columns // 2, self.layout.block_major_k_bytes
        num_bytes = half * self.layout.storage_bits // 8
        next_step = "Pass strategy 'tp_n_tp_n'."
        if block is not None and num_bytes % block:
            rule = f"have whole blocks of {block} bytes in half a row"
            _refuse(f"{self.name}_weight", rule, f"{num_bytes} bytes", next_step)
        group = self.layout.scale_k_group_size
        if group is not None and half % (group * SCALE_TILE_COLUMNS):
            rule = f"have whole tiles of {SCALE_TILE_COLUMNS} scales, {group} columns each, in "
            _refuse(f"{self.name}_scale", f"{rule}half a row", f"{half} columns", next_step)

    def check_scale(self, ref: ArrayRef, device: int) -> None:
        """Place of the scales; the number, tiles and dtype of block scales."""
        name, layout = f"{self.name}_scale", self.layout
        _check_place(name, ref, device, SCALE_ALIGNMENT)
        group = layout.scale_k_group_size
        if group is None:
            return
        if layout.scale_dtype is not None and ref.dtype != dtype_name_of(layout.scale_dtype):
            rule = f"be {dtype_name_of(layout.scale_dtype)}, the scale_dtype of its layout"
            _refuse(name, rule, ref.dtype)
        if ref.itemsize != 1:
            _refuse(name, "have a one-byte dtype", ref.dtype)
        if self.columns % (group * SCALE_TILE_COLUMNS):
            rule = (
                f"have whole tiles of {SCALE_TILE_COLUMNS} scales, {group} columns each, in a row"
            )
            _refuse(name, rule, f"{self.columns} columns")
        rows = self.rows if self.splits_k else self.rows // 2
        if rows % SCALE_TILE_ROWS:
            rule = f"have a multiple of {SCALE_TILE_ROWS} rows (one tile of scales) in each shard"
            _refuse(name, rule, rows)
        count = self.num_experts * self.rows * (self.columns // group)
        if ref.size != count:
            _refuse(name, f"have {count} elements", f"{ref.size} in shape {tuple(ref.shape)}")

    def cut_weight(self, value: Array, alloc: Allocate | None) -> list[Array]:
        """Both shards."""
        axis = 2 if self.splits_k and self.layout.kind == "major_k" else 1
        if self.layout.kind == "block_major_k" and not self.splits_k:
            axis = 2
        halves = _halves(_raw_view(value), axis)
        name = f"{self.name}_weight"
        return [_copy(name, p, half, value, WEIGHT_ALIGNMENT, alloc) for p, half in halves]

    def cut_scale(self, value: Array, alloc: Allocate | None) -> list[Array]:
        """Both shards of block scales, flat; two whole copies of others."""
        raw, name, group = _raw_view(value), f"{self.name}_scale", self.layout.scale_k_group_size
        if group is None:
            return [_copy(name, p, raw, value, 1, alloc) for p in (0, 1)]
        row_tiles = self.rows // SCALE_TILE_ROWS
        tiles = raw.reshape(self.num_experts, row_tiles, -1, _TILE_BYTES)
        halves = _halves(tiles, 2 if self.splits_k else 1)
        return [
            _copy(name, p, half.reshape(-1), value, SCALE_ALIGNMENT, alloc) for p, half in halves
        ]


def _check_place(name: str, ref: ArrayRef, device: int, align: int) -> None:
    if ref.device != device:
        _refuse(name, "be on the device of fc1_weight", ref.device_name)
    if not ref.is_contiguous:
        _refuse(name, "be contiguous", f"strides {ref.strides}", "Pass a contiguous copy.")
    _check_alignment(name, ref, align)


def _check_alignment(name: str, ref: ArrayRef, align: int) -> None:
    if ref.device == HOST:
        align = min(align, WEIGHT_ALIGNMENT)
    if ref.size and ref.ptr % align:
        _refuse(name, f"start at a multiple of {align} bytes", f"address {ref.ptr:#x}")


def _raw_view(value: Array) -> Array:
    """NumPy or CuPy view as unsigned integers, which every library can copy."""
    array, _ = to_xp(value, _NAME)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _halves(array: Array, axis: int) -> list[tuple[int, Array]]:
    half = array.shape[axis] // 2
    front = (slice(None),) * axis
    first, second = (*front, slice(half)), (*front, slice(half, 2 * half))
    return [(0, array[first]), (1, array[second])]


def _copy(
    name: str, partition: int, part: Array, source: Array, align: int, alloc: Allocate | None
) -> Array:
    """Contiguous copy of a part, in the library and dtype of its source."""
    view, restore = to_xp(source, _NAME)
    if alloc is None:
        copied = part.copy(order="C").view(view.dtype)
        return restore(copied)
    shape = tuple(map(int, part.shape))
    made = alloc(partition, shape, source.dtype)
    ref, expected = describe(made, f"{_NAME}: alloc"), describe(source, _NAME)
    what = f"alloc({partition}, {shape}, {source.dtype}) for {name}"
    if tuple(ref.shape) != shape or ref.dtype != expected.dtype:
        _refuse(what, "return that shape and dtype", f"{tuple(ref.shape)} of {ref.dtype}")
    if ref.device != expected.device:
        _refuse(what, f"return memory on {expected.device_name}", ref.device_name)
    if not ref.is_contiguous:
        _refuse(what, "return contiguous memory", f"strides {ref.strides}")
    if prod(shape):
        _check_alignment(what, ref, align)
    _raw_view(made)[...] = part
    return made
