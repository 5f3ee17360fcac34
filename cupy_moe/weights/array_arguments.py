"""How the weight helpers take arrays: any library, on the device where they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from cupy_moe.formats import Array, get_xp
from cupy_moe.runtime.arrays import describe, to_xp
from cupy_moe.runtime.devices import device_guard

__all__ = ["E4M3_DTYPE", "UE8M0_DTYPE", "moves_bytes", "on_device", "to_float32"]

E4M3_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
UE8M0_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_device(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function with the device of its first array argument current.

    The first array of a tuple counts, too.
    """

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for value in (*args, *kwargs.values()):
            argument = value[0] if isinstance(value, tuple) and value else value
            if hasattr(argument, "__dlpack__"):
                with device_guard(describe(argument, function.__name__).device):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def moves_bytes(
    function: Callable[Concatenate[Array, _P], Array],
) -> Callable[Concatenate[Array, _P], Array]:
    """Let a function on uint8 NumPy/CuPy arrays take any library's array of a one-byte dtype.

    The result is contiguous, new, and of the dtype of the argument.
    """

    @on_device
    @wraps(function)
    def wrapper(x: Array, /, *args: _P.args, **kwargs: _P.kwargs) -> Array:
        name = function.__name__
        array, restore = to_xp(x, name)
        if array.dtype.itemsize != 1:
            raise TypeError(
                f"{name}: needs a one-byte dtype (uint8, float8_e4m3fn, ...), got "
                f"{array.dtype.name}. Quantize first, or pass the array viewed as uint8."
            )
        if array.ndim < 2:
            raise ValueError(
                f"{name}: needs at least two dimensions (..., rows, bytes), got shape "
                f"{tuple(array.shape)}."
            )
        moved = function(array.view(np.uint8), *args, **kwargs)
        return restore(get_xp(moved).ascontiguousarray(moved)).view(x.dtype)

    return wrapper


def to_float32(value: Array, like: Array) -> Array:
    """FP32 array of the library of ``like`` from a number or any library's array."""
    if not isinstance(value, int | float | np.generic):
        value, _ = to_xp(value, "factor")
    return get_xp(like).asarray(value, dtype=np.float32)
