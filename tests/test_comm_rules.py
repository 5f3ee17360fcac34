"""Argument rules of the tensor-parallel finalize, one test a rule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.comm.rules import check_arrays, check_backend, check_options, check_sizes
from cupy_moe.runtime.launch import ParamLayout

BF16 = ml_dtypes.bfloat16
HIDDEN, TOP_K, TOKENS, ROWS = 64, 4, 3, 20


def arguments(**changes: Any) -> dict[str, Any]:
    found = {
        "gemm2_permuted": np.zeros((ROWS, HIDDEN), BF16),
        "expert_weights": np.zeros((TOKENS, TOP_K), np.float32),
        "expanded_idx_to_permuted_idx": np.zeros((TOKENS, TOP_K), np.int32),
        "norm_weight": np.zeros(HIDDEN, BF16),
        "output": np.zeros((TOKENS, HIDDEN), BF16),
    }
    return found | changes


def check(**changes: Any) -> Any:
    return check_arrays(**arguments(**changes), device=-1, hidden_size=HIDDEN, top_k=TOP_K)


def test_accepted() -> None:
    arrays = check()
    assert (arrays.num_tokens, arrays.row_stride) == (TOKENS, HIDDEN)


def test_bf16_weights() -> None:
    check(expert_weights=np.zeros((TOKENS, TOP_K), BF16))


def test_flat_index_as_the_layers_return_it() -> None:
    assert check(expanded_idx_to_permuted_idx=np.zeros(TOKENS * TOP_K, np.int32)).num_tokens == 3


def test_rows_wider_than_what_is_read() -> None:
    wide = np.zeros((ROWS, HIDDEN + 24), BF16)
    assert check(gemm2_permuted=wide).row_stride == HIDDEN + 24
    assert check(gemm2_permuted=wide[:, :HIDDEN]).row_stride == HIDDEN + 24


def test_no_tokens_and_no_rows() -> None:
    arrays = check(
        gemm2_permuted=np.zeros((0, HIDDEN), BF16),
        expert_weights=np.zeros((0, TOP_K), np.float32),
        expanded_idx_to_permuted_idx=np.zeros((0, TOP_K), np.int32),
        output=np.zeros((0, HIDDEN), BF16),
    )
    assert arrays.num_tokens == 0


def misaligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Array that starts one element after a multiple of 16 bytes."""
    count = int(np.prod(shape))
    memory = np.zeros(count + 32, dtype)
    first = -(memory.ctypes.data // memory.itemsize) % (16 // memory.itemsize) + 1
    return memory[first : first + count].reshape(shape)


REFUSED = {
    "gemm2 kind": ({"gemm2_permuted": [[0]]}, "gemm2_permuted"),
    "gemm2 dtype": ({"gemm2_permuted": np.zeros((ROWS, HIDDEN), np.float32)}, "be bfloat16"),
    "gemm2 rank": ({"gemm2_permuted": np.zeros((1, ROWS, HIDDEN), BF16)}, r"be \(R, W\)"),
    "gemm2 width": (
        {"gemm2_permuted": np.zeros((ROWS, HIDDEN - 8), BF16)},
        "W >= hidden_size",
    ),
    "gemm2 columns": ({"gemm2_permuted": np.zeros((ROWS, 128), BF16)[:, ::2]}, "strides"),
    "gemm2 stride": ({"gemm2_permuted": np.zeros((ROWS, HIDDEN + 4), BF16)}, "a multiple of 8"),
    "gemm2 rows": ({"gemm2_permuted": np.zeros((0, HIDDEN), BF16)}, "have rows"),
    "gemm2 alignment": ({"gemm2_permuted": misaligned((ROWS, HIDDEN), BF16)}, "multiple of 16"),
    "weights shape": ({"expert_weights": np.zeros((TOKENS, 5), np.float32)}, r"\(T, top_k\)"),
    "weights tokens": ({"expert_weights": np.zeros((4, TOP_K), np.float32)}, r"\(3, 4\)"),
    "weights dtype": ({"expert_weights": np.zeros((TOKENS, TOP_K), np.float16)}, "float16"),
    "index dtype": (
        {"expanded_idx_to_permuted_idx": np.zeros((TOKENS, TOP_K), np.int64)},
        "be int32",
    ),
    "index top_k": (
        {"expanded_idx_to_permuted_idx": np.zeros((TOKENS, 5), np.int32)},
        "top_k = 4.*Initialize with",
    ),
    "index flat": ({"expanded_idx_to_permuted_idx": np.zeros(13, np.int32)}, "or flat"),
    "norm shape": ({"norm_weight": np.zeros(HIDDEN + 8, BF16)}, r"\(hidden_size,\) = \(64,\)"),
    "norm dtype": ({"norm_weight": np.zeros(HIDDEN, np.float32)}, "norm_weight must be bfloat16"),
    "output shape": ({"output": np.zeros((TOKENS, HIDDEN + 8), BF16)}, "output must be"),
    "output dtype": ({"output": np.zeros((TOKENS, HIDDEN), np.float32)}, "output must be bfloat16"),
    "output gaps": ({"output": np.zeros((TOKENS, 2 * HIDDEN), BF16)[:, :HIDDEN]}, "contiguous"),
    "output alignment": ({"output": misaligned((TOKENS, HIDDEN), BF16)}, "multiple of 16"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(**changes)
    assert "tensors do not satisfy the TP MoE finalize contract" in str(caught.value)


@pytest.mark.parametrize("name", ["gemm2_permuted", "norm_weight"])
def test_output_over_an_input(name: str) -> None:
    memory = np.zeros((ROWS, HIDDEN), BF16)
    shares = memory if name == "gemm2_permuted" else memory[1]
    with pytest.raises(ValueError, match="not overlap"):
        check(**{name: shares, "output": memory[:TOKENS]})


@pytest.mark.parametrize("name", ["expert_weights", "expanded_idx_to_permuted_idx"])
def test_output_over_what_the_slots_have(name: str) -> None:
    memory = np.zeros((TOKENS, HIDDEN), BF16)
    dtype = np.float32 if name == "expert_weights" else np.int32
    shares = memory.reshape(-1)[: TOKENS * TOP_K * 2].view(dtype).reshape(TOKENS, TOP_K)
    with pytest.raises(ValueError, match=f"output must not overlap {name}"):
        check(**{name: shares, "output": memory})


def test_output_over_the_last_of_rows_that_are_far_apart() -> None:
    memory = np.zeros((ROWS, 4 * HIDDEN), BF16)
    output = memory[ROWS - 2].reshape(4, HIDDEN)[:TOKENS]
    with pytest.raises(ValueError, match="output must not overlap gemm2_permuted"):
        check(gemm2_permuted=memory[:, :HIDDEN], output=output)
    check(gemm2_permuted=memory[: ROWS - 2, :HIDDEN], output=output)


def test_read_only_output() -> None:
    output = np.zeros((TOKENS, HIDDEN), BF16)
    output.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        check(output=output)


def test_rows_beyond_32_bits() -> None:
    row = np.zeros((1, HIDDEN), BF16)
    far = np.lib.stride_tricks.as_strided(row, (2**20, HIDDEN), (2 * 4096, 2))
    with pytest.raises(ValueError, match="span at most 2147483647 elements"):
        check(gemm2_permuted=far)


# --- scalars --------------------------------------------------------------------------------------


def test_scalars_of_numpy() -> None:
    options = check_options(np.float32(0.5), np.int64(1), np.True_)
    assert (options.eps, options.gain_center, options.weight_before_norm) == (0.5, 1.0, True)


@pytest.mark.parametrize("value", [None, "1", True, 1j])
def test_scalar_of_another_kind(value: object) -> None:
    for position in range(2):
        scalars: list[object] = [1e-6, 0.0]
        scalars[position] = value
        with pytest.raises(TypeError, match="real number"):
            check_options(*scalars, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scalar_that_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        check_options(value, 0.0, False)


@pytest.mark.parametrize("value", [1e39, -1e300, 10**400, np.float64(3.4028236e38)])
def test_scalar_beyond_fp32(value: object) -> None:
    with pytest.raises(ValueError, match="eps must be in the range of FP32"):
        check_options(value, 0.0, False)
    with pytest.raises(ValueError, match="gain_center must be in the range of FP32"):
        check_options(1e-6, value, False)


@pytest.mark.parametrize("value", [np.finfo(np.float32).max, -3.4028235e38])
def test_largest_scalars(value: float) -> None:
    layout = ParamLayout(("x", "f32"))
    layout.pack(check_options(value, 0.0, False).eps)


def test_order_of_the_weight_is_a_flag() -> None:
    with pytest.raises(TypeError, match="weight_before_norm must be True or False"):
        check_options(1e-6, 0.0, 1)


def test_there_is_one_backend() -> None:
    check_backend("op", "auto")
    with pytest.raises(ValueError, match='backend must be "auto"'):
        check_backend("op", "cutlass")


# --- sizes ----------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 4096,
    "top_k": 8,
    "max_tokens": 1024,
    "timeout_s": 30.0,
    "transport": "auto",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", 4100),
        ("hidden_size", 16392),
        ("top_k", 0),
        ("top_k", 33),
        ("max_tokens", 0),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("transport", "mpi"),
    ],
)
def test_size_out_of_range(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        check_sizes("init", **SIZES | {name: value})


@pytest.mark.parametrize("name", ["hidden_size", "top_k", "max_tokens"])
def test_size_of_another_kind(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        check_sizes("init", **SIZES | {name: 8.0})
