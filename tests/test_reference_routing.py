"""Reference routing against golden vectors and an independent selection, and edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupy_moe.codecs import encode_bf16, round_bf16
from cupy_moe.reference import routing
from cupy_moe.reference.routing import (
    build_permutation,
    decode_packed,
    select_experts,
    sigmoid,
)
from cupy_moe.types import RoutingMethodType as Method
from tests.routing_problems import (
    BIASED,
    GOLDEN,
    GOLDEN_CASES,
    METHODS,
    Problem,
    draw,
    golden,
    grouped_problems,
    keys,
    limit_to_groups,
    problem_id,
    problems,
    rounded_bias,
)

MIN_BIT_EQUAL = 0.99
UNGROUPED = [p for p in problems() if p.num_experts <= 256]


def select(
    problem: Problem, logits: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    return select_experts(
        logits,
        bias,
        method=problem.routing_method,
        top_k=problem.top_k,
        n_group=problem.num_groups,
        topk_group=problem.topk_group,
        routed_scaling_factor=problem.routed_scaling_factor,
        norm_topk_prob=problem.norm_topk_prob,
    )


def of_method(method: Method, logits: object, bias: object = None, **options: object) -> tuple:
    logits = np.asarray(logits, np.float32)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, np.float32), logits.shape[1:])
    return select_experts(logits, bias, method=method, **options)


def assert_weights(actual: np.ndarray, expected: np.ndarray) -> None:
    """BF16 values within one BF16 step, nearly all equal."""
    close = np.abs(actual - expected) <= 2.0**-7 * np.abs(expected) + 1e-30
    assert close.all()
    assert (actual == expected).mean() >= MIN_BIT_EQUAL
    np.testing.assert_array_equal(actual, round_bf16(actual))


# --- golden vectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_selection(name: str) -> None:
    problem, logits, bias, ids, weight_bits = golden(name)
    actual_ids, weights = select(problem, logits, bias)
    np.testing.assert_array_equal(actual_ids, ids)
    equal = encode_bf16(weights) == weight_bits
    print(f"{name}: ids exact, weights bit-equal {equal.mean():.4f}")
    assert equal.all()


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_permutation(name: str) -> None:
    case = GOLDEN_CASES[name]
    sizes = ("num_experts", "local_expert_offset", "local_num_experts", "tile")
    permutation = build_permutation(
        GOLDEN[f"{name}/ids_i32"], **{size: case[size] for size in sizes}
    )
    np.testing.assert_array_equal(permutation.counts, GOLDEN[f"{name}/count_i32"])
    np.testing.assert_array_equal(permutation.expanded_to_permuted, GOLDEN[f"{name}/map_i32"])
    assert permutation.num_padded_rows == case["total_padded"]
    assert permutation.num_padded_rows <= permutation.capacity


# --- an independent selection, one token at a time ------------------------------------------------


def expected_weights(problem: Problem, x: list[float]) -> list[float]:
    """Weights of the selected logits ``x`` in FP64 (Default needs all logits, not here)."""
    sigmoids = [0.5 * math.tanh(0.5 * v) + 0.5 for v in x]
    method, total = problem.routing_method, sum(sigmoids)
    if method in BIASED:
        return [s * problem.routed_scaling_factor / (total + 1e-20) for s in sigmoids]
    if method is Method.SigmoidRenorm and problem.norm_topk_prob:
        return [s / max(total, 1e-20) for s in sigmoids]
    if method in (Method.Renormalize, Method.RenormalizeNaive):
        exponentials = [math.exp(v - max(x)) for v in x]
        return [e / sum(exponentials) for e in exponentials]
    return x if method is Method.TopK else sigmoids


@pytest.mark.parametrize("problem", [*UNGROUPED, *grouped_problems()], ids=problem_id)
def test_selection_of_random_logits(problem: Problem) -> None:
    logits, bias = draw(problem, seed=1)
    ids, weights = select(problem, logits, bias)
    scores = keys(problem, logits, rounded_bias(problem, bias))
    if problem.is_grouped:
        scores, _ = limit_to_groups(problem, scores)
    expected = np.array(
        [sorted(range(problem.num_experts), key=lambda e: (-s[e], e)) for s in scores]
    )[:, : problem.top_k]
    np.testing.assert_array_equal(ids, expected)
    if problem.routing_method is Method.Default:
        wanted = np.take_along_axis(scores, expected, axis=1)
    else:
        chosen = np.take_along_axis(logits, expected, axis=1).astype(float)
        wanted = np.array([expected_weights(problem, list(x)) for x in chosen])
    assert_weights(weights, round_bf16(wanted))


# --- the sigmoid ----------------------------------------------------------------------------------


def test_sigmoid_is_the_tanh_form_in_fp32() -> None:
    x = np.linspace(-30, 30, 4001, dtype=np.float32)
    y = sigmoid(x)
    tanh = np.tanh(x.astype(float) / 2).astype(np.float32)
    np.testing.assert_array_equal(y, np.float32(0.5) * tanh + np.float32(0.5), strict=True)
    np.testing.assert_allclose(y, 1 / (1 + np.exp(-x.astype(float))), atol=2.0**-24)
    assert (np.diff(y) >= 0).all()
    assert (y[x > 18] == 1).all()
    assert (y[x < -18.1] == 0).all()


def test_sigmoid_is_not_the_exponential_form() -> None:
    x = np.linspace(-16, -11, 101, dtype=np.float32)
    exact = 1 / (1 + np.exp(-x.astype(float)))
    assert (np.abs(sigmoid(x) / exact - 1) > 1e-3).mean() > 0.5


# --- ties and extremes ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_equal_logits_go_to_the_smallest_ids(method: Method) -> None:
    top_k = 1 if method is Method.Llama4 else 4
    ids, weights = of_method(method, np.full((3, 8), 0.5), top_k=top_k)
    np.testing.assert_array_equal(ids, np.tile(np.arange(top_k), (3, 1)))
    assert (weights == weights[0, 0]).all()


def test_equal_groups_go_to_the_smallest_ids() -> None:
    options = {"top_k": 4, "n_group": 4, "topk_group": 2}
    ids, _ = of_method(Method.DeepSeekV3, np.zeros((1, 32)), **options)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]])


def test_negative_zero_sorts_below_zero() -> None:
    ids, _ = of_method(Method.TopK, [[-0.0, 0.0, -0.0, 0.0]], top_k=4)
    np.testing.assert_array_equal(ids, [[1, 3, 0, 2]])


@pytest.mark.parametrize("method", [Method.Sigmoid, Method.SigmoidRenorm])
def test_saturated_sigmoids_tie_where_logits_do_not(method: Method) -> None:
    logits = [[20.0, 40.0, 30.0, 0.0]]
    np.testing.assert_array_equal(of_method(method, logits, top_k=3)[0], [[0, 1, 2]])
    np.testing.assert_array_equal(of_method(Method.TopKSigmoid, logits, top_k=3)[0], [[1, 2, 0]])


def test_underflowing_softmax_ties() -> None:
    ids, weights = of_method(Method.Default, [[-500.0, 0.0, -400.0]], top_k=3)
    np.testing.assert_array_equal(ids, [[1, 0, 2]])
    np.testing.assert_array_equal(weights, [[1, 0, 0]])


@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2}])
def test_small_sigmoids_under_a_large_bias(groups: dict) -> None:
    rng = np.random.default_rng(0)
    logits = rng.uniform(-20, -18, (64, 32)).astype(np.float32)
    bias = 12 + rng.permutation(32).astype(np.float32) / 8
    ids, weights = of_method(Method.DeepSeekV3, logits, bias, top_k=4, **groups)
    score = np.take_along_axis(sigmoid(logits), ids, axis=1)
    total = score.sum(axis=1, keepdims=True) + np.float32(1e-20)
    np.testing.assert_array_equal(weights, round_bf16(score / total))
    biased = np.take_along_axis(np.broadcast_to(bias, logits.shape), ids, axis=1)
    recovered = (score + biased) - biased  # loses the sigmoid altogether
    assert not recovered.any()
    assert score.any()


@pytest.mark.parametrize("method", [*BIASED, Method.SigmoidRenorm])
def test_sigmoids_that_all_underflow_give_zero_weights(method: Method) -> None:
    ids, weights = of_method(method, np.full((2, 8), -60.0), top_k=3, routed_scaling_factor=2.5)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))


def test_negative_biased_scores_keep_other_groups_out() -> None:
    logits = np.zeros((1, 16), np.float32)
    bias = np.full(16, -5.0)
    bias[8:12] = -1.0  # group 2 of 4
    options = {"top_k": 4, "n_group": 4, "topk_group": 1}
    ids, weights = of_method(Method.DeepSeekV3, logits, bias, **options)
    np.testing.assert_array_equal(ids, [[8, 9, 10, 11]])
    np.testing.assert_array_equal(weights, [[0.25] * 4])


def test_group_score_is_the_sum_of_the_two_largest() -> None:
    bias = np.array([9, 0, 0, 0, 5, 5, 0, 0], np.float32)
    options = {"top_k": 2, "n_group": 2, "topk_group": 1}
    ids, _ = of_method(Method.DeepSeekV3, np.zeros((1, 8)), bias, **options)
    np.testing.assert_array_equal(ids, [[4, 5]])


def test_bias_is_rounded_with_groups_only() -> None:
    bias = np.zeros(8, np.float32)
    bias[:2] = 1.0, 1.0 + 2.0**-12  # equal in BF16
    options = {"top_k": 2, "topk_group": 1}
    ids, _ = of_method(Method.DeepSeekV3, np.zeros((1, 8)), bias, n_group=None, **options)
    np.testing.assert_array_equal(ids, [[1, 0]])
    ids, _ = of_method(Method.DeepSeekV3, np.zeros((1, 8)), bias, n_group=2, **options)
    np.testing.assert_array_equal(ids, [[0, 1]])


@pytest.mark.parametrize("name", ["deepseek_g4_negbias", "deepseek_nogroup_negbias"])
def test_golden_cases_tell_a_bias_in_the_weights_apart(name: str) -> None:
    problem, logits, bias, ids, weight_bits = golden(name)
    score = np.take_along_axis(sigmoid(logits) + bias, ids, axis=1)
    weights = score * np.float32(problem.routed_scaling_factor) / score.sum(axis=1, keepdims=True)
    assert (encode_bf16(weights) != weight_bits).mean() > 0.5


def test_golden_cases_tell_groups_masked_with_zero_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, logits, bias, ids, _ = golden("deepseek_g4_negbias")
    limit = routing._limit_to_groups
    monkeypatch.setattr(routing, "_limit_to_groups", lambda *a: np.maximum(limit(*a), -1e-9))
    assert (select(problem, logits, bias)[0] != ids).any()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2}])
@pytest.mark.parametrize("method", METHODS)
def test_nonfinite_logits_give_distinct_ids_in_range(
    method: Method, groups: dict, value: float
) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, 16)).astype(np.float32)
    clean = logits[1::2].copy()
    logits[::2][rng.random((20, 16)) < 0.3] = value
    logits[0] = value
    top_k = 1 if method is Method.Llama4 else 5
    ids, weights = of_method(method, logits, top_k=top_k, **groups)
    assert ids.min() >= 0
    assert ids.max() < 16
    assert all(len(set(row)) == top_k for row in ids)
    clean_ids, clean_weights = of_method(method, clean, top_k=top_k, **groups)
    np.testing.assert_array_equal(ids[1::2], clean_ids)
    np.testing.assert_array_equal(weights[1::2], clean_weights)


@pytest.mark.parametrize("method", METHODS)
def test_zero_tokens(method: Method) -> None:
    ids, weights = of_method(method, np.zeros((0, 8)), top_k=1)
    assert (ids.shape, weights.shape) == ((0, 1), (0, 1))
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)


def test_unspecified_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="Unspecified"):
        of_method(Method.Unspecified, np.zeros((1, 8)), top_k=1)


def test_topk_weights_may_be_negative() -> None:
    _, weights = of_method(Method.TopK, [[-3.0, -1.0, -2.0]], top_k=2)
    np.testing.assert_array_equal(weights, [[-1.0, -2.0]])


# --- packed words ---------------------------------------------------------------------------------


def test_decode_packed() -> None:
    words = np.array([0x0003_3F80, 0x0007_BF80, -1, -(2**31), 0x7FFF_0000], np.int64)
    ids, weights = decode_packed(words.astype(np.int32)[None])
    np.testing.assert_array_equal(ids, [[3, 7, -1, -(2**15), 2**15 - 1]])
    np.testing.assert_array_equal(weights[0, [0, 1, 3, 4]], [1.0, -1.0, 0.0, 0.0])
    assert np.isnan(weights[0, 2])


# --- permutation ----------------------------------------------------------------------------------


def permutation_of(ids: object, *, experts: int = 4, tile: int = 4, **local: int) -> object:
    local = {"local_expert_offset": 0, "local_num_experts": experts} | local
    return build_permutation(np.array(ids, np.int32), num_experts=experts, tile=tile, **local)


def test_worked_example() -> None:
    p = permutation_of([[2, 0], [2, -1], [4, 2], [0, 9]])
    np.testing.assert_array_equal(p.counts, [2, 0, 3, 0])
    np.testing.assert_array_equal(p.offsets, [0, 4, 4, 8, 8])
    np.testing.assert_array_equal(p.expanded_to_permuted, [4, 0, 5, -1, -1, 6, 1, -1])
    np.testing.assert_array_equal(p.permuted_to_expanded, [1, 6, -1, -1, 0, 2, 5, -1])
    segments = [(s.expert, s.rows, list(s.slots)) for s in p.segments()]
    assert segments == [(0, slice(0, 2), [1, 6]), (2, slice(4, 7), [0, 2, 5])]


def test_only_local_experts_take_rows() -> None:
    p = permutation_of([[0, 1], [2, 3]], local_expert_offset=1, local_num_experts=2)
    np.testing.assert_array_equal(p.expanded_to_permuted, [-1, 0, 4, -1])


def test_experts_beyond_the_last_one_are_not_local() -> None:
    p = permutation_of([[3, 4]], local_expert_offset=2, local_num_experts=4)
    np.testing.assert_array_equal(p.expanded_to_permuted, [0, -1])


@pytest.mark.parametrize("ids", [np.zeros((0, 3)), np.full((5, 3), -1), np.full((5, 3), 4)])
def test_no_live_slot(ids: np.ndarray) -> None:
    p = permutation_of(ids)
    assert p.num_padded_rows == 0
    assert list(p.segments()) == []
    assert (p.expanded_to_permuted == -1).all()


@pytest.mark.parametrize("tile", [1, 3, 8, 128])
@pytest.mark.parametrize("experts", [1, 7, 64])
def test_capacity_is_the_worst_case(experts: int, tile: int) -> None:
    for slots in (0, 1, 5, 64, 200):
        worst = np.arange(slots) % experts  # each expert one slot; the rest go where a tile is full
        worst[min(slots, experts) :] = 0
        for ids in (worst, np.arange(slots) % experts, np.zeros(slots)):
            p = permutation_of(ids.reshape(-1, 1), experts=experts, tile=tile)
            assert p.num_padded_rows <= p.capacity
        p = permutation_of(worst.reshape(-1, 1), experts=experts, tile=tile)
        assert p.num_padded_rows == p.capacity
