"""The FP4 reference against golden vectors, wrong variants it must tell apart, and edge cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cupy_moe.codecs import decode_bf16, encode_bf16, round_bf16
from cupy_moe.formats import mxfp8_quantize
from cupy_moe.reference import moe
from cupy_moe.reference.activation import FP4_ACTIVATIONS, ActivationScalars
from cupy_moe.reference.number_format import BF16_MXFP4, FP4_FORMATS, MXFP8_MXFP4, NVFP4, Quantized
from cupy_moe.reference.routing import build_permutation, decode_packed, select_experts
from cupy_moe.reference.stages import fc1, requantize
from cupy_moe.testing.compare import (
    FP4_BF16,
    FP4_MXFP8,
    FP4_NVFP4,
    Errors,
    assert_bit_equal,
    assert_within,
)
from cupy_moe.types import ActivationType, RoutingMethodType
from tests.moe_cases import STRATEGIES, Call, cases_of, compare_bits, fp4_call

TOLERANCES = {"nvfp4": FP4_NVFP4, "mxfp8": FP4_MXFP8, "bf16": FP4_BF16}
MODES = list(TOLERANCES)
CASES = {mode: cases_of(f"fp4_moe_{mode}.npz") for mode in MODES}
ALL = [(mode, name) for mode in MODES for name in CASES[mode]]
PARTITIONED = [(*case, strategy) for case, strategy in product(ALL, STRATEGIES)]

# The reference differs from the vectors in the order of float64 sums at most.
MIN_BIT_EQUAL = 0.999


def errors_of(mode: str, name: str, strategy: str, out: np.ndarray) -> Errors:
    return compare_bits(out, CASES[mode][name].arrays[f"{strategy}_out"])


def check(mode: str, name: str, strategy: str, out: np.ndarray) -> None:
    errors = errors_of(mode, name, strategy, out)
    print(
        f"{mode} {name} {strategy}: rel. L2 {errors.rel_l2:.2e}, worst element "
        f"{errors.max_abs_over_max_ref:.2e}, bit-equal {errors.bit_equal:.4f}"
    )
    assert_within(errors, TOLERANCES[mode], name)
    assert errors.bit_equal >= MIN_BIT_EQUAL


# --- golden vectors -------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "name", "strategy"), PARTITIONED)
def test_output(mode: str, name: str, strategy: str) -> None:
    check(mode, name, strategy, moe.fp4_moe(**fp4_call(mode, CASES[mode][name], strategy)))


@pytest.mark.parametrize(("mode", "name"), ALL)
def test_unpartitioned_output(mode: str, name: str) -> None:
    check(mode, name, "tp_n_tp_n", moe.fp4_moe(**fp4_call(mode, CASES[mode][name], None)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
def test_unfinalized_rows(mode: str, strategy: str) -> None:
    case = CASES[mode]["swiglu_unfinalized"]
    rows, mapping = moe.fp4_moe(**fp4_call(mode, case, strategy), do_finalize=False)
    live = case.arrays["live_u8"].astype(bool).ravel()
    np.testing.assert_array_equal(mapping >= 0, live)
    expected = case.arrays[f"{strategy}_z"].reshape(-1, rows.shape[1])[live]
    errors = compare_bits(rows[mapping[live]], expected)
    assert_within(errors, TOLERANCES[mode], case.name)
    assert errors.bit_equal >= MIN_BIT_EQUAL
    assert np.isnan(decode_bf16(np.delete(rows, mapping[live], axis=0))).all()


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize(("mode", "name"), ALL)
def test_intermediate(mode: str, name: str, strategy: str | None) -> None:
    case = CASES[mode][name]
    call = fp4_call(mode, case, strategy)
    routing = {k: call.pop(k) for k in ("ids", "weights", "num_experts", "local_expert_offset")}
    hidden = Quantized(call.pop("hidden"), call.pop("hidden_scales"))
    layer = moe.fp4_layer(**call)
    weights = routing.pop("weights")
    permutation = build_permutation(
        **routing, local_num_experts=layer.local_num_experts, tile=moe.DEFAULT_TILE
    )
    actual = requantize(layer, fc1(layer, hidden, permutation), permutation)
    live = permutation.expanded_to_permuted >= 0
    np.testing.assert_array_equal(live, case.arrays["live_u8"].ravel())
    actual = actual[permutation.expanded_to_permuted[live]]
    for codes, key in ((actual.codes, "inter_q"), (actual.scales, "inter_scale_u8")):
        if codes is not None:
            expected = case.arrays[key].reshape(weights.size, -1)[live]
            assert (codes == expected).sum() >= MIN_BIT_EQUAL * codes.size


@pytest.mark.parametrize("name", [n for n in CASES["nvfp4"] if n.startswith("logits_")])
@pytest.mark.parametrize("mode", MODES)
def test_routing_from_logits(mode: str, name: str) -> None:
    case = CASES[mode][name]
    p, call = case.parameters, fp4_call(mode, case, None)
    call["ids"], call["weights"] = select_experts(
        case.arrays["logits_f32"],
        case.arrays.get("bias_f32"),
        method=RoutingMethodType(p["routing_method_type"]),
        **{k: p[k] for k in ("top_k", "n_group", "topk_group", "routed_scaling_factor")},
        norm_topk_prob=p["norm_topk_prob"],
    )
    check(mode, name, "tp_n_tp_n", moe.fp4_moe(**call))


@pytest.mark.parametrize("mode", MODES)
def test_packed_words(mode: str) -> None:
    case = CASES[mode]["ep_invalid_duplicates"]
    call = fp4_call(mode, case, None)
    call["ids"], call["weights"] = decode_packed(case.arrays["topk_packed_i32"])
    check(mode, case.name, "tp_n_tp_n", moe.fp4_moe(**call))


# --- wrong variants are told apart ----------------------------------------------------------------


def is_rejected(mode: str, name: str, call: Call, strategy: str = "tp_n_tp_n") -> bool:
    errors = errors_of(mode, name, strategy, moe.fp4_moe(**call))
    try:
        assert_within(errors, TOLERANCES[mode], name)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("asked", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
def test_rounding_of_the_other_strategy_shows_in_the_bits_only(mode: str, asked: str) -> None:
    name = "swiglu_many"
    (other,) = set(STRATEGIES) - {asked}
    out = moe.fp4_moe(**fp4_call(mode, CASES[mode][name], other))
    errors = errors_of(mode, name, asked, out)
    assert errors.rel_l2 < TOLERANCES[mode].rel_l2
    assert errors.max_abs_over_max_ref < TOLERANCES[mode].max_abs_over_max_ref
    assert errors.bit_equal < 0.7
    with pytest.raises(AssertionError, match=r"bit_equal.*exceeded"):
        assert_within(errors, TOLERANCES[mode])


@pytest.mark.parametrize("name", ["swiglu_packed", "swiglu_alpha_beta_clamp", "geglu"])
@pytest.mark.parametrize("mode", MODES)
def test_exchanged_gate_and_up_is_rejected(mode: str, name: str) -> None:
    assert is_rejected(mode, name, fp4_call(mode, CASES[mode][name], None, swap_halves=True))


def quantize_with_scale_rounded_up(r: np.ndarray, _: np.ndarray) -> Quantized:
    return Quantized(*mxfp8_quantize(r))


def nvfp4_after_bf16(r: np.ndarray, c: np.ndarray) -> Quantized:
    return NVFP4.quantize(round_bf16(r), c)


def mxfp8_after_bf16(r: np.ndarray, c: np.ndarray) -> Quantized:
    return MXFP8_MXFP4.quantize(round_bf16(r), c)


def bf16_by_truncation(r: np.ndarray, _: np.ndarray) -> Quantized:
    return Quantized((r.view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("name", ["swiglu_packed", "swiglu_many", "situ_default"])
@pytest.mark.parametrize(
    ("number_format", "quantize"),
    [
        (MXFP8_MXFP4, quantize_with_scale_rounded_up),
        (MXFP8_MXFP4, mxfp8_after_bf16),
        (NVFP4, nvfp4_after_bf16),
        (BF16_MXFP4, bf16_by_truncation),
    ],
)
def test_wrong_requantization_is_rejected(
    number_format: object, quantize: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = number_format.name
    monkeypatch.setitem(FP4_FORMATS, mode, replace(number_format, quantize=quantize))
    assert is_rejected(mode, name, fp4_call(mode, CASES[mode][name], None))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("swiglu_alpha_beta_clamp", {"alpha": None}),
        ("swiglu_alpha_beta_clamp", {"beta": None}),
        ("swiglu_alpha_beta_clamp", {"clamp_limit": None}),
        ("situ_alpha_beta_clamp", {"alpha": None}),
        ("situ_alpha_beta_clamp", {"beta": None}),
        ("ep_invalid_duplicates", {"local_expert_offset": 4}),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_dropped_argument_is_rejected(mode: str, name: str, change: Call) -> None:
    assert is_rejected(mode, name, fp4_call(mode, CASES[mode][name], None) | change)


@pytest.mark.parametrize("mode", ["mxfp8", "bf16"])
def test_scalars_with_an_effect_in_mx_modes_are_rejected(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "scalars_are_ignored"
    monkeypatch.setitem(FP4_FORMATS, mode, replace(FP4_FORMATS[mode], uses_scales=True))
    assert is_rejected(mode, name, fp4_call(mode, CASES[mode][name], None))


# --- activations ----------------------------------------------------------------------------------


def test_swiglu_clamps_up_on_both_sides_and_gate_from_above() -> None:
    up, gate = np.array([20.0, -20.0, 20.0, -20.0]), np.array([20.0, 20.0, -20.0, -20.0])
    scalars = ActivationScalars(gate_scale=1.0, alpha=1.702, beta=1.0, limit=7.0)
    actual = FP4_ACTIVATIONS[ActivationType.Swiglu](up, gate, scalars)
    capped = np.array([7.0, 7.0, -20.0, -20.0])
    expected = np.array([8.0, -6.0, 8.0, -6.0]) * capped / (1 + np.exp(-1.702 * capped))
    np.testing.assert_allclose(actual, expected, rtol=1e-13)


def test_limits_and_swiglu_beta_are_raw_while_alpha_is_physical() -> None:
    raw, d = np.random.default_rng(0).standard_normal((2, 50)) * 1e4, 2.0**-13
    of_raw = ActivationScalars(gate_scale=d, alpha=1.5, beta=0.5 / d, limit=0.75 / d)
    of_physical = ActivationScalars(gate_scale=1.0, alpha=1.5, beta=0.5, limit=0.75)
    swiglu = FP4_ACTIVATIONS[ActivationType.Swiglu]
    np.testing.assert_array_equal(d * swiglu(*raw, of_raw), swiglu(*(d * raw), of_physical))
    situ = FP4_ACTIVATIONS[ActivationType.Situ]
    of_raw = replace(of_raw, beta=0.5)
    np.testing.assert_array_equal(situ(*raw, of_raw), situ(*(d * raw), of_physical))


@pytest.mark.parametrize("activation", FP4_ACTIVATIONS)
def test_nan_passes_the_clamp(activation: ActivationType) -> None:
    nan, one = np.array([np.nan]), np.array([1.0])
    scalars = ActivationScalars(limit=7.0)
    assert np.isnan(FP4_ACTIVATIONS[activation](nan, one, scalars)).all()
    assert np.isnan(FP4_ACTIVATIONS[activation](one, nan, scalars)).all()


# --- arguments and edge cases ---------------------------------------------------------------------


def many(mode: str, strategy: str | None = "tp_n_tp_k") -> Call:
    return fp4_call(mode, CASES[mode]["swiglu_many"], strategy)


@pytest.mark.parametrize("block_bytes", [64, 128])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_block_major_k(strategy: str | None, block_bytes: int) -> None:
    if strategy == "tp_n_tp_k":
        block_bytes = 64  # half of K is 64 bytes
    case = CASES["nvfp4"]["swiglu_packed"]
    blocked = fp4_call("nvfp4", case, strategy, block_major_k_bytes=block_bytes)
    assert blocked["gemm2"][0].ndim == 4
    assert_bit_equal(moe.fp4_moe(**blocked), moe.fp4_moe(**fp4_call("nvfp4", case, strategy)))


def test_mxfp8_scale_rows_may_be_padded_and_flat() -> None:
    call = many("mxfp8")
    expected = moe.fp4_moe(**call)
    scales = call["hidden_scales"]
    padded = np.pad(scales, ((0, 0), (0, 16 - scales.shape[1])), constant_values=0x7F)
    for variant in (padded, padded.ravel(), scales.ravel()):
        assert_bit_equal(moe.fp4_moe(**call | {"hidden_scales": variant}), expected)


def test_flat_weight_scales() -> None:
    call = many("nvfp4")
    expected = moe.fp4_moe(**call)
    for name in ("gemm1_scales", "gemm2_scales"):
        call[name] = [s.ravel() for s in call[name]]
    assert_bit_equal(moe.fp4_moe(**call), expected)


@pytest.mark.parametrize("mode", MODES)
def test_fp32_weights_are_rounded_in_nvfp4_only(mode: str) -> None:
    call = many(mode)
    call["weights"] = np.full_like(call["weights"], 1 / 3)
    rounded = call | {"weights": round_bf16(call["weights"])}
    assert np.array_equal(moe.fp4_moe(**call), moe.fp4_moe(**rounded)) == (mode == "nvfp4")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_zero_tokens_and_one(mode: str, num_tokens: int) -> None:
    call = many(mode)
    expected = moe.fp4_moe(**call)[:num_tokens]
    for name in ("hidden", "hidden_scales", "ids", "weights"):
        call[name] = None if call[name] is None else call[name][:num_tokens]
    assert_bit_equal(moe.fp4_moe(**call), expected)
    rows, mapping = moe.fp4_moe(**call, do_finalize=False)
    assert rows.shape == (2 * num_tokens * moe.DEFAULT_TILE, 256)
    assert mapping.shape == (2 * num_tokens,)


@pytest.mark.parametrize("dead_id", [-1, 4, -(2**31)])
@pytest.mark.parametrize("mode", MODES)
def test_rows_without_live_slots_are_zero_and_leave_others_alone(mode: str, dead_id: int) -> None:
    call = many(mode)
    expected = moe.fp4_moe(**call)
    call["ids"], call["weights"] = call["ids"].copy(), call["weights"].copy()
    call["ids"][::2], call["weights"][::2] = dead_id, np.nan
    out = moe.fp4_moe(**call)
    assert not out[::2].any()
    np.testing.assert_array_equal(out[1::2], expected[1::2])


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_tokens_stay_in_their_rows(mode: str, strategy: str | None) -> None:
    call = many(mode, strategy)
    expected = moe.fp4_moe(**call)
    where, bits = {
        "nvfp4": ("hidden_scales", 0x7F),  # NaN block scale
        "mxfp8": ("hidden", 0x7F),  # NaN element
        "bf16": ("hidden", 0x7F80),  # infinite element
    }[mode]
    call[where] = call[where].copy()
    call[where][3, 5] = bits
    out = moe.fp4_moe(**call)
    live = (call["ids"][3] >= 0).any()
    assert live
    assert (out[3] != expected[3]).any()
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), np.delete(expected, 3, axis=0))


def test_partial_sums_are_added_in_fp32_before_the_weight() -> None:
    case = CASES["bf16"]["swiglu_packed"]
    call = fp4_call("bf16", case, "tp_n_tp_k")
    partials = []
    for p in (0, 1):
        one = call | {"strategy": "tp_n_tp_k"}
        other = call["gemm2_scales"][1 - p]
        one["gemm2_scales"] = list(call["gemm2_scales"])
        one["gemm2_scales"][1 - p] = np.zeros_like(other)  # 2**-127: the other half vanishes
        rows, mapping = moe.fp4_moe(**one, do_finalize=False)
        partials.append(decode_bf16(rows[mapping]).reshape(*call["ids"].shape, -1))
    pair = partials[0] + partials[1]
    expected = np.einsum("tk,tkh->th", call["weights"].astype(float), pair.astype(float))
    assert_bit_equal(moe.fp4_moe(**call), encode_bf16(expected))
    rows, mapping = moe.fp4_moe(**call, do_finalize=False)
    assert_bit_equal(rows[mapping], encode_bf16(pair).reshape(-1, rows.shape[1]))


def test_output_scales_that_are_powers_of_two_apart_per_expert() -> None:
    call = many("nvfp4")
    powers = np.array([-2, 0, 1, 3])
    rows, mapping = moe.fp4_moe(**call, do_finalize=False)
    expected = (
        decode_bf16(rows[mapping]) * np.ldexp(np.float32(1), powers[call["ids"].ravel()])[:, None]
    )
    scaled = call | {"s2": np.ldexp(call["s2"], powers)}
    rows, mapping = moe.fp4_moe(**scaled, do_finalize=False)
    np.testing.assert_array_equal(decode_bf16(rows[mapping]), expected)
