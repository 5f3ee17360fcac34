"""How the weight helpers take arrays: any library, on the device where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from cupy_moe.formats import Array, get_xp
from cupy_moe.runtime.arrays import describe, to_xp
from cupy_moe.runtime.devices import device_guard

__all__ = [
    "E4M3_DTYPE",
    "UE8M0_DTYPE",
    "moves_bytes",
    "on_device",
    "positive_factor",
    "to_float32",
    "to_values",
]

E4M3_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
UE8M0_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)

_VALUE_DTYPES = ("bfloat16", "float16", "float32")  # what FP32 holds exactly

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
    def wrapper(x: Array, *args: _P.args, **kwargs: _P.kwargs) -> Array:
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

    return wrapper  # type: ignore[return-value]  # `x` has a name as well


def to_values(value: Array, argument: str) -> tuple[Array, Callable[[Array], Array]]:
    """NumPy or CuPy array of numbers that are to be quantized, and the way back.

    Parameters
    ----------
    value : array of any library, bfloat16, float16 or float32
    argument : str
        For messages: "operation: name".

    Raises
    ------
    TypeError
        No array, or one of another dtype: codes would be taken for values.
    """
    array, restore = to_xp(value, argument)
    if array.dtype.name not in _VALUE_DTYPES:
        raise TypeError(
            f"{argument} must be {', '.join(_VALUE_DTYPES[:-1])} or {_VALUE_DTYPES[-1]}, got "
            f"{array.dtype.name}. Codes are no values: dequantize them first."
        )
    return array, restore


def to_float32(value: Array, like: Array | None, argument: str) -> Array:
    """FP32 array of the library of ``like``, or its own, from a number or any library's array."""
    if isinstance(value, bool):
        raise TypeError(f"{argument} must be a number or an array, got bool.")
    if isinstance(value, int):
        value = min(max(value, -(2**129)), 2**129)  # any more does not fit a float
    elif not isinstance(value, float | np.generic):
        value, _ = to_xp(value, argument)
    with np.errstate(over="ignore"):  # infinite, as far as FP32 goes
        return get_xp(value if like is None else like).asarray(value, dtype=np.float32)


def positive_factor(
    value: Array, like: Array, argument: str, shapes: Mapping[str, object], *, waits: bool = True
) -> Array:
    """FP32 array of the library of ``like``, with one of the shapes that ``shapes`` names.

    ``waits`` is whether one in GPU memory is read as well, for which the host waits.

    Raises
    ------
    TypeError
        No number and no array.
    ValueError
        Another shape; not positive and finite.
    """
    factor = to_float32(value, None, argument)
    if factor.shape not in shapes.values():
        raise ValueError(
            f"{argument} must be {' or '.join(shapes)}, got shape {tuple(factor.shape)}."
        )
    is_read = waits or isinstance(factor, np.ndarray)
    if is_read and not bool(((factor > 0) & (factor < np.inf)).all()):
        raise ValueError(f"{argument} must be positive and finite, got {factor}.")
    return get_xp(like).asarray(factor)
