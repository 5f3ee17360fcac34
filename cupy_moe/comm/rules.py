"""Argument rules of the tensor-parallel finalize."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_moe.kernels.finalize_rmsnorm import MAX_HIDDEN_SIZE, MAX_TOP_K
from cupy_moe.runtime.arrays import HOST, ArrayRef
from cupy_moe.validate import (
    BF16,
    BF16_OR_F32,
    INT32,
    VECTOR_ALIGNMENT,
    ArgumentKindError,
    ArrayLike,
    Checker,
    flag,
    integer,
    remember_accepted,
    scaling_factor,
)

__all__ = [
    "OPERATION",
    "FinalizeArrays",
    "NormOptions",
    "WorkspaceSizes",
    "check_arrays",
    "check_backend",
    "check_options",
    "check_sizes",
]

OPERATION = "tp_moe_finalize_rmsnorm"
_CONTRACT = f"{OPERATION}: tensors do not satisfy the TP MoE finalize contract"
_MAX_ELEMENTS = 2**31 - 1
_COLUMNS = 8  # of a vector
_MAX_TOKENS = 2**20
_LONGEST_WAIT_S = 86400
TRANSPORTS = ("auto", "ipc", "nccl")


@dataclass(slots=True, eq=False)
class FinalizeArrays:
    """Accepted arrays of one call."""

    gemm2: ArrayRef  # (R, W), the first hidden_size columns are read
    weights: ArrayRef  # (T, K)
    index: ArrayRef  # (T, K) or (T * K,)
    norm_weight: ArrayRef  # (H,)
    output: ArrayRef  # (T, H)
    row_stride: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.output.shape[0]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the arrays, in the order of the public arguments."""
        return tuple(ref.ptr for ref in self._refs)

    @property
    def extents(self) -> tuple[int, ...]:
        """Bytes from each array's address to its end, in the same order."""
        hidden_size = self.norm_weight.shape[0]
        rows = 2 * ((self.gemm2.shape[0] - 1) * self.row_stride + hidden_size)
        return (rows, *(ref.nbytes for ref in self._refs[1:]))

    @property
    def _refs(self) -> tuple[ArrayRef, ...]:
        return self.gemm2, self.weights, self.index, self.norm_weight, self.output


def check_arrays(
    gemm2_permuted: ArrayLike,
    expert_weights: ArrayLike,
    expanded_idx_to_permuted_idx: ArrayLike,
    norm_weight: ArrayLike,
    output: ArrayLike,
    *,
    device: int,
    hidden_size: int,
    top_k: int,
) -> FinalizeArrays:
    """Describe the arrays of a call for a workspace of these sizes.

    Raises
    ------
    ArgumentKindError
        Another dtype, or no array; a ``TypeError`` and a ``ValueError``.
    ValueError
        Another shape, device or alignment; gaps in anything but the rows; an output that overlaps
        an input.
    """
    check = Checker(_CONTRACT, ArgumentKindError)
    check.device, check.anchor_name = device, "the workspace"
    index = check.describe("expanded_idx_to_permuted_idx", expanded_idx_to_permuted_idx)
    num_tokens = _num_tokens(check, index, top_k)
    slots, align = (num_tokens, top_k), VECTOR_ALIGNMENT
    check.array(
        "expanded_idx_to_permuted_idx", index, INT32, index.shape, "(T, top_k)", align=align
    )
    arrays = FinalizeArrays(
        gemm2=check.describe("gemm2_permuted", gemm2_permuted),
        weights=check.array(
            "expert_weights", expert_weights, BF16_OR_F32, slots, "(T, top_k)", align=align
        ),
        index=index,
        norm_weight=check.array(
            "norm_weight", norm_weight, BF16, (hidden_size,), "(hidden_size,)", align=align
        ),
        output=check.array(
            "output", output, BF16, (num_tokens, hidden_size), "(T, hidden_size)", align=align
        ),
        row_stride=0,
    )
    arrays.row_stride = _check_rows(check, arrays.gemm2, num_tokens, hidden_size)
    _check_apart(check, arrays, hidden_size)
    inputs = [
        ("expert_weights", arrays.weights),
        ("expanded_idx_to_permuted_idx", arrays.index),
        ("norm_weight", arrays.norm_weight),
    ]
    check.writable("output", arrays.output, inputs)
    return arrays


def _num_tokens(check: Checker, index: ArrayRef, top_k: int) -> int:
    """T of an index map that is (T, top_k) or, as the layers return it, flat."""
    shape = index.shape
    if len(shape) == 2 and shape[1] == top_k:
        return shape[0]
    if len(shape) == 1 and shape[0] % top_k == 0:
        return shape[0] // top_k
    rule = f"be (T, top_k) or flat, top_k = {top_k}"
    next_step = "Initialize with the top_k of the layer."
    return check.refuse(ValueError, "expanded_idx_to_permuted_idx", rule, f"{shape}", next_step)


def _check_rows(check: Checker, rows: ArrayRef, num_tokens: int, hidden_size: int) -> int:
    """Stride of the rows in elements: they may be wider than what is read of them."""
    name = "gemm2_permuted"
    if rows.dtype not in BF16:
        check.refuse(check.kind_error, name, "be bfloat16", rows.dtype)
    if rows.ndim != 2 or rows.shape[1] < hidden_size:
        rule = f"be (R, W), W >= hidden_size = {hidden_size}"
        check.refuse(ValueError, name, rule, str(tuple(rows.shape)))
    if rows.device != check.device:
        check.array(name, rows, BF16, rows.shape, "(R, W)")
    row_stride, column_stride = (rows.shape[1], 1) if rows.is_contiguous else rows.strides
    if column_stride != 1 or row_stride % _COLUMNS or row_stride < 0:
        rule = f"have strides (a multiple of {_COLUMNS}, 1)"
        check.refuse(ValueError, name, rule, f"strides {tuple(rows.strides)}", "Pass a copy.")
    if rows.ptr % VECTOR_ALIGNMENT:
        rule = f"start at a multiple of {VECTOR_ALIGNMENT} bytes"
        check.refuse(ValueError, name, rule, f"address {rows.ptr:#x}", "Pass an aligned copy.")
    if num_tokens and not rows.shape[0]:
        check.refuse(ValueError, name, "have rows", f"none for T = {num_tokens}")
    extent = (rows.shape[0] - 1) * row_stride + hidden_size
    if extent > _MAX_ELEMENTS:
        rule = f"span at most {_MAX_ELEMENTS} elements"
        check.refuse(ValueError, name, rule, str(extent), "Pass fewer tokens.")
    return int(row_stride)


def _check_apart(check: Checker, arrays: FinalizeArrays, hidden_size: int) -> None:
    """Refuse an output among the rows, which reach further than they have elements."""
    rows, output = arrays.gemm2, arrays.output
    if not rows.size or not output.size:
        return
    end = rows.ptr + 2 * ((rows.shape[0] - 1) * arrays.row_stride + hidden_size)
    output_end = output.ptr + output.nbytes
    if output.ptr < end and rows.ptr < output_end:
        got = f"[{output.ptr:#x}, {output_end:#x}) and [{rows.ptr:#x}, {end:#x})"
        check.refuse(ValueError, "output", "not overlap gemm2_permuted", got, "Pass a copy.")


@dataclass(frozen=True, slots=True)
class NormOptions:
    """Scalars of a call."""

    eps: float
    gain_center: float
    weight_before_norm: bool


@remember_accepted
def check_options(eps: object, gain_center: object, weight_before_norm: object) -> NormOptions:
    """Convert the scalars; ``TypeError`` for another kind, ``ValueError`` for NaN and infinity."""
    return NormOptions(
        _finite("eps", eps),
        _finite("gain_center", gain_center),
        flag(OPERATION, "weight_before_norm", weight_before_norm),
    )


def _finite(name: str, value: object) -> float:
    if value is None:
        raise TypeError(f"{OPERATION}: {name} must be a real number, got None.")
    number = scaling_factor(OPERATION, name, value)
    if not math.isfinite(number):
        raise ValueError(f"{OPERATION}: {name} must be finite, got {number}.")
    return number


@dataclass(frozen=True, slots=True)
class WorkspaceSizes:
    """What a workspace is made for."""

    hidden_size: int = 4096
    top_k: int = 8
    max_tokens: int = 1024
    timeout_s: float = 30.0
    transport: str = "auto"


def check_sizes(
    operation: str,
    hidden_size: object,
    top_k: object,
    max_tokens: object,
    timeout_s: object,
    transport: object,
) -> WorkspaceSizes:
    """Convert the sizes of a workspace; ``TypeError`` and ``ValueError`` as elsewhere."""

    def within(name: str, value: object, largest: int, multiple: int = 1) -> int:
        number = integer(operation, name, value)
        if not 1 <= number <= largest or number % multiple:
            rule = f"a multiple of {multiple} in" if multiple > 1 else "in"
            raise ValueError(f"{operation}: {name} must be {rule} [1, {largest}], got {number}.")
        return number

    seconds = scaling_factor(operation, "timeout_s", timeout_s)
    if not 0 < seconds <= _LONGEST_WAIT_S:
        raise ValueError(
            f"{operation}: timeout_s must be in (0, {_LONGEST_WAIT_S}] seconds, got {seconds:g}."
        )
    if transport not in TRANSPORTS:
        raise ValueError(
            f"{operation}: transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}."
        )
    return WorkspaceSizes(
        within("hidden_size", hidden_size, MAX_HIDDEN_SIZE, _COLUMNS),
        within("top_k", top_k, MAX_TOP_K),
        within("max_tokens", max_tokens, _MAX_TOKENS),
        seconds,
        str(transport),
    )


def check_backend(operation: str, backend: object) -> None:
    """Refuse a backend that does not exist; there is one."""
    if backend != "auto":
        raise ValueError(f'{operation}: backend must be "auto", got {backend!r}.')


def check_device(operation: str, device: object) -> int:
    """Convert a CUDA ordinal, or -1 for host memory."""
    number = integer(operation, "device", device)
    if number < HOST:
        rule = "be a CUDA ordinal, or -1 for host memory"
        raise ValueError(f"{operation}: device must {rule}, got {number}.")
    return number
