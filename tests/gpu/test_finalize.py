"""The finalize kernel against an exact model of its FP32 sums."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.formats import decode_bf16, encode_bf16
from cupy_moe.kernels.finalize import FinalizeConfig, bind_finalize
from cupy_moe.runtime.jit import load
from cupy_moe.runtime.launch import enqueue

pytestmark = pytest.mark.gpu

BF16_NAN = 0x7FC1
GUARD = 16


def fused_multiply_add(weight: np.ndarray, z: np.ndarray, total: np.ndarray) -> np.ndarray:
    """FP32 ``weight * z + total``, rounded once: FP64 is exact for the values drawn here."""
    exact = weight.astype(np.float64) * z.astype(np.float64) + total.astype(np.float64)
    return exact.astype(np.float32)


def model(z: np.ndarray, index: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """BF16 bits of the sum in slot order, (T, H), from rows (R, H) of BF16 bits."""
    total = np.zeros((index.shape[0], z.shape[1]), np.float32)
    for k in range(index.shape[1]):
        live = index[:, k] >= 0
        rows = decode_bf16(z[index[live, k]])
        scale = np.ones(live.sum(), np.float32) if weights is None else weights[live, k]
        total[live] = fused_multiply_add(scale[:, None], rows, total[live])
    return encode_bf16(total)


def finalize(
    z: np.ndarray, index: np.ndarray, weights: np.ndarray | None, weights_are_f32: bool
) -> np.ndarray:
    import cupy

    num_tokens, top_k = index.shape
    rows, slots = cupy.asarray(z), cupy.asarray(index.astype(np.int32))
    scale: Any = None
    if weights is not None:
        scale = cupy.asarray(weights if weights_are_f32 else encode_bf16(weights))
    out = cupy.full((num_tokens * z.shape[1] + GUARD,), 0xABCD, np.uint16)
    config = FinalizeConfig()
    bound = bind_finalize(
        load(config.spec(), 0),
        config,
        num_tokens=num_tokens,
        gemm2_output=rows.data.ptr,
        partial_output=0,
        expanded_to_permuted=slots.data.ptr,
        expert_weights=0 if scale is None else scale.data.ptr,
        output=out.data.ptr,
        hidden_size=z.shape[1],
        top_k=top_k,
        weights_are_f32=weights_are_f32,
        stream=cupy.cuda.get_current_stream().ptr,
        pdl=False,
    )
    enqueue([bound])
    host = cupy.asnumpy(out)
    assert (host[-GUARD:] == 0xABCD).all()
    return host[:-GUARD].reshape(num_tokens, z.shape[1])


def draw(
    num_tokens: int, top_k: int, hidden: int, *, dead: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in random places among NaN rows; weights are NaN where a slot has no row."""
    rng = np.random.default_rng(num_tokens + 7 * top_k + hidden)
    size = num_tokens * top_k
    places = rng.permutation(size + 5)[:size].reshape(num_tokens, top_k)
    index = np.where(rng.random((num_tokens, top_k)) < dead, -1, places)
    z = np.full((size + 5, hidden), BF16_NAN, np.uint16)
    live = index[index >= 0]
    z[live] = encode_bf16(rng.standard_normal((live.size, hidden)).astype(np.float32))
    weights = rng.random((num_tokens, top_k), np.float32).astype(ml_dtypes.bfloat16)
    return z, index, np.where(index >= 0, weights.astype(np.float32), np.float32(np.nan))


@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 9, 16, 22])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 128), (3, 1032), (33, 4096), (257, 8)])
def test_bits(num_tokens: int, hidden: int, top_k: int) -> None:
    for dead in (0.0, 0.4, 1.0):
        z, index, weights = draw(num_tokens, top_k, hidden, dead=dead)
        for f32 in (False, True):
            out = finalize(z, index, weights, f32)
            np.testing.assert_array_equal(out, model(z, index, weights))
        np.testing.assert_array_equal(finalize(z, index, None, False), model(z, index, None))


def test_a_token_without_rows_is_positive_zero() -> None:
    z, index, weights = draw(4, 8, 256, dead=1.0)
    np.testing.assert_array_equal(finalize(z, index, weights, True), 0)


def test_negative_zero_products_sum_to_positive_zero() -> None:
    z = np.full((2, 64), 0x8000, np.uint16)
    out = finalize(z, np.array([[0, 1]]), np.ones((1, 2), np.float32), True)
    np.testing.assert_array_equal(out, 0)


def test_nan_and_infinity_of_live_rows_arrive() -> None:
    z = encode_bf16(np.ones((2, 64), np.float32))
    z[0, 3], z[1, 5] = BF16_NAN, 0x7F80
    out = decode_bf16(finalize(z, np.array([[0, 1]]), np.ones((1, 2), np.float32), False))
    assert np.isnan(out[0, 3])
    assert np.isposinf(out[0, 5])
    assert (np.delete(out[0], [3, 5]) == 2).all()


def test_rows_beyond_two_to_the_31_elements() -> None:
    import cupy

    hidden, num_rows = 4096, (1 << 31) // 4096 + 3
    z = cupy.zeros((num_rows, hidden), np.uint16)
    z[-1] = 0x3F80
    index = cupy.asarray(np.array([[num_rows - 1]], np.int32))
    out = cupy.zeros((1, hidden), np.uint16)
    config = FinalizeConfig()
    bound = bind_finalize(
        load(config.spec(), 0),
        config,
        num_tokens=1,
        gemm2_output=z.data.ptr,
        partial_output=0,
        expanded_to_permuted=index.data.ptr,
        expert_weights=0,
        output=out.data.ptr,
        hidden_size=hidden,
        top_k=1,
        weights_are_f32=False,
        stream=cupy.cuda.get_current_stream().ptr,
        pdl=False,
    )
    enqueue([bound])
    assert (out == 0x3F80).all()
