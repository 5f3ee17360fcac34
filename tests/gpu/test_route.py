"""The routing kernel against golden vectors and ``reference.routing``, and its edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.formats import decode_bf16, encode_bf16
from cupy_moe.kernels.route import bind_route, route_config
from cupy_moe.reference.routing import select_experts
from cupy_moe.runtime.jit import load
from cupy_moe.runtime.launch import enqueue
from cupy_moe.testing.compare import compare
from cupy_moe.types import RoutingMethodType as Method
from tests.routing_problems import (
    GOLDEN_CASES,
    GROUPS,
    METHODS,
    Problem,
    draw,
    golden,
    grouped_problems,
    problem_id,
    problems,
)

if TYPE_CHECKING:
    from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

UNTOUCHED = -7
GUARD_ROWS = 3


@dataclass(frozen=True)
class Routed:
    ids: np.ndarray  # (T, K) int32
    weights: np.ndarray  # (T, K) uint16, BF16 bits
    replay: np.ndarray  # (T, K) int16

    def __getitem__(self, tokens: object) -> Routed:
        return Routed(self.ids[tokens], self.weights[tokens], self.replay[tokens])


# --- running --------------------------------------------------------------------------------------


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as they lie in memory; BF16 as its bits."""
    return encode_bf16(values) if dtype == "bfloat16" else values.astype(np.float32)


def poisoned(problem: Problem, dtype: type, byte: int) -> np.ndarray:
    """Output with guard rows, every byte of it the same."""
    shape = (problem.num_tokens + GUARD_ROWS, problem.top_k * np.dtype(dtype).itemsize)
    return np.full(shape, byte, np.uint8).view(dtype)


def launch(problem: Problem, arrays: dict[str, object], *, stream: int, pdl: bool = False) -> None:
    config = route_config(problem)
    addresses = {name: 0 if array is None else array.data.ptr for name, array in arrays.items()}
    bound = bind_route(
        load(config.spec(), 0),
        config,
        problem,
        **addresses,
        routed_scaling_factor=problem.routed_scaling_factor,
        stream=stream,
        pdl=pdl,
    )
    enqueue([bound])


def route(
    problem: Problem, logits: np.ndarray, bias: np.ndarray | None = None, *, poison: int = 0xFF
) -> Routed:
    """Route on the GPU into poisoned outputs with guard rows, which must survive."""
    import cupy

    x = cupy.asarray(stored(logits, problem.logits_dtype))
    b = None if bias is None else cupy.asarray(stored(bias, problem.bias_dtype))
    ids = cupy.asarray(poisoned(problem, np.int32, poison))
    weights = cupy.asarray(poisoned(problem, np.uint16, poison))
    replay = cupy.full(ids.shape, UNTOUCHED, np.int16)
    before = [cupy.asnumpy(array) for array in (ids, weights, replay)]
    arrays = {
        "logits": x,
        "bias": b,
        "topk_ids": ids,
        "topk_weights": weights,
        "routing_replay_out": replay,
    }
    launch(problem, arrays, stream=cupy.cuda.get_current_stream().ptr)
    after = [cupy.asnumpy(array) for array in (ids, weights, replay)]
    for was, now in zip(before, after, strict=True):
        np.testing.assert_array_equal(now[problem.num_tokens :], was[problem.num_tokens :])
    return Routed(*(array[: problem.num_tokens] for array in after))


def reference(problem: Problem, logits: np.ndarray, bias: np.ndarray | None = None) -> Routed:
    ids, weights = select_experts(
        logits,
        bias,
        method=problem.routing_method,
        top_k=problem.top_k,
        n_group=problem.num_groups,
        topk_group=problem.topk_group,
        routed_scaling_factor=problem.routed_scaling_factor,
        norm_topk_prob=problem.norm_topk_prob,
    )
    return Routed(ids, encode_bf16(weights), ids.astype(np.int16))


# --- comparing ------------------------------------------------------------------------------------


def assert_same_bits(out: Routed, expected: Routed) -> None:
    np.testing.assert_array_equal(out.ids, expected.ids)
    np.testing.assert_array_equal(out.weights, expected.weights)
    np.testing.assert_array_equal(out.replay, expected.replay)


def assert_routed(out: Routed, expected: Routed) -> None:
    """Ids exact, also in the replay; weights within one BF16 step."""
    np.testing.assert_array_equal(out.ids, expected.ids)
    np.testing.assert_array_equal(out.replay, expected.ids)
    weights, want = decode_bf16(out.weights), decode_bf16(expected.weights)
    assert np.isfinite(weights).all()
    excess = np.abs(weights - want) - (2.0**-7 * np.abs(want) + 1e-30)
    assert excess.max() <= 0, f"worst weight {weights.flat[excess.argmax()]}"


def assert_mostly_bit_equal(out: Routed, expected: Routed) -> None:
    """At least 99 % of the weights; of fewer than 100 weights, all but one."""
    flips = np.count_nonzero(out.weights != expected.weights)
    assert flips <= max(1, out.weights.size // 100), f"{flips} of {out.weights.size} differ"


def assert_valid_ids(out: Routed, num_experts: int) -> None:
    """In range and distinct within each token."""
    assert out.ids.min() >= 0
    assert out.ids.max() < num_experts
    ordered = np.sort(out.ids, axis=1)
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


# --- golden vectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden(name: str) -> None:
    problem, logits, bias, ids, weights = golden(name)
    assert_routed(route(problem, logits, bias), Routed(ids, weights, ids))


def test_golden_weights_are_mostly_bit_equal(evidence: Evidence) -> None:
    cases = [golden(name) for name in GOLDEN_CASES]
    out = np.concatenate([route(*case[:3]).weights.ravel() for case in cases])
    expected = np.concatenate([case[4].ravel() for case in cases])
    errors = compare(out.view(ml_dtypes.bfloat16), expected.view(ml_dtypes.bfloat16))
    evidence.errors("route/golden_weights", errors)
    assert errors.bit_equal >= 0.99


# --- fresh logits against the reference -----------------------------------------------------------


@pytest.mark.parametrize("problem", problems() + grouped_problems(), ids=problem_id)
def test_fresh_logits(problem: Problem) -> None:
    logits, bias = draw(problem, seed=problem.num_experts + problem.top_k)
    out, expected = route(problem, logits, bias), reference(problem, logits, bias)
    assert_routed(out, expected)
    assert_mostly_bit_equal(out, expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 127])
def test_token_counts(num_tokens: int) -> None:
    problem = Problem(num_tokens, 64, 6, Method.Renormalize)
    logits, _ = draw(problem, seed=num_tokens)
    assert_routed(route(problem, logits), reference(problem, logits))


@pytest.mark.parametrize("mean", [-5.0, 5.0])
def test_groups_with_keys_far_from_zero(mean: float) -> None:
    """All experts of the kept groups are taken: excluded ones must lose against negative keys."""
    problem = Problem(37, 32, 8, Method.DeepSeekV3, 8, 2, bias_dtype="float32")
    logits, bias = draw(problem, seed=3, mean=mean)
    assert_routed(route(problem, logits, bias), reference(problem, logits, bias))


# --- ties, underflow, overflow --------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_experts", [33, 256, 2048])
def test_equal_logits_take_the_first_experts(method: Method, num_experts: int) -> None:
    problem = Problem(5, num_experts, 1 if method is Method.Llama4 else 8, method)
    out = route(problem, np.full((5, num_experts), 0.75, np.float32))
    np.testing.assert_array_equal(out.ids, np.tile(np.arange(problem.top_k), (5, 1)))


def test_equal_logits_take_the_first_groups() -> None:
    problem = Problem(5, 64, 20, Method.DeepSeekV3, 8, 3)
    out = route(problem, np.full((5, 64), -0.5, np.float32))
    np.testing.assert_array_equal(out.ids, np.tile(np.arange(20), (5, 1)))


def test_integer_logits_tie_by_id() -> None:
    problem = Problem(64, 1000, 32, Method.TopK)
    logits = np.random.default_rng(4).integers(-3, 4, (64, 1000)).astype(np.float32)
    assert_same_bits(route(problem, logits), reference(problem, logits))


def test_negative_zero_is_below_positive_zero() -> None:
    problem = Problem(1, 4, 4, Method.TopK)
    out = route(problem, np.array([[-0.0, 0.0, -0.0, 0.0]], np.float32))
    np.testing.assert_array_equal(out.ids, [[1, 3, 0, 2]])
    np.testing.assert_array_equal(out.weights, [[0, 0, 0x8000, 0x8000]])


def test_equal_best_experts_of_a_group_both_count_in_its_score() -> None:
    problem = Problem(1, 8, 2, Method.DeepSeekV3, 2, 1)
    logits = np.array([[-4, 2, -4, 2, 3, -4, 0, -4]], np.float32)  # 0.88 + 0.88 > 0.95 + 0.5
    np.testing.assert_array_equal(route(problem, logits).ids, [[1, 3]])


@pytest.mark.parametrize("num_groups", [0, 8])
def test_weights_survive_a_bias_that_swallows_the_sigmoids(num_groups: int) -> None:
    """Keys are exactly 12, sigmoids exactly 2^-25: a weight from key - bias would be 0."""
    problem = Problem(9, 64, 8, Method.DeepSeekV3, num_groups, 4, bias_dtype="float32")
    logits = np.random.default_rng(5).uniform(-17.9, -17.0, (9, 64)).astype(np.float32)
    bias = np.full(64, 12.0, np.float32)
    out = route(problem, logits, bias)
    np.testing.assert_array_equal(out.ids, np.tile(np.arange(8), (9, 1)))
    np.testing.assert_array_equal(decode_bf16(out.weights), 0.125)


@pytest.mark.parametrize("method", [Method.DeepSeekV3, Method.MiniMax2, Method.SigmoidRenorm])
@pytest.mark.parametrize("logit", [-20.0, -88.0, -1e30, -np.inf])
def test_underflowing_sigmoids_give_zero_weights(method: Method, logit: float) -> None:
    problem = Problem(3, 64, 8, method, num_groups=8, topk_group=4)
    out = route(problem, np.full((3, 64), logit, np.float32))
    np.testing.assert_array_equal(out.ids, np.tile(np.arange(8), (3, 1)))
    np.testing.assert_array_equal(out.weights, 0)


def test_huge_logits_do_not_overflow_a_softmax() -> None:
    logits = np.full((2, 40), -3e38, np.float32)
    logits[:, 7], logits[:, 30] = 3e38, -1e38
    for method in (Method.Default, Method.Renormalize):
        out = route(Problem(2, 40, 3, method), logits)
        assert (out.ids[:, 0] == 7).all()
        np.testing.assert_array_equal(decode_bf16(out.weights), [[1, 0, 0], [1, 0, 0]])


# --- NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_experts", [1, 32, 100, 2048])
def test_nan_stays_in_its_row_and_ids_in_range(method: Method, num_experts: int) -> None:
    top_k = 1 if method is Method.Llama4 else min(8, num_experts)
    problem = Problem(24, num_experts, top_k, method)
    rng = np.random.default_rng(6)
    clean = rng.standard_normal((24, num_experts)).astype(np.float32)
    logits = clean.copy()
    logits[0] = np.nan
    logits[1].view(np.uint32)[:] = 0xFFFFFFFF
    logits[2] = -np.inf
    logits[3] = np.inf
    logits[4:12][rng.random((8, num_experts)) < 0.5] = np.nan
    out = route(problem, logits)
    assert_valid_ids(out, num_experts)
    assert_same_bits(out[12:], route(problem, clean)[12:])


@pytest.mark.parametrize(("num_experts", "num_groups", "topk_group", "top_k"), GROUPS)
def test_nan_with_groups(num_experts: int, num_groups: int, topk_group: int, top_k: int) -> None:
    problem = Problem(16, num_experts, top_k, Method.DeepSeekV3, num_groups, topk_group)
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((16, num_experts)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.4] = np.nan
    logits[0] = np.nan
    assert_valid_ids(route(problem, logits), num_experts)


# --- outputs, sizes, launches ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_result_does_not_depend_on_the_run_or_what_was_in_the_outputs(method: Method) -> None:
    problem = Problem(257, 160, 1 if method is Method.Llama4 else 7, method)
    logits = np.random.default_rng(8).standard_normal((257, 160)).astype(np.float32)
    first = route(problem, logits)
    for run in range(50):
        assert_same_bits(route(problem, logits, poison=(0x00, 0x7F, 0xFF)[run % 3]), first)


def test_result_does_not_depend_on_the_other_tokens() -> None:
    problem = Problem(61, 300, 9, Method.Default)
    logits, _ = draw(problem, seed=9)
    every = route(problem, logits)
    assert_same_bits(route(problem, logits[::-1])[::-1], every)
    assert_same_bits(route(replace(problem, num_tokens=1), logits[60:]), every[60:])


def test_more_tokens_than_a_grid_dimension_of_65535() -> None:
    problem = Problem(4 * 65_536 + 1, 8, 2, Method.TopK)
    rng = np.random.default_rng(10)
    logits = rng.integers(-3, 4, (problem.num_tokens, 8)).astype(np.float32)
    assert_same_bits(route(problem, logits), reference(problem, logits))


def test_logits_beyond_two_to_the_31_elements() -> None:
    import cupy

    problem = Problem(2**20 + 9, 2048, 2, Method.TopK, logits_dtype="bfloat16")
    logits = cupy.zeros((problem.num_tokens, 2048), np.uint16)
    logits[-1, 1234] = logits[0, 5] = 0x4000  # 2.0
    ids = cupy.full((problem.num_tokens, 2), -1, np.int32)
    weights = cupy.full((problem.num_tokens, 2), 0xFFFF, np.uint16)
    arrays = {"logits": logits, "topk_ids": ids, "topk_weights": weights}
    arrays |= {"bias": None, "routing_replay_out": None}
    launch(problem, arrays, stream=cupy.cuda.get_current_stream().ptr)
    assert ids[-1].tolist() == [1234, 0]
    assert ids[0].tolist() == [5, 0]
    assert (ids[1:-1] == cupy.arange(2)).all()
    assert (weights[1:-1] == 0).all()


def test_dependent_launch_waits_for_the_producer_of_the_logits() -> None:
    import cupy

    pdl = int(cupy.cuda.Device().compute_capability) >= 90
    problem = Problem(1, 256, 8, Method.DeepSeekV3, 8, 4)
    logits, _ = draw(problem, seed=11)
    expected = route(problem, logits)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source = cupy.asarray(logits)
        ballast = cupy.ones(1 << 24, np.float32)
        x = cupy.empty_like(source)
        ids, weights = cupy.empty((1, 8), np.int32), cupy.empty((1, 8), np.uint16)
        arrays = {"logits": x, "topk_ids": ids, "topk_weights": weights}
        arrays |= {"bias": None, "routing_replay_out": None}
        copies = []
        for _ in range(200):
            x.fill(np.nan)
            ballast += 1
            x[:] = source
            launch(problem, arrays, stream=stream.ptr, pdl=pdl)
            copies.append((ids.copy(), weights.copy()))
    stream.synchronize()
    for copied_ids, copied_weights in copies:
        np.testing.assert_array_equal(cupy.asnumpy(copied_ids), expected.ids)
        np.testing.assert_array_equal(cupy.asnumpy(copied_weights), expected.weights)
