"""Compare an operation's output with its reference, and hold the figures against written bounds.

A tensor-wide figure alone lets whole wrong rows pass, and a difference is meaningless where either
side is NaN or infinite. So the places of NaN and infinities are compared first, and every
comparison also reports figures per row (the last axis), the fraction of bit-equal elements and
where the worst element is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

ArrayLike: TypeAlias = Any  # numpy.ndarray, cupy.ndarray or torch.Tensor

__all__ = [
    "FINALIZE",
    "FP4_BF16",
    "FP4_MXFP8",
    "FP4_NVFP4",
    "FP8_TIER_A",
    "FP8_TIER_A_GEGLU",
    "FP8_TIER_B",
    "FP8_TIER_B_MEDIAN",
    "Errors",
    "Tolerance",
    "assert_bit_equal",
    "assert_median_within",
    "assert_within",
    "compare",
    "finalize_element_bound",
    "shares",
    "to_host",
]


@dataclass(frozen=True)
class Errors:
    """How far an array is from its reference.

    The figures are taken over the elements that are finite on both sides. If NaN or infinities lie
    in different places, ``rel_l2`` and ``max_abs_over_max_ref`` are infinite: no bound accepts it.

    Attributes
    ----------
    rel_l2 : float
        ``norm(out - ref) / norm(ref)`` over the whole array; 0 when both are all zero.
    max_abs_over_max_ref : float
        ``max|out - ref| / max|ref|``.
    bit_equal : float
        Fraction of elements with identical bits (any two NaNs count as identical).
    worst_index : tuple of int
        Index of the largest ``|out - ref|``, or of the first misplaced NaN or infinity.
    worst_out, worst_ref : float
        The two values there.
    row_rel_l2 : numpy.ndarray, shape (product of the leading axes,), float64
        ``rel_l2`` of every row (last axis). A row of zeros that came out nonzero is infinite.
    nonfinite_mismatches : int
        Elements of which one side is NaN (or an infinity) and the other is not the same.
    element_share : float or None
        Worst ``|out - ref| / element_bound`` when :func:`compare` was given an ``element_bound``.
    """

    rel_l2: float
    max_abs_over_max_ref: float
    bit_equal: float
    worst_index: tuple[int, ...]
    worst_out: float
    worst_ref: float
    row_rel_l2: NDArray[np.float64]
    nonfinite_mismatches: int
    element_share: float | None = None

    @property
    def worst_row(self) -> int:
        """Flat index of the row with the largest ``row_rel_l2`` (0 for an empty array)."""
        return int(np.argmax(self.row_rel_l2)) if self.row_rel_l2.size else 0

    @property
    def max_row_rel_l2(self) -> float:
        """Largest ``row_rel_l2`` (0 for an empty array)."""
        return float(self.row_rel_l2.max(initial=0.0))


@dataclass(frozen=True)
class Tolerance:
    """Upper bounds on the figures of :class:`Errors` (lower bound for ``bit_equal``).

    ``max_row_rel_l2`` guards against single wrong rows, which the tensor-wide figures average
    away. ``needs_element_bound`` demands an :func:`compare` with ``element_bound``.
    """

    name: str
    rel_l2: float
    max_abs_over_max_ref: float
    bit_equal: float
    max_row_rel_l2: float
    needs_element_bound: bool = False


# FP8 per-tensor MoE. Tier A: FP32-accurate accumulation; tier B: FP8 tensor cores promoted to FP32
# at least every 128 of K, whose short accumulator flips about 1 % of the intermediate codes.
# Row budget: one flipped E4M3 code moves an intermediate value by 1/16 to 1/8; a row whose energy
# sits in few intermediate values moves by a large part of that. A wrong, missing or doubled expert
# moves a row by 0.3 and more.
FP8_TIER_A = Tolerance("FP8 tier A", 4e-3, 2**-6, 0.95, 0.1)
FP8_TIER_A_GEGLU = Tolerance("FP8 tier A, Geglu", 1e-2, 2**-6, 0.30, 0.1)
FP8_TIER_B = Tolerance("FP8 tier B", 5e-2, 2**-4, 0.0, 0.2)
FP8_TIER_B_MEDIAN = 1.5e-2  # bound on the median rel_l2 over many tier B cases

# FP4 MoE by activation format. NVFP4 is looser because one E2M1 step is 20 to 50 % of a value and
# one block-scale flip moves 16 values.
FP4_NVFP4 = Tolerance("FP4, NVFP4 activations", 1e-2, 2**-5, 0.90, 0.2)
FP4_MXFP8 = Tolerance("FP4, MXFP8 activations", 5e-3, 2**-6, 0.90, 0.1)
FP4_BF16 = Tolerance("FP4, BF16 activations", 4e-3, 2**-6, 0.90, 0.1)

# Finalize with RMSNorm: token rows within 3e-3; one BF16 rounding (2^-9, to the neighbour 2^-8) and
# the cancellation between slots enter through the element bound.
FINALIZE = Tolerance("finalize + RMSNorm", 3e-3, math.inf, 0.0, 3e-3, needs_element_bound=True)


def to_host(x: ArrayLike) -> NDArray[Any]:
    """Copy a NumPy, CuPy or torch array to a NumPy array with the same logical dtype.

    BF16 and FP8 arrive as ``ml_dtypes`` types. Synchronizes with the array's device.
    """
    if isinstance(x, np.ndarray):
        return x
    framework = type(x).__module__.partition(".")[0]
    if framework == "cupy":
        return np.asarray(x.view(f"u{x.itemsize}").get()).view(x.dtype)
    if framework == "torch":
        return _torch_to_host(x)
    return np.from_dlpack(x)


def _torch_to_host(x: ArrayLike) -> NDArray[Any]:
    torch = sys.modules["torch"]  # imported by whoever made the tensor
    name = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu()
    if hasattr(ml_dtypes, name):  # torch exports these dtypes to NumPy as plain integers only
        carrier = {1: torch.uint8, 2: torch.int16}[x.element_size()]
        return np.asarray(x.view(carrier).numpy().view(getattr(ml_dtypes, name)))
    return np.asarray(x.numpy())


def compare(out: ArrayLike, ref: ArrayLike, *, element_bound: ArrayLike = None) -> Errors:
    """Measure how far ``out`` is from ``ref``.

    Parameters
    ----------
    out, ref : numpy.ndarray, cupy.ndarray or torch.Tensor, same shape
        Any float dtype, BF16 and FP8 included. If the dtypes differ, differences are taken against
        ``ref`` as it is and bits against ``ref`` rounded to the dtype of ``out``.
    element_bound : array, same shape, optional
        Largest allowed ``|out - ref|`` of each element; fills ``Errors.element_share``.

    Returns
    -------
    Errors

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    out, ref = to_host(out), to_host(ref)
    if out.shape != ref.shape:
        raise ValueError(f"compare: out has shape {out.shape}, ref has shape {ref.shape}")
    a, b = out.astype(np.float64), ref.astype(np.float64)
    misplaced = _nonfinite_mismatch(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    error = np.abs(np.subtract(a, b, out=np.zeros_like(a), where=finite))
    magnitude = np.where(finite, np.abs(b), 0.0)

    wrong = int(misplaced.sum())
    worst = (
        np.unravel_index(int(np.argmax(misplaced if wrong else error)), a.shape) if a.size else ()
    )
    index = tuple(int(i) for i in worst)
    return Errors(
        rel_l2=math.inf if wrong else float(_ratio(_norm(error), _norm(magnitude))),
        max_abs_over_max_ref=math.inf if wrong else float(_ratio(_max(error), _max(magnitude))),
        bit_equal=_bit_equal_fraction(out, ref),
        worst_index=index,
        worst_out=float(a[index]) if a.size else 0.0,
        worst_ref=float(b[index]) if a.size else 0.0,
        row_rel_l2=_row_rel_l2(error, magnitude, misplaced),
        nonfinite_mismatches=wrong,
        element_share=None if element_bound is None else _element_share(error, element_bound),
    )


def _max(x: NDArray[np.float64]) -> float:
    return float(x.max(initial=0.0))


def _nonfinite_mismatch(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    either = ~(np.isfinite(a) & np.isfinite(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(either & ~same)


def _norm(x: NDArray[np.float64], axis: int | None = None) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.sum(np.square(x), axis=axis)))


def _ratio(error: ArrayLike, magnitude: ArrayLike) -> NDArray[np.float64]:
    """``error / magnitude`` with 0/0 = 0 and x/0 = inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(error) == 0.0, 0.0, np.divide(error, magnitude))


def _row_rel_l2(
    error: NDArray[np.float64], magnitude: NDArray[np.float64], misplaced: NDArray[np.bool_]
) -> NDArray[np.float64]:
    width = error.shape[-1] if error.ndim else 1
    rows = -1 if error.size else 0
    rel = _ratio(_norm(error.reshape(rows, width), 1), _norm(magnitude.reshape(rows, width), 1))
    return np.where(misplaced.reshape(rows, width).any(axis=1), np.inf, rel)


def _bits(x: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _bit_equal_mask(out: NDArray[Any], ref: NDArray[Any]) -> NDArray[np.bool_]:
    ref = ref.astype(out.dtype, copy=False)
    same = _bits(out) == _bits(ref)
    if np.issubdtype(out.dtype, np.integer):
        return np.asarray(same)
    return np.asarray(same | ((out != out) & (ref != ref)))  # noqa: PLR0124 - NaN in any dtype


def _bit_equal_fraction(out: NDArray[Any], ref: NDArray[Any]) -> float:
    return float(_bit_equal_mask(out, ref).mean()) if out.size else 1.0


def _element_share(error: NDArray[np.float64], bound: ArrayLike) -> float:
    return float(_ratio(error, to_host(bound).astype(np.float64)).max(initial=0.0))


def finalize_element_bound(ref: ArrayLike, abs_sum: ArrayLike) -> NDArray[np.float64]:
    """Return the ``|out - ref|`` allowed to the finalize operation: ``2^-7 |ref| + 2^-16 S``.

    ``S(t, h) = sum_k |w_k * y_k(t, h)|`` measures the cancellation between a token's slots.
    """
    ref, abs_sum = to_host(ref).astype(np.float64), to_host(abs_sum).astype(np.float64)
    return np.asarray(2.0**-7 * np.abs(ref) + 2.0**-16 * abs_sum)


def shares(errors: Errors, tolerance: Tolerance) -> dict[str, float]:
    """Part of each bound that was used: at most 1 is within. Equality of bits counts misses."""
    used = {
        "rel_l2": errors.rel_l2 / tolerance.rel_l2,
        "max_abs_over_max_ref": errors.max_abs_over_max_ref / tolerance.max_abs_over_max_ref,
        "bit_equal": (1.0 - errors.bit_equal) / (1.0 - tolerance.bit_equal),
        "max_row_rel_l2": errors.max_row_rel_l2 / tolerance.max_row_rel_l2,
    }
    if tolerance.needs_element_bound:
        if errors.element_share is None:
            raise ValueError(f"{tolerance.name}: call compare() with element_bound")
        used["element_share"] = errors.element_share
    return used


def assert_within(errors: Errors, tolerance: Tolerance, what: str = "output") -> None:
    """Raise ``AssertionError`` unless every figure is within its bound.

    The message lists each figure, its bound and the share of the bound that was used.
    """
    if errors.nonfinite_mismatches:
        raise AssertionError(
            f"{what}: {errors.nonfinite_mismatches} NaN/Inf out of place, first at "
            f"{errors.worst_index}: out {errors.worst_out}, ref {errors.worst_ref}"
        )
    used = shares(errors, tolerance)
    if all(share <= 1.0 for share in used.values()):
        return
    lines = [
        f"  {name}: {getattr(errors, name):.3g}, bound {getattr(tolerance, name, 1.0):.3g}, "
        f"{100 * share:.0f} % of the bound{'' if share <= 1.0 else '  <-- exceeded'}"
        for name, share in used.items()
    ]
    raise AssertionError(
        "\n".join(
            [
                f"{what}: outside {tolerance.name}",
                *lines,
                f"  worst element {errors.worst_index}: out {errors.worst_out:.6g}, "
                f"ref {errors.worst_ref:.6g}; worst row {errors.worst_row}",
            ]
        )
    )


def assert_median_within(
    errors: Sequence[Errors], bound: float = FP8_TIER_B_MEDIAN, what: str = "cases"
) -> None:
    """Raise ``AssertionError`` unless the median ``rel_l2`` of the cases is at most ``bound``."""
    figure = median(e.rel_l2 for e in errors)
    if not figure <= bound:
        raise AssertionError(
            f"{what}: median rel_l2 of {len(errors)} cases is {figure:.3g}, bound {bound:.3g}, "
            f"{100 * figure / bound:.0f} % of the bound"
        )


def assert_bit_equal(out: ArrayLike, ref: ArrayLike, what: str = "output") -> None:
    """Raise ``AssertionError`` unless both arrays have one dtype, one shape and the same bits."""
    out, ref = to_host(out), to_host(ref)
    if (out.shape, out.dtype) != (ref.shape, ref.dtype):
        raise AssertionError(f"{what}: {out.dtype}{out.shape} against {ref.dtype}{ref.shape}")
    differs = ~_bit_equal_mask(out, ref)
    if differs.any():
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        rows = differs.reshape(-1, out.shape[-1]).any(axis=1).sum() if out.ndim else 1
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {out.size} elements ({int(rows)} rows) differ, "
            f"first at {first}: {out[first]} against {ref[first]}"
        )
