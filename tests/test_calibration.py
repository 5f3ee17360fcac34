"""The intermediate scale chosen from calibration tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe import weights
from cupy_moe.reference.activation import FP8_ACTIVATIONS, ActivationScalars
from cupy_moe.types import ActivationType
from tests.array_kinds import ARRAY_KINDS, ArrayKind
from tests.test_weights import EXPERTS, TOKENS, halves, model


def swiglu_maxima(x: np.ndarray, w1: np.ndarray) -> np.ndarray:
    """Largest FC1 output of every token and expert, (T, E)."""
    h = FP8_ACTIVATIONS[ActivationType.Swiglu](
        *halves(x.astype(np.float64) @ w1.astype(np.float64).swapaxes(1, 2), True),
        ActivationScalars(),
    )
    return np.abs(h).max(axis=2).T


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("number_format", "largest"), [("fp8", 448), ("nvfp4", 448 * 6)])
def test_calibrated_scale_leaves_the_margin(
    kind: ArrayKind, number_format: Any, largest: float
) -> None:
    x, w1, _ = model(gated=True)
    c = weights.calibrate_intermediate_scale(
        kind.make(x),
        kind.make(w1),
        activation_type=ActivationType.Swiglu,
        number_format=number_format,
        margin=4.0,
    )
    maxima = swiglu_maxima(x, w1).max(axis=0)
    np.testing.assert_allclose(kind.host(c), largest / (4 * maxima), rtol=1e-4)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_calibration_follows_the_routing(kind: ArrayKind) -> None:
    x, w1, _ = model(gated=True)
    ids = np.full((TOKENS, 2), -1, np.int32)
    ids[:5, 1] = 0
    ids[5:, 0] = 2
    ids[7, 1] = EXPERTS  # somebody else's expert
    c = weights.calibrate_intermediate_scale(
        kind.make(x),
        kind.make(w1),
        activation_type=ActivationType.Swiglu,
        topk_ids=kind.make(ids),
        margin=1.0,
    )
    maxima = swiglu_maxima(x, w1)
    visited = 448 / np.array([maxima[:5, 0].max(), maxima[5:, 2].max()])
    expected = [visited[0], visited.min(), visited[1]]  # expert 1 sees no token
    np.testing.assert_allclose(kind.host(c), expected, rtol=1e-4)


def test_calibration_of_zeros_is_one() -> None:
    x, w1 = np.zeros((3, 32), np.float32), np.ones((2, 64, 32), np.float32)
    c = weights.calibrate_intermediate_scale(x, w1, activation_type=3)
    np.testing.assert_array_equal(c, [1, 1])


def test_calibration_survives_a_saturated_sigmoid(recwarn: pytest.WarningsRecorder) -> None:
    x, w1 = np.full((1, 32), -1e3, np.float32), np.ones((1, 64, 32), np.float32)
    c = weights.calibrate_intermediate_scale(x, w1, activation_type=3)
    assert np.isfinite(c).all()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margin": 0.5}, "margin must be at least 1 and finite, got 0.5"),
        ({"activation_type": 5}, "fp8 has no activation_type 5"),
        ({"activation_type": 6, "number_format": "nvfp4"}, "nvfp4 has no activation_type 6"),
        ({"number_format": "mxfp4"}, "number_format must be"),
        ({"x": np.zeros((0, 32), np.float32)}, "none of them empty"),
        ({"x": np.zeros((3, 16), np.float32)}, r"got \(3, 16\)"),
        ({"w1": np.zeros((2, 63, 32), np.float32)}, r"got .*\(2, 63, 32\)"),
        ({"topk_ids": np.zeros((4, 2), np.int32)}, r"\(3, top_k\), got int32 of shape \(4, 2\)"),
        ({"topk_ids": np.zeros((3, 2), np.float32)}, "got float32"),
        ({"x": np.full((3, 32), np.nan, np.float32)}, "not finite"),
    ],
)
def test_bad_calibration_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "x": np.ones((3, 32), np.float32),
        "w1": np.ones((2, 64, 32), np.float32),
        "activation_type": 3,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        weights.calibrate_intermediate_scale(arguments.pop("x"), arguments.pop("w1"), **arguments)
