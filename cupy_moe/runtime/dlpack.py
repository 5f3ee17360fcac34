"""Borrowed views of DLPack capsules, for element types that NumPy and CuPy refuse to import.

The capsule is never consumed: its memory stays described by the producer and is released when the
view's last reference goes, through the capsule's own destructor.

References
----------
DLPack 1.1, ``dlpack.h``: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupy_moe.runtime.array_ref import DTYPES, HOST, Array, contiguous_strides

__all__ = ["BorrowedView", "borrow"]

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_HOST_DEVICES, _CUDA_DEVICES = (_CPU, _CUDA_HOST), (_CUDA, _CUDA_MANAGED)
_MAX_VERSION = (1, 1)
_READ_ONLY = 1

# (DLDataTypeCode, bits, lanes) -> dtype name
_NAMES = {
    **{(0, bits, 1): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits, 1): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits, 1): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16, 1): "bfloat16",
    (6, 8, 1): "bool",
    (10, 8, 1): "float8_e4m3fn",
    (11, 8, 1): "float8_e4m3fnuz",
    (12, 8, 1): "float8_e5m2",
    (13, 8, 1): "float8_e5m2fnuz",
    (14, 8, 1): "float8_e8m0fnu",
    (17, 4, 2): "float4_e2m1fn_x2",
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes, _capsule_name.restype = [ctypes.py_object], ctypes.c_char_p
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


@dataclass(slots=True, eq=False)
class BorrowedView:
    """Memory of a DLPack producer; shape and strides in elements.

    `interface` is an array-interface dictionary of same-sized unsigned integers, because neither
    protocol knows the 8-bit and 4-bit floats.
    """

    capsule: object
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    read_only: bool

    @property
    def interface(self) -> dict[str, Any]:
        """Version 3 array interface, valid for both NumPy and CUDA consumers."""
        itemsize = DTYPES[self.dtype].itemsize
        return {
            "version": 3,
            "shape": self.shape,
            "strides": tuple(stride * itemsize for stride in self.strides),
            "typestr": "|u1" if itemsize == 1 else f"<u{itemsize}",
            "data": (self.ptr, self.read_only),
        }


def borrow(x: Array, *, current_stream: Callable[[int], int], what: str) -> BorrowedView:
    """Describe the memory of an object that implements ``__dlpack__``, without a copy.

    Parameters
    ----------
    x : object
        DLPack producer in host or CUDA memory.
    current_stream : callable
        Maps a CUDA ordinal to the handle of the stream that will read the array; the producer
        orders its pending work before it. Not called for arrays in host memory.
    what : str
        Names the argument in errors.

    Raises
    ------
    TypeError
        If the device or the element type is not supported, or the producer refuses the export.
    """
    device_type, device = x.__dlpack_device__()
    if device_type not in _HOST_DEVICES + _CUDA_DEVICES:
        raise TypeError(
            f"{what}: arrays must be in host or CUDA memory, got DLPack device type "
            f"{int(device_type)} of {type(x).__name__}"
        )
    # DLPack numbers CUDA's legacy default stream 1; 0 is disallowed as ambiguous.
    kwargs = {"stream": current_stream(device) or 1} if device_type in _CUDA_DEVICES else {}
    try:
        try:
            capsule = x.__dlpack__(max_version=_MAX_VERSION, **kwargs)
        except TypeError:  # producers older than DLPack 1.0
            capsule = x.__dlpack__(**kwargs)
    except (BufferError, RuntimeError, ValueError) as error:
        raise TypeError(f"{what}: {type(x).__name__} cannot be exported: {error}") from error
    return _read(capsule, what)


def _read(capsule: object, what: str) -> BorrowedView:
    name = _capsule_name(capsule)
    address = _capsule_pointer(capsule, name)
    read_only = False
    if name == b"dltensor_versioned":
        versioned = _DLManagedTensorVersioned.from_address(address)
        if versioned.major != 1:
            raise TypeError(f"{what}: DLPack {versioned.major}.{versioned.minor} is not supported")
        read_only = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.dl_tensor
    else:
        tensor = _DLManagedTensor.from_address(address).dl_tensor
    code = (tensor.code, tensor.bits, tensor.lanes)
    dtype = _NAMES.get(code)
    if dtype is None:
        raise TypeError(f"{what}: DLPack type (code, bits, lanes) = {code} is not supported")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    return BorrowedView(
        capsule=capsule,
        ptr=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=contiguous_strides(shape) if strides is None else strides,
        dtype=dtype,
        device=HOST if tensor.device_type in _HOST_DEVICES else tensor.device_id,
        read_only=read_only,
    )
