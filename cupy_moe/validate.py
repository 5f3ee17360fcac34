"""Argument rules of the public operations: what is accepted, and the words of every refusal.

Every rule raises before any work: ``TypeError`` for a kind or dtype, ``ValueError`` for a value or
shape, ``NotImplementedError`` for a legal choice that is not supported.

The rules run on every call, so a rule that holds costs a comparison of tuples, integers or interned
strings; the words are put together after it has failed. Rules on plain values do not depend on the
arrays, so the combinations that passed are remembered: `remember_accepted`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, wraps
from math import isfinite, prod
from numbers import Real
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from cupy_moe.runtime.array_ref import ITEMSIZES, contiguous_strides
from cupy_moe.runtime.arrays import FRAMEWORKS, HOST, ArrayRef, describe
from cupy_moe.runtime.devices import compute_capability

__all__ = [
    "BF16",
    "BF16_OR_F32",
    "E4M3",
    "E4M3_SCALES",
    "F32",
    "INT16",
    "INT32",
    "PACKED_FP4",
    "UE8M0_SCALES",
    "VECTOR_ALIGNMENT",
    "ArgumentKindError",
    "ArrayLike",
    "Checker",
    "flag",
    "integer",
    "optional_flag",
    "optional_integer",
    "remember_accepted",
    "require_supported_device",
    "scaling_factor",
]

ArrayLike: TypeAlias = Any
"""A torch tensor, CuPy or NumPy array, or any other DLPack producer; all but NumPy are optional."""

RuleT = TypeVar("RuleT", bound=Callable[..., Any])

E4M3 = ("float8_e4m3fn",)
BF16 = ("bfloat16",)
F32 = ("float32",)
BF16_OR_F32 = ("bfloat16", "float32")
INT16 = ("int16",)
INT32 = ("int32",)
BYTES = ("uint8", "int8")
PACKED_FP4 = ("uint8",)  # two E2M1 codes
E4M3_SCALES = ("float8_e4m3fn", "uint8")
UE8M0_SCALES = ("float8_e8m0fnu", "float8_e4m3fn", "uint8")  # bytes, however they are typed

VECTOR_ALIGNMENT = 16  # bytes; kernels access matrices by vectors and bulk copies
WORKSPACE_ALIGNMENT = 256  # bytes

MIN_COMPUTE_CAPABILITY = (8, 0)

_FIRST_BEYOND_FP32 = 2.0**128 - 2.0**103  # smaller ones are rounded to FP32's largest


class ArgumentKindError(TypeError, ValueError):
    """An array of another dtype, or no array: the FP4 operations call every such argument bad."""


# --- plain values ---------------------------------------------------------------------------------


def integer(operation: str, name: str, value: object) -> int:
    """Convert an integer of Python or NumPy; ``TypeError`` for anything else, bool included."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return operator.index(value)
    raise _wrong_kind(operation, name, "an integer", value)


def optional_integer(operation: str, name: str, value: object) -> int:
    """Like `integer`, with 0 for None."""
    return 0 if value is None else integer(operation, name, value)


def flag(operation: str, name: str, value: object) -> bool:
    """Convert a bool of Python or NumPy; ``TypeError`` for anything else."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise _wrong_kind(operation, name, "True or False", value)


def optional_flag(operation: str, name: str, value: object) -> bool | None:
    """Like `flag`, with None for None."""
    return None if value is None else flag(operation, name, value)


def scaling_factor(operation: str, name: str, value: object) -> float:
    """Convert a real number, 1.0 for None; ``TypeError`` for anything else.

    ``ValueError`` for a finite number that FP32, which kernels take, rounds to infinity.
    """
    if value is None:
        return 1.0
    if not isinstance(value, Real | np.number) or isinstance(value, bool | np.complexfloating):
        raise _wrong_kind(operation, name, "a real number or None", value)
    try:
        number = float(value)
    except OverflowError:  # an integer, or a fraction of them
        raise _beyond_fp32(operation, name, "a larger one than FP64 holds") from None
    if isfinite(number) and abs(number) >= _FIRST_BEYOND_FP32:
        raise _beyond_fp32(operation, name, f"{number:g}")
    return number


def _beyond_fp32(operation: str, name: str, got: str) -> ValueError:
    rule = "be in the range of FP32, [-3.4028235e38, 3.4028235e38]"
    return ValueError(f"{operation}: {name} must {rule}, got {got}. Pass a smaller number.")


def _wrong_kind(operation: str, name: str, rule: str, value: object) -> TypeError:
    got = repr(value)
    got = got if len(got) <= 60 else f"{got[:57]}..."
    return TypeError(f"{operation}: {name} must be {rule}, got {got} ({type(value).__name__}).")


def remember_accepted(rule: RuleT) -> RuleT:
    """Cache a rule on plain positional values by value and type, so that True is no 1."""
    remembered = lru_cache(maxsize=1024, typed=True)(rule)

    @wraps(rule)
    def call(*values: object) -> object:
        try:
            return remembered(*values)
        except TypeError:
            pass  # the rule's own, or the cache's about an unhashable value: the rule names it
        return rule(*values)

    return call  # type: ignore[return-value]


# --- devices --------------------------------------------------------------------------------------


@cache
def require_supported_device(operation: str, device: int) -> None:
    """Refuse a GPU that the kernels do not run on; host memory is always fine.

    Raises
    ------
    NotImplementedError
        If the compute capability is below 8.0.
    RuntimeError
        If a package that GPU execution needs is missing.
    """
    if device == HOST:
        return
    found = compute_capability(device)
    if found < MIN_COMPUTE_CAPABILITY:
        least, got = ("{}.{}".format(*version) for version in (MIN_COMPUTE_CAPABILITY, found))
        raise NotImplementedError(
            f"{operation}: the kernels need compute capability {least} or newer, cuda:{device} has "
            f"{got}. Pass arrays in host memory to run the NumPy reference."
        )


# --- arrays ---------------------------------------------------------------------------------------


def _conversion(name: str, dtypes: tuple[str, ...], got: str) -> str:
    dtype = dtypes[0]
    if dtypes == PACKED_FP4:
        return "Quantize and pack with cupy_moe.weights."
    if dtypes in (E4M3, E4M3_SCALES, UE8M0_SCALES):
        view = f"{name}.view(ml_dtypes.{dtype}) or {name}.view(torch.{dtype})"
        return f"View the codes: {view}." if got in BYTES else "Quantize with cupy_moe.weights."
    return f'Convert with {name}.astype("{dtype}") or {name}.to(torch.{dtype}).'


class Checker:
    """Array rules of one call: dtype, shape, device, contiguity and alignment of every argument.

    Parameters
    ----------
    operation : str
        Public name of the operation, first in every message.
    kind_error : type of exception
        Raised for what is no array or has another dtype.

    Attributes
    ----------
    device : int or None
        Where every array must be, `HOST` or a CUDA ordinal; set by `anchor`.
    anchor_name : str
        Argument that the device was taken from.
    """

    __slots__ = ("anchor_name", "device", "kind_error", "operation")

    def __init__(self, operation: str, kind_error: type[Exception] = TypeError) -> None:
        self.operation = operation
        self.kind_error = kind_error
        self.device: int | None = None
        self.anchor_name = ""

    def describe(self, name: str, value: ArrayLike) -> ArrayRef:
        """Describe an argument that must be an array, of any shape."""
        try:
            return describe(value, f"{self.operation}: {name}")
        except TypeError as error:
            if self.kind_error is TypeError:
                raise
            raise self.kind_error(str(error)) from error

    def anchor(self, name: str, value: ArrayLike) -> ArrayRef:
        """Describe the argument on whose device every other array must be."""
        ref = self.describe(name, value)
        self.device, self.anchor_name = ref.device, name
        return ref

    def array(
        self,
        name: str,
        value: ArrayLike,
        dtypes: tuple[str, ...],
        shape: tuple[int, ...],
        symbols: str,
        *,
        align: int = 0,
        hint: str = "",
    ) -> ArrayRef:
        """Describe an argument and require dtype, shape, device, contiguity and alignment.

        Parameters
        ----------
        name : str
            Argument name.
        value : array or ArrayRef
            The argument, or its description if there is one already.
        dtypes : tuple of str
            Accepted dtypes, the one to convert to first.
        shape : tuple of int
            The only accepted shape.
        symbols : str
            The same shape in words, e.g. ``"(num_tokens, top_k)"``.
        align : int
            Bytes that the address must be a multiple of; 0 for the element size.
        hint : str
            Next step for a caller whose array has another shape.

        Returns
        -------
        ArrayRef

        Raises
        ------
        TypeError
            No array, or of another dtype (or what the checker was told to raise).
        ValueError
            Another shape or device, gaps between the elements, or a misaligned address.
        """
        # Most of a call's host time goes by here: no detour for arrays of a library seen before.
        framework = FRAMEWORKS.get(type(value))
        if framework is None:
            ref = value if isinstance(value, ArrayRef) else self.describe(name, value)
        else:
            try:
                ref = framework.describe(value, name)
            except (TypeError, ValueError):
                ref = self.describe(name, value)  # raises again, with the operation
        if (
            ref.dtype not in dtypes
            or ref.shape != shape
            or ref.device != self.device
            or not ref.is_contiguous
            or ref.ptr % (align or VECTOR_ALIGNMENT)
        ):
            self._examine(name, ref, dtypes, shape, symbols, align or ref.itemsize, hint)
        return ref

    def _examine(
        self,
        name: str,
        ref: ArrayRef,
        dtypes: tuple[str, ...],
        shape: tuple[int, ...],
        symbols: str,
        align: int,
        hint: str,
    ) -> None:
        """Raise for the first broken rule; return if the array is unusual but within the rules."""
        if ref.dtype not in dtypes:
            conversion = _conversion(name, dtypes, ref.dtype)
            self.refuse(self.kind_error, name, f"be {' or '.join(dtypes)}", ref.dtype, conversion)
        if ref.shape != shape:
            self.refuse(
                ValueError, name, f"be {symbols} = {tuple(shape)}", str(tuple(ref.shape)), hint
            )
        if ref.device != self.device:
            self._refuse_device(name, ref)
        if not ref.is_contiguous:
            expected = contiguous_strides(shape)
            rule = f"be contiguous, strides {expected} for shape {tuple(shape)}"
            self.refuse(ValueError, name, rule, f"strides {ref.strides}", "Pass a contiguous copy.")
        if ref.ptr % align and ref.size:
            rule = f"start at a multiple of {align} bytes"
            self.refuse(ValueError, name, rule, f"address {ref.ptr:#x}", "Pass an aligned copy.")

    def _refuse_device(self, name: str, ref: ArrayRef) -> NoReturn:
        anchor = "cpu" if self.device == HOST else f"cuda:{self.device}"
        is_mixed = HOST in (ref.device, self.device)
        rule = f"be on {anchor}, the device of {self.anchor_name}"
        next_step = "Host and CUDA arrays cannot be mixed." if is_mixed else ""
        self.refuse(ValueError, name, rule, ref.device_name, next_step)

    def refuse(
        self, kind: type[Exception], name: str, rule: str, got: str, next_step: str = ""
    ) -> NoReturn:
        """Raise ``kind``: operation, argument, rule, what was received, next step."""
        message = f"{self.operation}: {name} must {rule}, got {got}. {next_step}"
        raise kind(message.rstrip())

    def rows(
        self,
        name: str,
        value: ArrayLike,
        dtypes: tuple[str, ...],
        shape: tuple[int, ...],
        symbols: str,
    ) -> ArrayRef:
        """Like `array` for one that may be longer along the first axis than ``shape`` says."""
        ref = self.describe(name, value)
        has_more = len(ref.shape) == len(shape) and ref.shape[0] > shape[0]
        self.array(name, ref, dtypes, (ref.shape[0], *shape[1:]) if has_more else shape, symbols)
        return ref

    def bytes_of(
        self,
        name: str,
        value: ArrayLike,
        dtypes: tuple[str, ...],
        sizes: tuple[int, ...],
        symbols: str,
        *,
        align: int = 0,
    ) -> ArrayRef:
        """Like `array` for one of any shape with one of several numbers of elements."""
        ref = self.describe(name, value)
        if ref.dtype in dtypes and ref.size not in sizes:
            rule = f"have {symbols} = {' or '.join(map(str, sizes))} elements"
            self.refuse(ValueError, name, rule, f"{ref.size} in shape {tuple(ref.shape)}")
        return self.array(name, ref, dtypes, ref.shape, symbols, align=align)

    def workspace(self, name: str, value: ArrayLike) -> ArrayRef:
        """Scratch memory: 1-D contiguous bytes, base aligned to 256 bytes."""
        ref = self.describe(name, value)
        if len(ref.shape) != 1:
            self.refuse(ValueError, name, "be 1-D", f"shape {tuple(ref.shape)}")
        self.array(name, ref, BYTES, ref.shape, "(num_bytes,)", align=WORKSPACE_ALIGNMENT)
        return ref

    def writable(self, name: str, ref: ArrayRef, others: Iterable[tuple[str, ArrayRef]]) -> None:
        """Refuse an array to be written that is read-only or shares memory with another."""
        if not ref.is_writable:
            self.refuse(ValueError, name, "be writable", "a read-only array")
        begin, end = ref.ptr, ref.ptr + ref.nbytes
        if begin == end:
            return
        for other_name, other in others:
            # `nbytes` spelled out: this runs for every array of every call.
            if (
                other.ptr < end
                and begin - other.ptr < prod(other.shape) * ITEMSIZES[other.dtype]
                and other.size
            ):
                got = f"[{begin:#x}, {end:#x}) and [{other.ptr:#x}, {other.ptr + other.nbytes:#x})"
                self.refuse(ValueError, name, f"not overlap {other_name}", got, "Pass a copy.")
