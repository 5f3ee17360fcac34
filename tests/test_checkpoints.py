"""FP4 checkpoints as arguments of the FP4 layers, in NumPy and torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.formats import dequantize_mxfp4, dequantize_nvfp4, mxfp4_quantize, nvfp4_quantize
from cupy_moe.fused_moe import prims_ts_fp4_block_scale_moe
from cupy_moe.testing.compare import assert_bit_equal, compare
from cupy_moe.types import ActivationType, WeightLayout
from cupy_moe.weights import (
    Nvfp4Projection,
    experts_from_gpt_oss,
    experts_from_nvfp4,
    quantize_activations_nvfp4,
    quantize_experts_mxfp4,
    stack_projections,
)
from tests.array_kinds import ArrayKind

TOKENS, HIDDEN, INTER, EXPERTS, TOP_K = 7, 192, 96, 3, 2
PADDED = 256, 128


@pytest.fixture
def model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    return {
        "up": normal(EXPERTS, INTER, HIDDEN),
        "gate": normal(EXPERTS, INTER, HIDDEN),
        "down": normal(EXPERTS, HIDDEN, INTER),
        "x": rng.standard_normal((TOKENS, HIDDEN), np.float32),
        "ids": rng.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32),
        "weights": rng.random((TOKENS, TOP_K), np.float32),
    }


def exact(
    m: dict[str, np.ndarray],
    x: np.ndarray,
    w: dict[str, np.ndarray],
    activation: ActivationType = ActivationType.Swiglu,
    **s: float,
) -> Any:
    """The layer without rounding; ``s``: alpha, beta and limit of its Swiglu."""
    alpha, beta, limit = s.get("alpha", 1.0), s.get("beta", 0.0), s.get("limit", np.inf)
    out = np.zeros((TOKENS, HIDDEN))
    for slot in np.ndindex(TOKENS, TOP_K):
        token, expert = slot[0], m["ids"][slot]
        up = np.clip(w["up"][expert].astype(float) @ x[token], -limit, limit)
        gate = np.minimum(w["gate"][expert].astype(float) @ x[token], limit)
        y = (up + beta) * gate / (1 + np.exp(-alpha * gate))
        if activation is ActivationType.Situ:
            y = np.tanh(up) * np.tanh(gate) / (1 + np.exp(-gate))
        out[token] += m["weights"][slot] * (w["down"][expert].astype(float) @ y)
    return out


def call(m: dict[str, np.ndarray], experts: Any, x: Any, scales: Any, **options: Any) -> np.ndarray:
    absent = ("routing_logits", "routing_bias", "gemm1_bias", "gemm2_bias", "n_group", "topk_group")
    scalars = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "routed_scaling_factor")
    arguments = dict.fromkeys(absent + scalars) | {
        "hidden_states": x,
        "hidden_states_scale": scales,
        **{f.name: getattr(experts, f.name) for f in fields(experts)},
        "topk_ids": m["ids"],
        "topk_weights": m["weights"],
        "routing_input_mode": 2,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "intermediate_size": PADDED[1],
        "local_expert_offset": 0,
        "local_num_experts": EXPERTS,
    }
    (out,) = prims_ts_fp4_block_scale_moe(**arguments | options)
    assert not out[:, HIDDEN:].any()
    return out[:, :HIDDEN]


def padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, PADDED[0] - x.shape[1])))


def gpt_oss(m: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    gate_up = np.stack([m["gate"], m["up"]], axis=2).reshape(EXPERTS, 2 * INTER, HIDDEN)
    stored = {}
    for name, w in (("gate_up", gate_up), ("down", m["down"])):
        codes, stored[f"{name}_scales"] = mxfp4_quantize(w)
        stored[f"{name}_blocks"] = codes.reshape(*w.shape[:2], -1, 16)
    return stored


def test_gpt_oss(model: dict[str, np.ndarray]) -> None:
    x = model["x"].astype(ml_dtypes.bfloat16)
    weights = {n: dequantize_mxfp4(*mxfp4_quantize(model[n])) for n in ("up", "gate", "down")}
    settings = {"alpha": 1.702, "beta": 1.0, "limit": 0.7}
    names = {"alpha": "gemm1_alpha", "beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}
    options = {names[n]: np.full(EXPERTS, v, np.float32) for n, v in settings.items()}
    expected = exact(model, x.astype(np.float64), weights, **settings)
    for block in (64, 128):
        experts = experts_from_gpt_oss(
            **gpt_oss(model),
            hidden_multiple=256,
            weight_layout=WeightLayout.BlockMajorK if block == 64 else WeightLayout.MajorK,
            block_major_k_bytes=block,
        )
        layout = int(WeightLayout.BlockMajorK if block == 64 else WeightLayout.MajorK)
        out = call(model, experts, padded(x), None, weight_layout=layout, **options)
        assert compare(out, expected).rel_l2 < 5e-3


def test_gpt_oss_bytes_are_those_of_the_quantizer(model: dict[str, np.ndarray]) -> None:
    rows = ((0, 0), (0, PADDED[1] - INTER), (0, PADDED[0] - HIDDEN))
    up, gate = (np.pad(model[n], rows) for n in ("up", "gate"))
    down = np.pad(model["down"], [rows[0], rows[2], rows[1]])
    quantized = quantize_experts_mxfp4(stack_projections(up_proj=up, gate_proj=gate), down)
    torch = ArrayKind("torch")
    stored = {name: torch.make(value) for name, value in gpt_oss(model).items()}
    loaded = experts_from_gpt_oss(**stored, hidden_multiple=256)
    for name in ("gemm1_weights", "gemm2_weights"):
        assert_bit_equal(torch.host(getattr(loaded, name)), getattr(quantized, name))


@pytest.mark.parametrize("activation", [ActivationType.Swiglu, ActivationType.Situ])
def test_nvfp4(model: dict[str, np.ndarray], activation: ActivationType) -> None:
    tokens, scales, g_x = quantize_activations_nvfp4(padded(model["x"]))
    gain = {"up": 500.0, "gate": 500.0 if activation is ActivationType.Situ else 800.0}
    gain["down"] = 650.0
    weights, projections = {}, {}
    for name in ("up", "gate", "down"):
        codes, factors = nvfp4_quantize(model[name], np.float32(gain[name]))
        weights[name] = dequantize_nvfp4(codes, factors) / gain[name]
        second = np.float32(1 / gain[name])
        projections[f"{name}_proj"] = Nvfp4Projection(codes, factors, second)
    experts = experts_from_nvfp4(
        **projections,
        activation_type=activation,
        input_scale=g_x,
        intermediate_scale=300.0,
        hidden_multiple=256,
    )
    x = dequantize_nvfp4(tokens, scales.view(np.uint8))[:, :HIDDEN] / np.asarray(g_x)
    out = call(model, experts, tokens, scales, activation_type=int(activation))
    assert compare(out, exact(model, x, weights, activation)).rel_l2 < 0.15  # y is E2M1


def test_what_does_not_fit_is_refused(model: dict[str, np.ndarray]) -> None:
    stored = gpt_oss(model)
    with pytest.raises(ValueError, match=r"experts_from_gpt_oss: blocks must be \(E, 2I, H/32, 16"):
        experts_from_gpt_oss(**stored | {"down_scales": stored["down_scales"][:, 1:]})
    with pytest.raises(ValueError, match="hidden_multiple must be a multiple of 128, got 64"):
        experts_from_gpt_oss(**stored, hidden_multiple=64)
    codes, scales = nvfp4_quantize(model["up"], np.float32(1.0))
    down = Nvfp4Projection(*nvfp4_quantize(model["down"], np.float32(1.0)), np.float32(1.0))
    one, two = (Nvfp4Projection(codes, scales, np.float32(v)) for v in (1.0, 2.0))
    options = {"input_scale": 1.0, "intermediate_scale": 1.0, "activation_type": 10}
    with pytest.raises(ValueError, match="equal weight_scale_2 for Situ"):
        experts_from_nvfp4(one, two, down, **options)
    with pytest.raises(ValueError, match=r"experts_from_nvfp4: weights must be \(E, I, H/2"):
        experts_from_nvfp4(one, one, one, **options)


@pytest.mark.parametrize("name", ["gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales"])
def test_gpt_oss_of_another_dtype_is_refused(model: dict[str, np.ndarray], name: str) -> None:
    stored = gpt_oss(model)
    typed = stored["gate_up_scales"].view(ml_dtypes.float8_e8m0fnu)
    experts_from_gpt_oss(**stored | {"gate_up_scales": typed})
    allowed = "uint8 or float8_e8m0fnu" if name.endswith("scales") else "uint8"
    for dtype in (np.int8, np.float32):
        pattern = f"gpt_oss: {name} must be {allowed}, .* got {np.dtype(dtype).name}"
        with pytest.raises(TypeError, match=pattern):
            experts_from_gpt_oss(**stored | {name: stored[name].astype(dtype)})


@pytest.mark.parametrize("field", ["weight", "weight_scale"])
@pytest.mark.parametrize("name", ["up_proj", "gate_proj", "down_proj"])
def test_nvfp4_of_another_dtype_is_refused(
    model: dict[str, np.ndarray], name: str, field: str
) -> None:
    projections = {
        f"{n}_proj": Nvfp4Projection(*nvfp4_quantize(model[n], np.float32(1.0)), np.float32(1.0))
        for n in ("up", "gate", "down")
    }
    options = {"input_scale": 1.0, "intermediate_scale": 1.0, "activation_type": 3}
    up = projections["up_proj"]
    typed = up._replace(weight_scale=up.weight_scale.view(ml_dtypes.float8_e4m3fn))
    experts_from_nvfp4(**projections | {"up_proj": typed}, **options)
    other = getattr(projections[name], field).astype(np.float32)
    refused = projections | {name: projections[name]._replace(**{field: other})}
    with pytest.raises(TypeError, match=rf"nvfp4: {name}\.{field} must be uint8.* got float32"):
        experts_from_nvfp4(**refused, **options)
