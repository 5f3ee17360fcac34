"""What the rest of the package knows about an array: address, shape, strides, dtype, device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from cupy_moe.runtime.frameworks import Framework

__all__ = [
    "DTYPES",
    "HOST",
    "ITEMSIZES",
    "Array",
    "ArrayRef",
    "HostArray",
    "Library",
    "contiguous_strides",
    "dtype_name",
    "is_contiguous",
]

HOST = -1

# Arrays and modules of optional libraries: no static type can name them.
Array: TypeAlias = Any
Library: TypeAlias = Any
HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_ML_DTYPES_NAMES = (
    *("bfloat16", "float4_e2m1fn", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_NAMES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES_NAMES},
    # One byte holding two E2M1 codes, the even one in the low nibble; ml_dtypes has no such type.
    "float4_e2m1fn_x2": np.dtype("uint8"),
}
"""Dtype name -> NumPy dtype of one stored element."""

ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Dtype name -> bytes of one stored element."""

_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "float4_e2m1fn_x2"}


def dtype_name(dtype: np.dtype[Any], what: str) -> str:
    """Return the name of a NumPy or CuPy dtype; `what` names the argument in the error.

    Raises
    ------
    TypeError
        If the dtype is not numeric, is complex or is not in native byte order.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise TypeError(f"{what}: dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return name


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array of this shape in C order without gaps."""
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie in C order without gaps; strides of length-1 axes do not matter."""
    expected = contiguous_strides(shape)
    if strides == expected or 0 in shape:
        return True
    axes = zip(shape, strides, expected, strict=True)
    return all(length == 1 or stride == want for length, stride, want in axes)


@dataclass(slots=True, eq=False, repr=False)
class ArrayRef:
    """Reference to an array of any framework; keeps the array alive.

    Attributes
    ----------
    owner : object
        The array itself, and what an operation hands back to its caller.
    ptr : int
        Address of element (0, ..., 0); may be 0 if the array is empty.
    shape : tuple of int
        In elements (a packed ``float4_e2m1fn_x2`` byte is one element); ``torch.Size`` is one, too.
    dtype : str
        A key of `DTYPES`.
    device : int
        CUDA ordinal, or `HOST` (-1) for host memory.
    is_contiguous : bool
        Whether elements lie in C order without gaps; strides of length-1 axes do not matter.
    framework : Framework
        Allocates and exports arrays of the owner's kind.
    keepalive : object
        Whatever else must outlive the reference.
    """

    owner: Any
    ptr: int
    shape: tuple[int, ...]
    dtype: str
    device: int
    is_contiguous: bool
    framework: Framework
    keepalive: Any = field(default=None)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return ITEMSIZES[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without gaps."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return self.framework.strides(self)

    @property
    def is_writable(self) -> bool:
        """Whether an operation may write into the array."""
        return self.framework.is_writable(self)

    @property
    def device_name(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return "cpu" if self.device == HOST else f"cuda:{self.device}"

    def __repr__(self) -> str:
        """Dtype, shape, device and framework."""
        shape = ", ".join(map(str, self.shape))
        return f"ArrayRef({self.dtype}[{shape}] on {self.device_name}, {self.framework.name})"
