"""The finalize reference against golden vectors, wrong variants it must tell apart, edge cases."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.codecs import decode_bf16, encode_bf16, round_bf16
from cupy_moe.reference.finalize import (
    finalize_terms,
    reduce_rows,
    tp_moe_finalize_rmsnorm,
    weighted_sum,
)
from cupy_moe.testing.compare import (
    FINALIZE,
    Errors,
    assert_bit_equal,
    assert_within,
    compare,
    finalize_element_bound,
)

DATA = Path(__file__).parent / "data"
HIDDEN = 4096
RANKS = (1, 2, 4, 8)
CASES = ("c0", "c1", "c2", "c3")
GOLDEN = [(ranks, name) for ranks in RANKS for name in CASES]
NORM = ("eps", "gain_center", "weight_before_norm")

# The reference differs from the vectors in the order of float64 sums at most.
MIN_BIT_EQUAL = 0.999


@cache
def golden_file(ranks: int) -> dict[str, np.ndarray]:
    with np.load(DATA / f"finalize_rmsnorm_p{ranks}.npz") as f:
        return dict(f)


class Case:
    """One golden case: arguments of the operation and what it must give."""

    def __init__(self, ranks: int, name: str) -> None:
        f = golden_file(ranks)
        (spec,) = (c for c in json.loads(str(f["cases"]))["cases"] if c["name"] == name)
        a = {k.removeprefix(f"{name}/"): v for k, v in f.items() if k.startswith(f"{name}/")}
        bits = a.get("weights_bf16_u16")
        self.gemm2 = [f[f"gemm2_rank{q}_bf16_u16"].copy() for q in range(ranks)]
        self.weights = a["weights_f32"] if bits is None else decode_bf16(bits)
        self.idx = list(a["idx_i32"].copy())
        self.norm_weight = f[f"norm_weight_{spec['norm_weight']}_bf16_u16"]
        self.norm = {key: spec[key] for key in NORM}
        self.out = a["out_bf16_u16"]
        self.abs_sum = a["abs_sum_bf16_u16"]
        self.rows_of_token0 = a.get("reduced_rows_token0_bf16_u16")
        self.pad_columns = spec["suggested_pad_columns"]

    def run(self, **norm: object) -> np.ndarray:
        return tp_moe_finalize_rmsnorm(
            self.gemm2, self.weights, self.idx, self.norm_weight, **self.norm | norm
        )

    def terms(self) -> np.ndarray:
        rows = reduce_rows(self.gemm2, self.idx, HIDDEN)
        return finalize_terms(rows, self.weights, self.norm_weight, **self.norm)

    def errors(self, out: np.ndarray) -> Errors:
        expected = self.out.view(ml_dtypes.bfloat16)
        bound = finalize_element_bound(expected, self.abs_sum.view(ml_dtypes.bfloat16))
        return compare(out.view(ml_dtypes.bfloat16), expected, element_bound=bound)

    def is_rejected(self, out: np.ndarray) -> bool:
        try:
            assert_within(self.errors(out), FINALIZE)
        except AssertionError:
            return True
        return False


# --- golden vectors -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "name"), GOLDEN)
def test_output(ranks: int, name: str) -> None:
    case = Case(ranks, name)
    errors = case.errors(case.run())
    print(
        f"p{ranks} {name}: rel. L2 {errors.rel_l2:.2e}, worst row {errors.max_row_rel_l2:.2e}, "
        f"element bound used {errors.element_share:.2f}, bit-equal {errors.bit_equal:.4f}"
    )
    assert_within(errors, FINALIZE)
    assert errors.bit_equal >= MIN_BIT_EQUAL


@pytest.mark.parametrize("ranks", RANKS)
def test_reduced_rows_are_bit_exact(ranks: int) -> None:
    case = Case(ranks, "c0")
    assert_bit_equal(reduce_rows(case.gemm2, case.idx, HIDDEN)[0], case.rows_of_token0)


@pytest.mark.parametrize(("ranks", "name"), GOLDEN)
def test_terms_measure_the_cancellation(ranks: int, name: str) -> None:
    case = Case(ranks, name)
    abs_sum = encode_bf16(np.abs(case.terms()).sum(axis=1))
    assert (abs_sum == case.abs_sum).mean() >= MIN_BIT_EQUAL


@pytest.mark.parametrize("name", CASES)
def test_one_partial_sum_per_expert_owner_is_within_tolerance(name: str) -> None:
    case = Case(4, name)
    partial = case.terms().reshape(-1, 4, 2, HIDDEN).astype(np.float32).sum(axis=2)
    assert_within(case.errors(encode_bf16(partial.sum(axis=1))), FINALIZE)


@pytest.mark.parametrize("ranks", RANKS)
def test_columns_beyond_the_norm_weight_are_not_read(ranks: int) -> None:
    case = Case(ranks, "c1")
    expected = case.run()
    case.gemm2 = [
        np.pad(g, ((0, 0), (0, case.pad_columns)), constant_values=0x7FC0) for g in case.gemm2
    ]
    assert_bit_equal(case.run(), expected)


# --- wrong variants are told apart ----------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_rounded_products_are_rejected(name: str) -> None:
    case = Case(2, name)
    out = encode_bf16(round_bf16(case.terms()).sum(axis=1))
    assert case.is_rejected(out)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_missed_rank_is_rejected(ranks: int) -> None:
    case = Case(ranks, "c0")
    case.idx[-1][:] = -1
    assert case.is_rejected(case.run())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("c0", {"weight_before_norm": True}),
        ("c1", {"weight_before_norm": False}),
        ("c2", {"gain_center": 0.0}),
        ("c3", {"gain_center": 0.0}),
        ("c3", {"eps": 1e-6}),
    ],
)
def test_wrong_norm_is_rejected(name: str, change: dict) -> None:
    case = Case(2, name)
    assert case.is_rejected(case.run(**change))


def test_norm_of_another_slot_is_rejected() -> None:
    case = Case(2, "c0")
    rows = reduce_rows(case.gemm2, case.idx, HIDDEN)
    own = finalize_terms(rows, case.weights, case.norm_weight, **case.norm)
    v = decode_bf16(rows).astype(float)
    mean_square = np.mean(v**2, axis=2, keepdims=True) + case.norm["eps"]
    exchanged = own * np.sqrt(mean_square / np.roll(mean_square, 1, axis=1))
    assert case.is_rejected(encode_bf16(exchanged.sum(axis=1)))


def test_row_zero_times_zero_would_leak_nan() -> None:
    case = Case(2, "c0")
    expected = case.run()
    # Rows that no index names, row 0 among them once its users are moved to a copy of it.
    for rows, idx in zip(case.gemm2, case.idx, strict=True):
        rows[-1], poison = rows[0], rows[-1].copy()
        idx[idx == 0] = len(rows) - 1
        rows[0] = poison
        assert np.isnan(decode_bf16(rows[0])).any()
    assert_bit_equal(case.run(), expected)


def test_running_sum_in_bf16_gives_other_rows() -> None:
    case = Case(8, "c0")
    expected = reduce_rows(case.gemm2, case.idx, HIDDEN)
    total = np.zeros(expected.shape, np.float32)
    for rows, idx in zip(case.gemm2, case.idx, strict=True):
        valid = (idx >= 0) & (idx < len(rows))
        total[valid] = round_bf16(total[valid] + decode_bf16(rows[idx[valid]]))
    assert (encode_bf16(total) != expected).any()


@pytest.mark.parametrize(
    ("values", "total"),
    [((2.0**24, 1.0, -(2.0**24)), 0.0), ((2.0**24, -(2.0**24), 1.0), 1.0)],
)
def test_ranks_are_added_in_order_in_fp32(values: tuple[float, ...], total: float) -> None:
    gemm2 = [encode_bf16(np.full((1, 1), value)) for value in values]
    rows = reduce_rows(gemm2, [np.zeros((1, 1), np.int32)] * 3, 1)
    assert decode_bf16(rows).item() == total


# --- indices --------------------------------------------------------------------------------------


def small(ranks: int, *, tokens: int = 3, slots: int = 2, hidden: int = 8, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    gemm2 = [encode_bf16(rng.standard_normal((5 + q, hidden))) for q in range(ranks)]
    idx = [rng.integers(0, 5, (tokens, slots), np.int32) for _ in range(ranks)]
    weights = rng.random((tokens, slots), np.float32)
    return gemm2, weights, idx, encode_bf16(np.ones(hidden))


PLAIN = {"eps": 1e-6, "gain_center": 0.0, "weight_before_norm": False}


@pytest.mark.parametrize("invalid", [-1, 5, 2**31 - 1, -(2**31)])
def test_slot_that_is_invalid_everywhere_contributes_nothing(invalid: int) -> None:
    gemm2, weights, idx, norm_weight = small(1)
    idx[0][:, 1] = invalid
    out = tp_moe_finalize_rmsnorm(gemm2, weights, idx, norm_weight, **PLAIN)
    first = tp_moe_finalize_rmsnorm(gemm2, weights[:, :1], [idx[0][:, :1]], norm_weight, **PLAIN)
    assert_bit_equal(out, first)
    idx[0][1] = invalid
    out = tp_moe_finalize_rmsnorm(gemm2, weights, idx, norm_weight, **PLAIN)
    assert not out[1].any()


def test_slot_that_is_invalid_on_one_rank_sums_the_others() -> None:
    gemm2, _, idx, _ = small(3)
    idx[1][:] = -1
    assert_bit_equal(reduce_rows(gemm2, idx, 8), reduce_rows(gemm2[::2], idx[::2], 8))


def test_each_rank_has_its_own_number_of_rows() -> None:
    gemm2, _, idx, _ = small(2)
    for i in idx:
        i[:] = 5  # beyond the 5 rows of rank 0, the last of rank 1
    assert_bit_equal(reduce_rows(gemm2, idx, 8), np.broadcast_to(gemm2[1][5], (3, 2, 8)).copy())


def test_negative_zero_becomes_zero() -> None:
    gemm2, weights, idx, norm_weight = small(2)
    for rows in gemm2:
        rows[:] = 0x8000
    assert not reduce_rows(gemm2, idx, 8).any()
    assert not reduce_rows(gemm2[:1], idx[:1], 8).any()
    assert not tp_moe_finalize_rmsnorm(gemm2, -weights, idx, norm_weight, **PLAIN).any()


def test_nan_in_a_selected_row_stays_with_its_tokens() -> None:
    gemm2, weights, idx, norm_weight = small(1)
    idx[0][:] = [[0, 1], [1, 2], [2, 0]]
    expected = tp_moe_finalize_rmsnorm(gemm2, weights, idx, norm_weight, **PLAIN)
    gemm2[0][0, 3] = 0x7FC0
    out = tp_moe_finalize_rmsnorm(gemm2, weights, idx, norm_weight, **PLAIN)
    assert np.isnan(decode_bf16(out[[0, 2]])).all()
    np.testing.assert_array_equal(out[1], expected[1])


@pytest.mark.parametrize("ranks", [1, 8])
def test_zero_tokens(ranks: int) -> None:
    gemm2, weights, idx, norm_weight = small(ranks, tokens=0)
    out = tp_moe_finalize_rmsnorm(gemm2, weights, idx, norm_weight, **PLAIN)
    assert (out.shape, out.dtype) == ((0, 8), np.uint16)


def test_norm_against_plain_loops() -> None:
    gemm2, weights, idx, _ = small(1)
    norm_weight = encode_bf16(np.linspace(-0.5, 0.5, 8))
    gain = decode_bf16(norm_weight).astype(float) + 1.0
    for before in (False, True):
        out = tp_moe_finalize_rmsnorm(
            gemm2, weights, idx, norm_weight, eps=0.5, gain_center=1.0, weight_before_norm=before
        )
        for t in range(3):
            total = np.zeros(8)
            for k in range(2):
                row = decode_bf16(gemm2[0][idx[0][t, k]]).astype(float)
                v = row * gain if before else row
                y = v / np.sqrt(sum(v**2) / 8 + 0.5) * (1 if before else gain)
                total += float(weights[t, k]) * y
            np.testing.assert_array_equal(out[t], encode_bf16(total))


# --- the weighted sum without a norm --------------------------------------------------------------


def test_weighted_sum_reads_live_rows_only() -> None:
    rows = np.array([[1, -2], [np.nan, np.nan], [4, 8]], np.float32)
    weights = np.array([[0.5, np.nan], [np.nan, np.nan], [0.25, -1]], np.float32)
    idx = np.array([0, -1, -1, -1, 2, 0], np.int32)
    out = weighted_sum(rows, weights, idx)
    np.testing.assert_array_equal(decode_bf16(out), [[0.5, -1], [0, 0], [0, 4]])
    assert not out[1].any()


def test_weighted_sum_rounds_once() -> None:
    rows = np.array([[1.0], [2.0**-8], [2.0**-8]], np.float32)
    out = weighted_sum(rows, np.ones((1, 3), np.float32), np.arange(3, dtype=np.int32))
    np.testing.assert_array_equal(decode_bf16(out), [[1 + 2.0**-7]])


def test_weighted_sum_has_no_negative_zero() -> None:
    rows = np.array([[-0.0], [0.0]], np.float32)
    out = weighted_sum(rows, np.array([[1, -1]], np.float32), np.arange(2, dtype=np.int32))
    np.testing.assert_array_equal(out, [[0]])
