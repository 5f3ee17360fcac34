"""Golden cases of the MoE operations as arguments of the reference, and small random layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupy_moe.codecs import decode_bf16, encode_e4m3
from cupy_moe.testing.compare import Errors, compare
from cupy_moe.testing.golden import GoldenCase, load_golden_cases
from cupy_moe.types import ActivationType, WeightLayout
from cupy_moe.weights import layouts

__all__ = [
    "DATA",
    "STRATEGIES",
    "Call",
    "cases_of",
    "compare_bits",
    "fp4_call",
    "fp8_call",
    "raw",
    "small_fp8_call",
    "widened_weights",
]

DATA = Path(__file__).parent / "data"
STRATEGIES = ("tp_n_tp_n", "tp_n_tp_k")

Call = dict[str, Any]


def raw(x: np.ndarray) -> np.ndarray:
    """Bytes of FP8 codes, 16-bit words of BF16."""
    return x.view({1: np.uint8, 2: np.uint16}[x.dtype.itemsize])


def compare_bits(out: np.ndarray, expected: np.ndarray) -> Errors:
    """Compare BF16 bits with BF16 values."""
    return compare(out.view(ml_dtypes.bfloat16), expected)


@cache
def cases_of(file: str) -> dict[str, GoldenCase]:
    """Golden cases of a file by name."""
    return {case.name: case for case in load_golden_cases(DATA / file)}


def widened_weights(case: GoldenCase) -> np.ndarray:
    """Routing weights in FP32."""
    a = case.arrays
    return a["weights_f32"] if "weights_f32" in a else decode_bf16(raw(a["weights"]))


def _routing(case: GoldenCase) -> Call:
    p = case.parameters
    return {
        "ids": case.arrays["ids_i32"],
        "weights": widened_weights(case),
        "activation": ActivationType(p["activation_type"]),
        "num_experts": p["num_experts"],
        "local_expert_offset": p["local_expert_offset"],
    }


def _scalars(case: GoldenCase) -> Call:
    return {name: case.arrays[f"{name}_f32"] for name in ("s1", "sgate", "s2")}


def fp8_call(case: GoldenCase, *, swap_halves: bool = False) -> Call:
    """Arguments of ``fp8_moe``; ``swap_halves`` prepares FC1 from [gate; up]."""
    p = case.parameters
    activation = ActivationType(p["activation_type"])
    rows = p["intermediate_size"] * (2 if activation.is_gated else 1)
    w1 = raw(case.weights["w1"])[:, :rows]
    if swap_halves:
        w1 = np.roll(w1, rows // 2, axis=1)
    return {
        "hidden": raw(case.arrays["x"]),
        "gemm1": layouts.prepare_gemm1_weights(w1, gated=activation.is_gated),
        "gemm2": layouts.prepare_gemm2_weights(raw(case.weights["w2"])),
        **_scalars(case),
        **_routing(case),
        "clamp_limit": case.arrays.get("clamp_limit_f32"),
        "scale_input": p["use_routing_scales_on_input"],
    }


# --- FP4 ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Matrix:
    """Logical FP4 weights (E, rows, K/2) with linear scales (E, rows, K/block)."""

    weights: np.ndarray
    scales: np.ndarray

    def take(self, rows: Any = slice(None), half_of_k: int | None = None) -> _Matrix:
        """Part of the rows, and the first or second half of K."""
        parts = [x[:, rows] for x in (self.weights, self.scales)]
        if half_of_k is not None:
            parts = [np.split(x, 2, axis=2)[half_of_k] for x in parts]
        return _Matrix(*parts)


def _shards(w1: _Matrix, w2: _Matrix, strategy: str | None) -> tuple[list[_Matrix], list[_Matrix]]:
    """Partitions of the logical matrices: what each of the two would prepare by itself."""
    if strategy is None:
        return [w1], [w2]
    rows = np.arange(w1.weights.shape[1]).reshape(2, 2, -1)  # half (up, gate), partition, row
    fc1 = [w1.take(rows[:, p].ravel()) for p in (0, 1)]
    if strategy == "tp_n_tp_k":
        return fc1, [w2.take(half_of_k=p) for p in (0, 1)]
    return fc1, [w2.take(r) for r in np.arange(w2.weights.shape[1]).reshape(2, -1)]


@cache
def _weight_set(mode: str) -> tuple[_Matrix, _Matrix]:
    with np.load(DATA / f"fp4_moe_{mode}.npz") as f:
        return tuple(_Matrix(f[f"{w}_fp4_u8"], f[f"{w}_scale_u8"]) for w in ("w1", "w2"))


def fp4_call(
    mode: str,
    case: GoldenCase,
    strategy: str | None,
    *,
    block_major_k_bytes: int = 0,
    swap_halves: bool = False,
) -> Call:
    """Arguments of ``fp4_moe``; ``strategy`` None is not partitioned, 0 block bytes is MajorK."""
    w1, w2 = _weight_set(mode)
    if swap_halves:
        w1 = w1.take(np.roll(np.arange(w1.weights.shape[1]), w1.weights.shape[1] // 2))
    fc1, fc2 = _shards(w1, w2, strategy)
    layout: Call = {}
    if block_major_k_bytes:
        layout = {
            "weight_layout": WeightLayout.BlockMajorK,
            "block_major_k_bytes": block_major_k_bytes,
        }
    a = case.arrays
    return {
        "hidden": raw(a["x"]) if "x" in a else a["x_fp4_u8"],
        "hidden_scales": a.get("x_scale_u8"),
        "gemm1": [layouts.prepare_gemm1_weights(m.weights, **layout) for m in fc1],
        "gemm1_scales": [layouts.prepare_gemm1_scales(m.scales) for m in fc1],
        "gemm2": [layouts.prepare_gemm2_weights(m.weights, **layout) for m in fc2],
        "gemm2_scales": [layouts.prepare_gemm2_scales(m.scales) for m in fc2],
        **_scalars(case),
        **_routing(case),
        "mode": mode,
        "strategy": strategy or "tp_n_tp_n",
        "alpha": a.get("alpha_f32"),
        "beta": a.get("beta_f32"),
        "clamp_limit": a.get("clamp_f32"),
    }


# --- small random FP8 layers ----------------------------------------------------------------------


def small_fp8_call(
    *, num_tokens: int = 12, top_k: int = 2, activation: ActivationType, seed: int = 0
) -> Call:
    """Arguments of ``fp8_moe``: 5 experts, hidden size 128, intermediate size 128."""
    rng = np.random.default_rng(seed)
    experts, size = 5, 128
    rows = size * (2 if activation.is_gated else 1)

    def codes(*shape: int) -> np.ndarray:
        return encode_e4m3(16 * rng.standard_normal(shape, np.float32))

    def scale(value: float) -> np.ndarray:
        return np.full(experts, value, np.float32)

    return {
        "hidden": codes(num_tokens, size),
        "gemm1": layouts.prepare_gemm1_weights(
            codes(experts, rows, size), gated=activation.is_gated
        ),
        "gemm2": layouts.prepare_gemm2_weights(codes(experts, size, size)),
        "s1": scale(0.01),
        "sgate": scale(5e-4),
        "s2": scale(1e-3),
        "ids": rng.random((num_tokens, experts)).argsort(axis=1)[:, :top_k].astype(np.int32),
        "weights": rng.random((num_tokens, top_k), np.float32),
        "activation": activation,
        "num_experts": experts,
        "local_expert_offset": 0,
    }
