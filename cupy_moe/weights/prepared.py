"""How prepared expert weights and their scales are stored, for those who cut them in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from cupy_moe.types import WeightLayout

__all__ = ["PreparedWeightLayout", "dtype_name_of", "prepared_weight_layouts"]

Dtype: TypeAlias = Any  # of NumPy, ml_dtypes or torch, or its name

_STORAGE_BITS = {
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "uint8": 4,  # two E2M1 codes
}


@dataclass(frozen=True)
class PreparedWeightLayout:
    """Storage of one prepared weight tensor and of its scales.

    Attributes
    ----------
    kind : {"major_k", "block_major_k"}
        (E, rows, K), or (E, K blocks, rows, block).
    storage_bits : {4, 8, 16}
        Bits of one element.
    weight_dtype : dtype or str, optional
        What the tensor must have, of any library; None: not checked.
    block_major_k_bytes : int, optional
        Block of ``block_major_k``.
    scale_layout : {"r128c4"}, optional
        Block scales in tiles of 128 rows by 4 columns; None: no block scales.
    scale_k_group_size : int, optional
        Elements of K per block scale; given if ``scale_layout`` is.
    scale_dtype : dtype or str, optional
        What the block scales must have.

    Raises
    ------
    ValueError
        A value is not one of these, or given without the one that it belongs to.
    """

    kind: Literal["major_k", "block_major_k"]
    storage_bits: int
    weight_dtype: Dtype = None
    block_major_k_bytes: int | None = None
    scale_layout: Literal["r128c4"] | None = None
    scale_k_group_size: int | None = None
    scale_dtype: Dtype = None

    def __post_init__(self) -> None:
        """Check every field."""
        block, group = self.block_major_k_bytes, self.scale_k_group_size
        is_blocked = self.kind == "block_major_k"
        rules = [
            (
                self.kind in ("major_k", "block_major_k"),
                "kind must be 'major_k' or 'block_major_k'",
            ),
            (self.storage_bits in (4, 8, 16), "storage_bits must be 4, 8 or 16"),
            (
                not is_blocked or (block is not None and block > 0),
                "block_major_k_bytes must be positive for 'block_major_k'",
            ),
            (is_blocked or block is None, "block_major_k_bytes must be None for 'major_k'"),
            (self.scale_layout in (None, "r128c4"), "scale_layout must be None or 'r128c4'"),
            (
                (self.scale_layout is None) == (group is None),
                "scale_layout and scale_k_group_size must be given together",
            ),
            (group is None or group > 0, "scale_k_group_size must be positive"),
            (
                self.scale_dtype is None or self.scale_layout is not None,
                "scale_dtype must be None without scale_layout",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise ValueError(f"PreparedWeightLayout: {rule}, got {self}.")


def prepared_weight_layouts(
    *,
    weight_dtype: Dtype,
    weight_layout: int,
    use_shuffled_weight: bool,
    scale_k_group_size: int | None = None,
    scale_dtype: Dtype = None,
    fc1_block_major_k_bytes: int | None = None,
    fc2_block_major_k_bytes: int | None = None,
) -> tuple[PreparedWeightLayout, PreparedWeightLayout]:
    """Describe the FC1 and FC2 weights that an operation takes.

    Parameters
    ----------
    weight_dtype : dtype or str
        bfloat16 or float16, float8_e4m3fn or float8_e5m2, or uint8 (packed E2M1); of NumPy,
        ml_dtypes or torch.
    weight_layout : int or WeightLayout
        MajorK (0) or BlockMajorK (2).
    use_shuffled_weight : bool
        Whether rows are shuffled; MajorK must be.
    scale_k_group_size : int, optional
        Elements of K per block scale; None: no block scales.
    scale_dtype : dtype or str, optional
        Of the block scales.
    fc1_block_major_k_bytes, fc2_block_major_k_bytes : int, optional
        Both for BlockMajorK, neither for MajorK.

    Returns
    -------
    tuple of two PreparedWeightLayout

    Raises
    ------
    ValueError
        A choice is unknown or contradicts another.
    """
    name = "prepared_weight_layouts"
    bits = _STORAGE_BITS.get(dtype_name_of(weight_dtype))
    if bits is None:
        choices = ", ".join(_STORAGE_BITS)
        raise ValueError(f"{name}: weight_dtype must be one of {choices}, got {weight_dtype}.")
    if weight_layout not in (WeightLayout.MajorK, WeightLayout.BlockMajorK):
        raise ValueError(
            f"{name}: weight_layout must be MajorK (0) or BlockMajorK (2), got {weight_layout!r}."
        )
    is_blocked = weight_layout == WeightLayout.BlockMajorK
    if not is_blocked and not use_shuffled_weight:
        raise ValueError(
            f"{name}: use_shuffled_weight must be True for weight_layout MajorK (0), got "
            f"{use_shuffled_weight!r}. Shuffle with cupy_moe.weights.prepare_gemm1_weights."
        )
    blocks = (fc1_block_major_k_bytes, fc2_block_major_k_bytes)
    if any((block is not None) is not is_blocked for block in blocks):
        rule = "both be given for BlockMajorK (2) and be None for MajorK (0)"
        raise ValueError(
            f"{name}: fc1_block_major_k_bytes and fc2_block_major_k_bytes must {rule}, got "
            f"{blocks[0]} and {blocks[1]} with weight_layout {weight_layout!r}."
        )
    fc1, fc2 = (
        PreparedWeightLayout(
            kind="block_major_k" if is_blocked else "major_k",
            storage_bits=bits,
            weight_dtype=weight_dtype,
            block_major_k_bytes=block,
            scale_layout=None if scale_k_group_size is None else "r128c4",
            scale_k_group_size=scale_k_group_size,
            scale_dtype=scale_dtype,
        )
        for block in blocks
    )
    return fc1, fc2


def dtype_name_of(dtype: Dtype) -> str:
    """Name of a dtype of NumPy, ml_dtypes or torch, or given by name."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text
