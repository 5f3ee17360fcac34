"""The FP8 reference against golden vectors, wrong variants it must tell apart, and edge cases."""

from __future__ import annotations

from dataclasses import replace
from math import erf

import numpy as np
import pytest

from cupy_moe.codecs import decode_bf16, decode_e4m3, encode_bf16, encode_e4m3, round_bf16
from cupy_moe.reference import moe
from cupy_moe.reference.activation import FP8_ACTIVATIONS, ActivationScalars
from cupy_moe.reference.number_format import FP8, Quantized
from cupy_moe.reference.routing import build_permutation, decode_packed
from cupy_moe.reference.stages import fc1, requantize
from cupy_moe.testing.compare import (
    FP8_TIER_A,
    FP8_TIER_A_GEGLU,
    Tolerance,
    assert_bit_equal,
    assert_within,
)
from cupy_moe.testing.golden import GoldenCase
from cupy_moe.types import ActivationType
from tests.moe_cases import Call, cases_of, compare_bits, fp8_call, raw, small_fp8_call

CASES = cases_of("fp8_moe.npz")
UNFINALIZED = [name for name, case in CASES.items() if not case.parameters["do_finalize"]]
Swiglu = ActivationType.Swiglu

# The reference differs from the vectors in the order of float64 sums at most.
MIN_BIT_EQUAL = 0.999


def tolerance(case: GoldenCase) -> Tolerance:
    is_geglu = case.parameters["activation_type"] == ActivationType.Geglu
    return FP8_TIER_A_GEGLU if is_geglu else FP8_TIER_A


def check(name: str, out: np.ndarray, expected: np.ndarray) -> None:
    errors = compare_bits(out, expected)
    print(
        f"{name}: rel. L2 {errors.rel_l2:.2e}, worst element {errors.max_abs_over_max_ref:.2e}, "
        f"bit-equal {errors.bit_equal:.4f}"
    )
    assert_within(errors, tolerance(CASES[name]), name)


# --- golden vectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_output(name: str) -> None:
    case = CASES[name]
    out = moe.fp8_moe(**fp8_call(case))
    check(name, out, case.arrays["out"])
    assert compare_bits(out, case.arrays["out"]).bit_equal >= MIN_BIT_EQUAL


@pytest.mark.parametrize("tile", [8, 64])
@pytest.mark.parametrize("name", UNFINALIZED)
def test_unfinalized_rows(name: str, tile: int) -> None:
    case = CASES[name]
    rows, mapping = moe.fp8_moe(**fp8_call(case), do_finalize=False, tile=tile)
    live = case.arrays["live_u8"].astype(bool).ravel()
    np.testing.assert_array_equal(mapping >= 0, live)
    check(name, rows[mapping[live]], case.arrays["z"].reshape(-1, rows.shape[1])[live])
    unused = np.setdiff1d(np.arange(len(rows)), mapping)
    assert np.isnan(decode_bf16(rows[unused])).all()
    assert len(np.unique(mapping[live])) == live.sum()


@pytest.mark.parametrize("name", CASES)
def test_intermediate_codes(name: str) -> None:
    case, call = CASES[name], fp8_call(CASES[name])
    scalars = {k: call[k] for k in ("gemm1", "gemm2", "s1", "sgate", "s2")}
    layer = moe.fp8_layer(**scalars, activation=call["activation"], clamp_limit=call["clamp_limit"])
    permutation = build_permutation(
        call["ids"],
        num_experts=call["num_experts"],
        local_expert_offset=call["local_expert_offset"],
        local_num_experts=layer.local_num_experts,
        tile=8,
    )
    scales = round_bf16(call["weights"]).ravel() if call["scale_input"] else None
    result = fc1(layer, Quantized(call["hidden"]), permutation, scales)
    codes = requantize(layer, result, permutation).codes
    live = permutation.expanded_to_permuted >= 0
    expected = raw(case.arrays["q"]).reshape(live.size, -1)[live]
    actual = codes[permutation.expanded_to_permuted[live]]
    assert (actual == expected).sum() >= MIN_BIT_EQUAL * expected.size


def test_golden_prepared_weights() -> None:
    case = CASES["swiglu_many"]
    prepared = {f"gemm{i}": case.weights[f"w{i}_prepared_u8"] for i in (1, 2)}
    check(case.name, moe.fp8_moe(**fp8_call(case) | prepared), case.arrays["out"])


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if c.parameters["routing_input"] == "packed"]
)
def test_packed_words(name: str) -> None:
    case, call = CASES[name], fp8_call(CASES[name])
    call["ids"], call["weights"] = decode_packed(case.arrays["topk_packed_i32"])
    check(name, moe.fp8_moe(**call), case.arrays["out"])


# --- wrong variants are told apart ----------------------------------------------------------------


def is_rejected(name: str, call: Call) -> bool:
    case = CASES[name]
    errors = compare_bits(moe.fp8_moe(**call), case.arrays["out"])
    try:
        assert_within(errors, tolerance(case), name)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", ["swiglu_packed", "swiglu_many", "geglu", "swiglustep_limits"])
def test_exchanged_gate_and_up_is_rejected(name: str) -> None:
    assert is_rejected(name, fp8_call(CASES[name], swap_halves=True))


def quantize_after_bf16(r: np.ndarray, c: np.ndarray) -> Quantized:
    return Quantized(encode_e4m3(round_bf16(r * c)))


def quantize_by_truncation(r: np.ndarray, c: np.ndarray) -> Quantized:
    h = np.clip(r * c, -448, 448)
    codes = encode_e4m3(h)
    return Quantized(np.where(np.abs(decode_e4m3(codes)) > np.abs(h), codes - 1, codes))


@pytest.mark.parametrize("quantize", [quantize_after_bf16, quantize_by_truncation])
@pytest.mark.parametrize("name", ["swiglu_packed", "swiglu_many", "ep_invalid_duplicates"])
def test_wrong_rounding_of_the_intermediate_is_rejected(
    name: str, quantize: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "FP8", replace(FP8, quantize=quantize))
    assert is_rejected(name, fp8_call(CASES[name]))


def geglu_erf(up: np.ndarray, gate: np.ndarray, s: ActivationScalars) -> np.ndarray:
    x = s.gate_scale * gate
    return up * 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def geglu_quick(up: np.ndarray, gate: np.ndarray, s: ActivationScalars) -> np.ndarray:
    x = s.gate_scale * gate
    return up * x / (1 + np.exp(-1.702 * x))


@pytest.mark.parametrize(("gelu", "rejected"), [(geglu_erf, False), (geglu_quick, True)])
def test_gelu_forms(gelu: object, rejected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    activations = {**FP8_ACTIVATIONS, ActivationType.Geglu: gelu}
    monkeypatch.setattr(moe, "FP8", replace(FP8, activations=activations))
    assert is_rejected("geglu", fp8_call(CASES["geglu"])) == rejected


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama4_input_scale_packed", {"scale_input": False}),
        ("llama4_weight_at_end", {"scale_input": True}),
        ("swiglustep_limits", {"clamp_limit": None}),
        ("swiglustep_default_limit", {"activation": Swiglu}),
        ("ep_invalid_duplicates", {"local_expert_offset": 2}),
    ],
)
def test_wrong_arguments_are_rejected(name: str, change: Call) -> None:
    assert is_rejected(name, fp8_call(CASES[name]) | change)


# --- activations ----------------------------------------------------------------------------------

UP, GATE = np.array([[-3.0, 0.5, 2.0]]), np.array([[1.5, -2.0, 0.25]])
HALF = ActivationScalars(gate_scale=0.5)
SIGMOID = 1 / (1 + np.exp(-0.5 * GATE))
GELU = 0.25 * GATE * (1 + np.tanh(0.7978845608028654 * (0.5 * GATE + 0.044715 * 0.125 * GATE**3)))

CLOSED_FORMS = {
    Swiglu: UP * 0.5 * GATE * SIGMOID,
    ActivationType.Geglu: UP * GELU,
    ActivationType.Situ: np.tanh(0.5 * UP) * np.tanh(0.5 * GATE) * SIGMOID,
    ActivationType.Relu2: np.array([[0.0, 0.0625, 1.0]]),
    ActivationType.Identity: UP,
    ActivationType.Silu: 0.5 * UP / (1 + np.exp(-0.5 * UP)),
    ActivationType.SwigluStep: UP * 0.5 * GATE * SIGMOID,  # default limit: far away
}


def test_every_activation_has_a_closed_form_here() -> None:
    assert CLOSED_FORMS.keys() == FP8_ACTIVATIONS.keys()


@pytest.mark.parametrize("activation", CLOSED_FORMS)
def test_activation(activation: ActivationType) -> None:
    gate = GATE if activation.is_gated else UP
    actual = FP8_ACTIVATIONS[activation](UP, gate, HALF)
    np.testing.assert_allclose(actual, CLOSED_FORMS[activation], rtol=1e-13)


def test_swiglu_step_caps_the_gate_after_the_silu_and_only_from_above() -> None:
    up, gate = np.array([20.0, -20.0, 20.0, 2.0]), np.array([20.0, 20.0, -20.0, 1.0])
    actual = FP8_ACTIVATIONS[ActivationType.SwigluStep](
        up, gate, ActivationScalars(gate_scale=1.0, limit=7.0)
    )
    silu = gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(actual, [49.0, -49.0, 7 * silu[2], 2 * silu[3]], rtol=1e-13)


def test_swiglu_step_with_a_gate_scale_of_zero_is_zero() -> None:
    actual = FP8_ACTIVATIONS[ActivationType.SwigluStep](
        np.array([2.0, -3.0]), np.array([1.0, 1e30]), ActivationScalars(gate_scale=0.0)
    )
    np.testing.assert_array_equal(actual, 0.0)


# --- live and dead slots --------------------------------------------------------------------------


def test_all_ids_invalid_give_zero_rows() -> None:
    call = small_fp8_call(activation=Swiglu)
    call["ids"] = np.full_like(call["ids"], -1)
    call["weights"] = np.full_like(call["weights"], np.nan)
    assert not moe.fp8_moe(**call).any()
    _, mapping = moe.fp8_moe(**call, do_finalize=False)
    assert (mapping == -1).all()


@pytest.mark.parametrize("dead_id", [-1, 5, 2**31 - 1, -(2**31)])
def test_rows_without_live_slots_are_zero_and_leave_others_alone(dead_id: int) -> None:
    call = small_fp8_call(activation=Swiglu)
    expected = moe.fp8_moe(**call)
    call["ids"][::2] = dead_id
    call["weights"][::2] = np.nan
    call["hidden"][::2] = 0x7F
    before = call["ids"].copy()
    out = moe.fp8_moe(**call)
    assert not out[::2].any()
    np.testing.assert_array_equal(out[1::2], expected[1::2])
    np.testing.assert_array_equal(call["ids"], before)


def test_duplicates_count_twice() -> None:
    call = small_fp8_call(activation=Swiglu, num_tokens=3)
    call["ids"][:] = [[1, 1], [2, 2], [1, 1]]
    rows, mapping = moe.fp8_moe(**call, do_finalize=False)
    z = decode_bf16(rows[mapping.reshape(3, 2)]).astype(np.float64)
    np.testing.assert_array_equal(z[:, 0], z[:, 1])
    expected = z[:, 0] * call["weights"].astype(np.float64).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(moe.fp8_moe(**call), encode_bf16(expected))


@pytest.mark.parametrize("where", ["weight", "hidden"])
def test_nan_stays_in_its_row(where: str) -> None:
    call = small_fp8_call(activation=Swiglu)
    expected = moe.fp8_moe(**call)
    if where == "weight":
        call["weights"][3, 1] = np.nan
    else:
        call["hidden"][3, 17] = 0x7F
    out = moe.fp8_moe(**call)
    assert np.isnan(decode_bf16(out[3])).all()
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), np.delete(expected, 3, axis=0))


def test_experts_without_tokens_are_not_read() -> None:
    call = small_fp8_call(activation=Swiglu)
    call["ids"] %= 3
    expected = moe.fp8_moe(**call)
    for name in ("gemm1", "gemm2"):
        call[name][3:] = 0x7F
    for name in ("s1", "sgate", "s2"):
        call[name][3:] = np.nan
    np.testing.assert_array_equal(moe.fp8_moe(**call), expected)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("activation", FP8_ACTIVATIONS)
def test_zero_tokens_and_one(num_tokens: int, activation: ActivationType) -> None:
    full = small_fp8_call(activation=activation)
    call = full | {name: full[name][:num_tokens] for name in ("hidden", "ids", "weights")}
    out = moe.fp8_moe(**call)
    np.testing.assert_array_equal(out, moe.fp8_moe(**full)[:num_tokens])
    rows, mapping = moe.fp8_moe(**call, do_finalize=False)
    assert rows.shape == (2 * num_tokens * moe.DEFAULT_TILE, 128)
    assert mapping.shape == (2 * num_tokens,)
    assert (out.dtype, rows.dtype, mapping.dtype) == (np.uint16, np.uint16, np.int32)


@pytest.mark.parametrize("tile", [1, 16, 128])
def test_tile_changes_the_rows_only(tile: int) -> None:
    call = small_fp8_call(activation=Swiglu)
    assert_bit_equal(moe.fp8_moe(**call, tile=tile), moe.fp8_moe(**call, tile=8))


def test_expert_parallel_parts_add_up() -> None:
    call = small_fp8_call(activation=Swiglu, top_k=1)
    per_expert = ("gemm1", "gemm2", "s1", "sgate", "s2")
    parts = [
        moe.fp8_moe(**call | {n: call[n][a:b] for n in per_expert} | {"local_expert_offset": a})
        for a, b in ((0, 2), (2, 5))
    ]
    assert_bit_equal(parts[0] | parts[1], moe.fp8_moe(**call))
    assert not (parts[0] & parts[1]).any()


# --- scales ---------------------------------------------------------------------------------------


def test_input_scaling_is_f_of_half_x_not_half_f_of_x() -> None:
    call = small_fp8_call(activation=Swiglu, top_k=1)
    halved = encode_e4m3(decode_e4m3(call["hidden"]) * np.float32(0.5))
    exact = decode_e4m3(halved) == decode_e4m3(call["hidden"]) * np.float32(0.5)
    call["hidden"][~exact], halved[~exact] = 0, 0
    scaled = call | {"weights": np.full((12, 1), 0.5, np.float32), "scale_input": True}
    halved_call = call | {"hidden": halved, "weights": np.ones((12, 1), np.float32)}
    assert_bit_equal(moe.fp8_moe(**scaled), moe.fp8_moe(**halved_call))
    at_the_end = moe.fp8_moe(**scaled | {"scale_input": False})
    assert (at_the_end != moe.fp8_moe(**scaled)).any(axis=1).all()


def test_input_scale_is_rounded_to_bf16_and_not_applied_again() -> None:
    call = small_fp8_call(activation=Swiglu, top_k=1) | {"scale_input": True}
    rounded = call | {"weights": round_bf16(call["weights"])}
    assert (rounded["weights"] != call["weights"]).any()
    assert_bit_equal(moe.fp8_moe(**call), moe.fp8_moe(**rounded))
    rows, mapping = moe.fp8_moe(**call, do_finalize=False)
    assert_bit_equal(moe.fp8_moe(**call), rows[mapping])


def test_scales_that_are_powers_of_two_apart_cancel_against_the_weights() -> None:
    call = small_fp8_call(activation=Swiglu)
    exponents = np.arange(5) - 2
    for name in ("gemm1", "gemm2"):
        values = decode_e4m3(call[name])
        values[np.abs(values) < 0.0625] = 0  # halving twice stays exact
        call[name] = encode_e4m3(np.clip(values, -96, 96))  # as does doubling twice
    expected = moe.fp8_moe(**call)
    for name in ("gemm1", "gemm2"):
        factors = np.exp2(exponents).astype(np.float32)[:, None, None]
        call[name] = encode_e4m3(decode_e4m3(call[name]) * factors)
    for name in ("s1", "sgate", "s2"):
        call[name] = np.ldexp(call[name], -exponents)
    assert_bit_equal(moe.fp8_moe(**call), expected)


def test_tiny_and_large_scales_in_one_layer() -> None:
    call = small_fp8_call(activation=ActivationType.Identity, top_k=1)
    expected, _ = moe.fp8_moe(**call, do_finalize=False)
    powers = np.array([0, -13, -27, 5, 40])  # 1e-8 beside 1 and beyond
    call["s2"] = np.ldexp(call["s2"], powers)
    rows, mapping = moe.fp8_moe(**call, do_finalize=False)
    factors = np.ldexp(np.float32(1), powers[call["ids"]])
    np.testing.assert_array_equal(
        decode_bf16(rows[mapping]), decode_bf16(expected[mapping]) * factors
    )
