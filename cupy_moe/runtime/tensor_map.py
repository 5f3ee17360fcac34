"""Tensor maps: descriptions of arrays in global memory for Hopper's copy engine."""

from __future__ import annotations

import ctypes
from enum import Enum
from functools import lru_cache

from cupy_moe.runtime.devices import check
from cupy_moe.runtime.requirements import import_driver

__all__ = ["NO_TENSOR_MAP", "TENSOR_MAP_BYTES", "Swizzle", "encode_tensor_map"]

TENSOR_MAP_BYTES = 128

NO_TENSOR_MAP = bytes(TENSOR_MAP_BYTES)
"""For kernels whose parameters have a map that this specialization does not use."""


class Swizzle(Enum):
    """How boxes lie in shared memory; the values are the driver's names."""

    NONE = "CU_TENSOR_MAP_SWIZZLE_NONE"
    BYTES_128 = "CU_TENSOR_MAP_SWIZZLE_128B"


@lru_cache(maxsize=4096)
def encode_tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: Swizzle = Swizzle.BYTES_128,
) -> bytes:
    """Encode a map of bytes for copies of boxes into shared memory.

    Parameters
    ----------
    address : int
        Of the first element; a multiple of 16.
    shape : tuple of int
        Extent of each dimension in bytes (innermost) and elements, innermost first.
    strides : tuple of int
        Bytes between neighbours of every dimension but the innermost; multiples of 16.
    box : tuple of int
        Extent of what one copy brings; at most 128 in the innermost dimension, 256 in the others.
        What lies outside of the shape arrives as zeros.
    swizzle : Swizzle

    Returns
    -------
    bytes
        The 128 bytes of a ``CUtensorMap``.

    Raises
    ------
    RuntimeError
        If the driver refuses the description.

    Notes
    -----
    A pure function of its arguments: the map holds the address, nothing behind it. The driver wants
    some context of a Hopper GPU to be current.
    """
    driver = import_driver()
    rank = len(shape)
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            rank,
            address,
            [u64(extent) for extent in shape],
            [u64(stride) for stride in strides],
            [u32(extent) for extent in box],
            [u32(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle[swizzle.value],
            # NOTE: fetching 256 bytes for a row of 128 costs 5 % of the bandwidth (H200).
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"encoding a tensor map of {shape} with strides {strides} in boxes of {box}",
    )
    return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP_BYTES)
