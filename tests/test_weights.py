"""Quantized expert arguments: they reproduce the model that they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe import formats, weights
from cupy_moe.reference.activation import FP4_ACTIVATIONS, FP8_ACTIVATIONS, ActivationScalars
from cupy_moe.types import ActivationType, WeightLayout
from cupy_moe.weights.layouts import (
    unprepare_gemm1_scales,
    unprepare_gemm1_weights,
    unprepare_gemm2_scales,
    unprepare_gemm2_weights,
)
from tests.array_kinds import ARRAY_KINDS, ArrayKind

E4M3 = ml_dtypes.float8_e4m3fn
DATA = Path(__file__).parent / "data"
EXPERTS, TOKENS, HIDDEN, INTERMEDIATE = 3, 24, 128, 256


def model(
    gated: bool, dtype: Any = np.float32, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
) -> tuple[np.ndarray, ...]:
    """Tokens, FC1 and FC2 weights whose magnitudes differ by powers of two between experts."""
    rng = np.random.default_rng(6)
    magnitude = (2.0 ** np.arange(-1, EXPERTS - 1))[:, None, None]
    rows = intermediate * (2 if gated else 1)
    x = rng.normal(size=(TOKENS, hidden))
    w1 = rng.normal(size=(EXPERTS, rows, hidden)) * hidden**-0.5 * magnitude
    w2 = rng.normal(size=(EXPERTS, hidden, intermediate)) * intermediate**-0.5 / magnitude
    return tuple(a.astype(np.float32).astype(dtype) for a in (x, w1, w2))


def halves(sums: np.ndarray, gated: bool) -> tuple[np.ndarray, ...]:
    return tuple(np.split(sums, 2, axis=-1)) if gated else (sums, sums)


def relative_errors(out: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """Relative L2 error of each expert."""
    return np.linalg.norm(out - ref, axis=(-2, -1)) / np.linalg.norm(ref, axis=(-2, -1))


def fp8_values(codes: Any) -> np.ndarray:
    return formats.decode_e4m3(np.asarray(codes).view(np.uint8)).astype(np.float64)


def inverse_amax(w: np.ndarray, largest: float) -> np.ndarray:
    """Quantization factor of each expert, (E, 1, 1)."""
    return largest / np.abs(w.astype(np.float64)).max(axis=(1, 2), keepdims=True)


@dataclass
class Quantized:
    """One quantized model: raw operand values, their factors, scale vectors, requantization."""

    activation_type: ActivationType
    raw: tuple[np.ndarray, np.ndarray, np.ndarray]  # x (T, H), W1 (E, M1, H), W2 (E, H, I)
    factors: tuple[Any, Any, Any]  # physical = raw / factor
    vectors: tuple[np.ndarray, np.ndarray, np.ndarray]  # s1, sg, s2
    requantize: Callable[[np.ndarray, float], np.ndarray]
    activations: Mapping[ActivationType, Callable[..., np.ndarray]]

    def physical(self, **parameters: float) -> np.ndarray:
        """Outputs (E, T, H) in float64 on dequantized operands, nothing rounded in between."""
        x, w1, w2 = (v / f for v, f in zip(self.raw, self.factors, strict=True))
        sums = halves(x @ w1.swapaxes(1, 2), self.activation_type.is_gated)
        h = self.activations[self.activation_type](*sums, ActivationScalars(**parameters))
        return h @ w2.swapaxes(1, 2)

    def operation(
        self, requantize: Callable[[np.ndarray, float], np.ndarray], **parameters: Any
    ) -> np.ndarray:
        """Outputs (E, T, H) by the operation's arithmetic on raw values and scale vectors."""
        x, w1, w2 = self.raw
        out = []
        for e, (s1, sg, s2) in enumerate(zip(*self.vectors, strict=True)):
            own = {key: float(np.broadcast_to(v, EXPERTS)[e]) for key, v in parameters.items()}
            scalars = ActivationScalars(float(sg), **own)
            sums = halves(x @ w1[e].T, self.activation_type.is_gated)
            r = self.activations[self.activation_type](*sums, scalars)
            out.append(float(s2) * requantize(r, float(s1)) @ w2[e].T)
        return np.stack(out)

    def check(self, parameters: dict[str, float], raw: set[str], rounding: float) -> None:
        """Without requantization both agree to FP32; with it they differ by its rounding only."""
        gate_scale = self.vectors[1]
        given = {
            name: weights.physical_to_raw(value, gate_scale) if name in raw else value
            for name, value in parameters.items()
        }
        physical = self.physical(**parameters)
        exact = self.operation(lambda r, s1: s1 * r, **given)
        assert (relative_errors(exact, physical) < 1e-5).all()
        rounded = self.operation(self.requantize, **given)
        assert (relative_errors(rounded, physical) < rounding).all()
        for vector in self.vectors:
            assert vector.shape == (EXPERTS,)
            assert vector.dtype == np.float32
            assert vector.flags.c_contiguous


# --- FP8 ------------------------------------------------------------------------------------------

FP8_PARAMETERS = [
    *(
        pytest.param(a, {}, id=a.name)
        for a in FP8_ACTIVATIONS
        if a is not ActivationType.SwigluStep
    ),
    pytest.param(ActivationType.SwigluStep, {"limit": 7.0}, id="SwigluStep"),
    pytest.param(ActivationType.SwigluStep, {"limit": 0.5}, id="SwigluStep-limit"),
]


@pytest.mark.parametrize(("activation_type", "parameters"), FP8_PARAMETERS)
def test_fp8_experts_reproduce_the_model(
    activation_type: ActivationType, parameters: dict[str, float]
) -> None:
    gated = activation_type.is_gated
    x, w1, w2 = model(gated)
    q, g = weights.quantize_activations_fp8(x)
    c = weights.calibrate_intermediate_scale(
        x, w1, activation_type=activation_type, clamp_limit=parameters.get("limit")
    )
    experts = weights.quantize_experts_fp8(
        w1, w2, activation_type=activation_type, input_scale=g, intermediate_scale=c
    )
    assert experts.gemm1_weights.dtype == experts.gemm2_weights.dtype == ml_dtypes.float8_e4m3fn
    quantized = Quantized(
        activation_type,
        raw=(
            fp8_values(q),
            fp8_values(unprepare_gemm1_weights(experts.gemm1_weights, gated=gated)),
            fp8_values(unprepare_gemm2_weights(experts.gemm2_weights)),
        ),
        factors=(float(g), inverse_amax(w1, 448), inverse_amax(w2, 448)),
        vectors=(
            experts.output1_scales_scalar,
            experts.output1_scales_gate_scalar,
            experts.output2_scales_scalar,
        ),
        requantize=lambda r, s1: fp8_values(formats.encode_e4m3((s1 * r).astype(np.float32))),
        activations=FP8_ACTIVATIONS,
    )
    for original, raw, factor in zip((x, w1, w2), quantized.raw, quantized.factors, strict=True):
        assert (relative_errors(raw / factor, original) < 0.04).all()
    quantized.check(parameters, raw={"limit"}, rounding=0.04)  # E4M3: 2.6% RMS


# --- FP4 ------------------------------------------------------------------------------------------

FP4_PARAMETERS = [
    pytest.param(ActivationType.Swiglu, {}, id="Swiglu"),
    pytest.param(
        ActivationType.Swiglu, {"alpha": 1.702, "beta": 1.0, "limit": 0.7}, id="Swiglu-limit"
    ),
    pytest.param(ActivationType.Geglu, {}, id="Geglu"),
    pytest.param(ActivationType.Situ, {"alpha": 1.5, "beta": 0.8, "limit": 0.7}, id="Situ"),
]
LAYOUTS = [WeightLayout.MajorK, WeightLayout.BlockMajorK]


def fp4_weights(
    experts: weights.Fp4ExpertWeights, layout: WeightLayout, dequantize: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Raw values of both matrices in logical order, block scales included."""
    w1 = unprepare_gemm1_weights(experts.gemm1_weights, weight_layout=layout)
    w2 = unprepare_gemm2_weights(experts.gemm2_weights, weight_layout=layout)
    s1 = unprepare_gemm1_scales(experts.gemm1_weights_scale)
    s2 = unprepare_gemm2_scales(experts.gemm2_weights_scale)
    return (
        dequantize(w1, s1.view(np.uint8)).astype(np.float64),
        dequantize(w2, s2.view(np.uint8)).astype(np.float64),
    )


def fp4_vectors(experts: weights.Fp4ExpertWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        experts.output1_scale_scalar,
        experts.output1_scale_gate_scalar,
        experts.output2_scale_scalar,
    )


def requantize_nvfp4(r: np.ndarray, s1: float) -> np.ndarray:
    codes, scales = formats.quantize_block_nvfp4(r.astype(np.float32), np.float32(s1))
    return formats.dequantize_nvfp4(formats.pack_fp4(codes), scales).astype(np.float64)


def requantize_mxfp8(r: np.ndarray, _: float) -> np.ndarray:
    q, scales = formats.quantize_block_mxfp8(r.astype(np.float32))
    return formats.dequantize_mxfp8(q, scales).astype(np.float64)


@pytest.mark.parametrize(("activation_type", "parameters"), FP4_PARAMETERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nvfp4_experts_reproduce_the_model(
    activation_type: ActivationType, parameters: dict[str, float], layout: WeightLayout
) -> None:
    x, w1, w2 = model(gated=True)
    packed, scales, g = weights.quantize_activations_nvfp4(x)
    calibration = {("clamp_limit" if k == "limit" else k): v for k, v in parameters.items()}
    c = weights.calibrate_intermediate_scale(
        x, w1, activation_type=activation_type, number_format="nvfp4", **calibration
    )
    experts = weights.quantize_experts_nvfp4(
        w1,
        w2,
        activation_type=activation_type,
        input_scale=g,
        intermediate_scale=c,
        weight_layout=layout,
        block_major_k_bytes=64,
    )
    assert experts.gemm1_weights_scale.dtype == ml_dtypes.float8_e4m3fn
    quantized = Quantized(
        activation_type,
        raw=(
            formats.dequantize_nvfp4(packed, scales.view(np.uint8)).astype(np.float64),
            *fp4_weights(experts, layout, formats.dequantize_nvfp4),
        ),
        factors=(float(g), inverse_amax(w1, 448 * 6), inverse_amax(w2, 448 * 6)),
        vectors=fp4_vectors(experts),
        requantize=requantize_nvfp4,
        activations=FP4_ACTIVATIONS,
    )
    for original, raw, factor in zip((x, w1, w2), quantized.raw, quantized.factors, strict=True):
        assert (relative_errors(raw / factor, original) < 0.12).all()
    in_raw_units = {"limit", "beta"} if activation_type is ActivationType.Swiglu else {"limit"}
    quantized.check(parameters, in_raw_units, rounding=0.12)  # E2M1 in blocks of 16: 9% RMS


@pytest.mark.parametrize(("activation_type", "parameters"), FP4_PARAMETERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_mxfp4_experts_reproduce_the_model(
    activation_type: ActivationType, parameters: dict[str, float], layout: WeightLayout
) -> None:
    x, w1, w2 = model(gated=True)
    q, scales = weights.quantize_activations_mxfp8(x)
    experts = weights.quantize_experts_mxfp4(w1, w2, weight_layout=layout, block_major_k_bytes=64)
    assert experts.gemm1_weights_scale.dtype == ml_dtypes.float8_e8m0fnu
    quantized = Quantized(
        activation_type,
        raw=(
            formats.dequantize_mxfp8(q.view(np.uint8), scales.view(np.uint8)).astype(np.float64),
            *fp4_weights(experts, layout, formats.dequantize_mxfp4),
        ),
        factors=(1, 1, 1),
        vectors=fp4_vectors(experts),
        requantize=requantize_mxfp8,
        activations=FP4_ACTIVATIONS,
    )
    np.testing.assert_array_equal(quantized.vectors, np.ones((3, EXPERTS)))
    for original, raw in zip((x, w1, w2), quantized.raw, strict=True):
        assert (relative_errors(raw, original) < 0.16).all()
    # E4M3 again, but the floor rule of the scale clips the top of a block by up to 1 / 8.
    quantized.check(parameters, raw={"limit"}, rounding=0.125)


# --- both: libraries, dtypes, errors --------------------------------------------------------------

QUANTIZERS = {
    "fp8": lambda w1, w2, scales: weights.quantize_experts_fp8(
        w1, w2, activation_type=ActivationType.Situ, **scales
    ),
    "nvfp4": lambda w1, w2, scales: weights.quantize_experts_nvfp4(
        w1, w2, activation_type=ActivationType.Situ, **scales
    ),
    "mxfp4": lambda w1, w2, scales: weights.quantize_experts_mxfp4(w1, w2),
}


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_experts_are_the_same_in_every_library(kind: ArrayKind, dtype: Any, name: str) -> None:
    _, w1, w2 = model(gated=True, dtype=dtype)
    scales = {"input_scale": np.float32(3), "intermediate_scale": np.float32([1, 2, 4])}
    expected = QUANTIZERS[name](w1.astype(np.float32), w2.astype(np.float32), scales)
    scales = {key: kind.make(value) for key, value in scales.items()}
    experts = QUANTIZERS[name](kind.make(w1), kind.make(w2), scales)
    for field in fields(expected):
        ours, theirs = kind.host(getattr(experts, field.name)), getattr(expected, field.name)
        assert ours.dtype == theirs.dtype, field.name
        assert ours.shape == theirs.shape, field.name
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), field.name)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
def test_stacked_projections_are_up_then_gate(kind: ArrayKind, dtype: Any) -> None:
    up, gate = (a.astype(dtype) for a in np.split(model(gated=True)[1], 2, axis=1))
    w1 = weights.stack_projections(gate_proj=kind.make(gate), up_proj=kind.make(up))
    np.testing.assert_array_equal(
        kind.host(w1).astype(np.float32), np.concatenate([up, gate], axis=1).astype(np.float32)
    )


def test_experts_of_zeros_quantize_to_zeros_with_finite_scales() -> None:
    zeros = np.zeros((1, 64, 32), np.float32), np.zeros((1, 32, 32), np.float32)
    scales = {"input_scale": 1.0, "intermediate_scale": 1.0}
    for quantize in QUANTIZERS.values():
        experts = quantize(*zeros, scales)
        for field in fields(experts):
            value = getattr(experts, field.name)
            assert np.isfinite(value.astype(np.float32)).all()
        assert not experts.gemm1_weights.view(np.uint8).any()


def with_one(value: float, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros, and at the end one other value."""
    x = np.zeros(shape, np.float32)
    x.reshape(-1)[-1] = value
    return x


def fp8(**changes: Any) -> Any:
    arguments = {
        "w1": np.zeros((2, 64, 32), np.float32),
        "w2": np.zeros((2, 32, 32), np.float32),
        "activation_type": 3,
        "input_scale": 1.0,
        "intermediate_scale": 1.0,
        **changes,
    }
    return weights.quantize_experts_fp8(arguments.pop("w1"), arguments.pop("w2"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation_type": 5}, ValueError, r"Swiglu \(3\).* got 5"),
        ({"activation_type": 6}, ValueError, r"w1 must be \(num_experts, intermediate_size"),
        ({"w1": np.zeros((2, 32, 32), np.float32)}, ValueError, r"2\*intermediate_size"),
        ({"w1": np.zeros((1, 64, 32), np.float32)}, ValueError, r"got \(1, 64, 32\)"),
        ({"w1": np.zeros((64, 32), np.float32)}, ValueError, r"got \(64, 32\)"),
        ({"input_scale": 0.0}, ValueError, "input_scale must be positive"),
        ({"intermediate_scale": np.float32([1, np.inf])}, ValueError, "intermediate_scale must be"),
        ({"intermediate_scale": np.ones(3, np.float32)}, ValueError, r"got shape \(3,\)"),
        ({"intermediate_scale": 10**400}, ValueError, "intermediate_scale must be positive"),
        ({"input_scale": True}, TypeError, "input_scale must be a number or an array, got bool"),
        ({"input_scale": "a"}, TypeError, "quantize_experts_fp8: input_scale: expected an array"),
        ({"w1": "weights"}, TypeError, "w1: expected an array"),
        (
            {"w1": np.zeros((2, 64, 32), E4M3)},
            TypeError,
            "w1 must be bfloat16.*float8_e4m3fn.*Codes",
        ),
        ({"w2": np.zeros((2, 32, 32), np.uint8)}, TypeError, "w2 must be bfloat16.* got uint8"),
        ({"w2": np.zeros((2, 32, 32), np.float64)}, TypeError, "w2 must be .* got float64"),
        ({"w1": with_one(np.nan, (2, 64, 32))}, ValueError, "w1 must be finite.*in expert 1"),
        ({"w2": with_one(np.inf, (2, 32, 32))}, ValueError, "w2 must be finite.*in expert 1"),
        (
            {"w1": np.zeros((2, 48, 32), np.float32), "w2": np.zeros((2, 32, 24), np.float32)},
            ValueError,
            "multiples of 32, got 32 and 24",
        ),
    ],
)
def test_bad_expert_arguments_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fp8(**changes)


def test_nvfp4_refuses_activations_without_a_gate() -> None:
    w1, w2 = np.zeros((1, 64, 32), np.float32), np.zeros((1, 32, 32), np.float32)
    with pytest.raises(ValueError, match=r"Situ \(10\), got 6"):
        weights.quantize_experts_nvfp4(
            w1, w2, activation_type=6, input_scale=1.0, intermediate_scale=1.0
        )


def test_stacking_refuses_different_shapes() -> None:
    up, gate = np.zeros((1, 4, 8), np.float32), np.zeros((1, 8, 4), np.float32)
    with pytest.raises(ValueError, match="one shape"):
        weights.stack_projections(up_proj=up, gate_proj=gate)
