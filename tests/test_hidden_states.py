"""Quantized hidden states: factors, forms, what does not fit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe import formats, weights
from tests.array_kinds import ARRAY_KINDS, ArrayKind
from tests.test_weights import E4M3, model


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_hidden_states_are_the_same_in_every_library(
    kind: ArrayKind, dtype: Any, name: str
) -> None:
    x = model(gated=True, dtype=dtype)[0]
    quantize = getattr(weights, f"quantize_activations_{name}")
    for ours, theirs in zip(quantize(kind.make(x)), quantize(x.astype(np.float32)), strict=True):
        on_host = kind.host(ours)
        assert on_host.dtype == theirs.dtype
        assert on_host.shape == theirs.shape
        np.testing.assert_array_equal(
            np.atleast_1d(on_host).view(np.uint8), np.atleast_1d(theirs).view(np.uint8)
        )


def test_fp8_hidden_states_take_the_factor_of_the_experts() -> None:
    x = model(gated=True)[0]
    q, g = weights.quantize_activations_fp8(x, 17.0)
    assert g == np.float32(17)
    np.testing.assert_array_equal(q.view(np.uint8), formats.encode_e4m3(x * np.float32(17)))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("factor", [0, -1.0, np.inf, np.nan, 10**400, np.ones(2, np.float32)])
def test_factors_of_hidden_states_are_positive_numbers(name: str, factor: Any) -> None:
    quantize = getattr(weights, f"quantize_activations_{name}")
    with pytest.raises(ValueError, match=f"quantize_activations_{name}: .*_scale must be"):
        quantize(model(gated=True)[0], factor)


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_hidden_states_come_out_contiguous_whatever_they_were(name: str, kind: ArrayKind) -> None:
    x = model(gated=True)[0]
    quantize = getattr(weights, f"quantize_activations_{name}")
    transposed = kind.make(np.ascontiguousarray(x.T)).T
    for ours, theirs in zip(quantize(transposed), quantize(x), strict=True):
        on_host = kind.host(ours)
        assert on_host.flags.c_contiguous
        assert on_host.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_codes_are_no_hidden_states(name: str) -> None:
    quantize = getattr(weights, f"quantize_activations_{name}")
    with pytest.raises(
        TypeError, match="x must be bfloat16, float16 or float32, got float8_e4m3fn"
    ):
        quantize(np.zeros((2, 32), E4M3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_bad_element_leaves_the_other_tokens_alone(name: str, bad: float) -> None:
    x = model(gated=True)[0]
    quantize = getattr(weights, f"quantize_activations_{name}")
    expected = quantize(x)
    assert np.abs(x[3]).max() < np.abs(x).max()
    x[3, 5] = bad
    q, *_, g = quantize(x)
    assert g == expected[-1]
    np.testing.assert_array_equal(
        np.delete(q.view(np.uint8), 3, 0), np.delete(expected[0].view(np.uint8), 3, 0)
    )


def test_nvfp4_hidden_states_take_a_static_global_scale() -> None:
    x = model(gated=True)[0]
    packed, scales, g = weights.quantize_activations_nvfp4(x, 17.0)
    assert g == np.float32(17)
    expected = formats.nvfp4_quantize(x, np.float32(17))
    np.testing.assert_array_equal(packed, expected[0])
    np.testing.assert_array_equal(scales.view(np.uint8), expected[1])
