"""NumPy and CuPy, whose arrays are described alike."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cupy_moe.runtime.array_ref import DTYPES, HOST, Array, ArrayRef, dtype_name
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.frameworks.base import Framework
from cupy_moe.runtime.requirements import import_cupy

__all__ = ["CupyFramework", "NumpyFramework"]


class NumpyFramework(Framework):
    """Host arrays of NumPy."""

    name = "numpy"

    def describe(self, x: Array, what: str) -> ArrayRef:
        """See `Framework.describe`."""
        ptr = x.__array_interface__["data"][0]
        dtype = dtype_name(x.dtype, what)
        return ArrayRef(x, ptr, x.shape, dtype, HOST, _has_no_gaps(x, what), self)

    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """See `Framework.strides`."""
        return _element_strides(ref.owner)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """See `Framework.empty`."""
        assert device == HOST
        return self.describe(np.empty(shape, DTYPES[dtype]), "empty")

    def current_stream(self, device: int) -> int:
        """Host arrays have no stream."""
        raise NotImplementedError("NumPy arrays are in host memory and have no CUDA stream")

    def is_writable(self, ref: ArrayRef) -> bool:
        """See `Framework.is_writable`."""
        return bool(ref.owner.flags.writeable)

    def view(self, ref: ArrayRef) -> Array:
        """See `Framework.view`: the array itself."""
        return ref.owner

    def export(self, array: Array) -> Array:
        """NumPy arrays as they are, CuPy arrays copied to the host."""
        return array if isinstance(array, np.ndarray) else array.get()


class CupyFramework(Framework):
    """CUDA arrays of CuPy."""

    name = "cupy"
    has_signature = True

    def __init__(self) -> None:
        self._cupy = import_cupy()

    def describe(self, x: Array, what: str) -> ArrayRef:
        """See `Framework.describe`."""
        data = x.data
        dtype = dtype_name(x.dtype, what)
        return ArrayRef(x, data.ptr, x.shape, dtype, data.device_id, _has_no_gaps(x, what), self)

    def signature(self, x: Array) -> tuple[int, Hashable]:
        """See `Framework.signature`."""
        data = x.data
        address = data.ptr
        return address, (address & 255, data.device_id, x.shape, x.strides, x.dtype)

    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """See `Framework.strides`."""
        return _element_strides(ref.owner)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """See `Framework.empty`."""
        with device_guard(device):
            array = self._cupy.empty(shape, DTYPES[dtype])
        return ArrayRef(array, array.data.ptr, shape, dtype, device, True, self)

    def current_stream(self, device: int) -> int:
        """See `Framework.current_stream`."""
        return int(self._cupy.cuda.get_current_stream(device).ptr)

    def view(self, ref: ArrayRef) -> Array:
        """See `Framework.view`: the array itself."""
        return ref.owner

    def export(self, array: Array) -> Array:
        """CuPy arrays as they are, NumPy arrays copied to the current device."""
        if isinstance(array, np.ndarray):
            # Raw bytes: the copy needs no conversion between ml_dtypes of the two libraries.
            raw = np.ascontiguousarray(array).view(_unsigned(array.dtype.itemsize))
            return self._cupy.asarray(raw).reshape(array.shape).view(array.dtype)
        return array


def _unsigned(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"u{itemsize}")


def _has_no_gaps(x: Array, what: str) -> bool:
    """Whether a NumPy or CuPy array is contiguous; refuses strides between the elements."""
    if x.flags.c_contiguous:
        return True
    itemsize = x.dtype.itemsize
    if any(stride % itemsize for stride in x.strides):
        raise ValueError(
            f"{what}: strides {x.strides} bytes must be multiples of the item size {itemsize}; "
            "pass a contiguous copy"
        )
    return False


def _element_strides(x: Array) -> tuple[int, ...]:
    """Strides of a NumPy or CuPy array in elements."""
    itemsize = x.dtype.itemsize
    return tuple(stride // itemsize for stride in x.strides)
