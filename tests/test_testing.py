"""The comparison helpers catch what they are there to catch; inputs are what they say."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_moe import weights
from cupy_moe.fused_moe import trtllm_fp8_per_tensor_scale_routed_moe as routed_moe
from cupy_moe.reference.activation import FP8_ACTIVATIONS
from cupy_moe.testing import compare as cmp
from cupy_moe.testing import golden as vectors
from cupy_moe.testing import inputs
from cupy_moe.testing.compare import (
    FINALIZE,
    FP8_TIER_A,
    FP8_TIER_B,
    assert_bit_equal,
    assert_median_within,
    assert_within,
    compare,
    shares,
)
from cupy_moe.types import ActivationType

BF16 = ml_dtypes.bfloat16
TOLERANCES = [getattr(cmp, n) for n in cmp.__all__ if isinstance(getattr(cmp, n), cmp.Tolerance)]


def reference(rows: int = 64, columns: int = 256, seed: int = 0) -> np.ndarray:
    """Gaussian BF16 rows."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(BF16)


def changed(ref: np.ndarray, index: object, value: object) -> np.ndarray:
    """Copy of ``ref`` with one place overwritten."""
    out = ref.copy()
    out[index] = value
    return out


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=lambda t: t.name)
class TestEveryTolerance:
    """What no bound may accept, and what each must."""

    @staticmethod
    def outcome(out: np.ndarray, ref: np.ndarray, tolerance: cmp.Tolerance) -> None:
        bound = cmp.finalize_element_bound(ref, np.abs(ref.astype(np.float32)))
        assert_within(compare(out, ref, element_bound=bound), tolerance)

    def test_accepts_the_reference_itself(self, tolerance: cmp.Tolerance) -> None:
        self.outcome(reference(), reference(), tolerance)

    @pytest.mark.parametrize(
        "broken",
        [
            lambda r: (r.astype(np.float32) * 1.06).astype(BF16),
            lambda r: changed(r, 5, 0),
            lambda r: changed(r, 5, r[6]),
            lambda r: changed(r, (5, 7), np.nan),
            lambda r: changed(r, (5, 7), np.inf),
            lambda r: changed(r, (5, 7), 4 * float(np.abs(r.astype(np.float32)).max())),
            lambda r: -r,
            np.zeros_like,
        ],
        ids=[
            "scaled by 1.06",
            "a zero row",
            "a row of another token",
            "a NaN",
            "an infinity",
            "an outlier",
            "negated",
            "all zero",
        ],
    )
    def test_refuses(self, broken, tolerance: cmp.Tolerance) -> None:
        ref = reference(rows=4096, columns=64)  # one wrong row is 1.6 % of the norm of the whole
        with pytest.raises(AssertionError):
            self.outcome(broken(ref), ref, tolerance)


def test_one_wrong_row_in_many_passes_the_whole_but_not_the_row_bound() -> None:
    ref = reference(rows=20_000, columns=64)
    errors = compare(changed(ref, 123, 0), ref)
    assert errors.rel_l2 < FP8_TIER_B.rel_l2
    assert errors.worst_row == 123
    with pytest.raises(AssertionError, match="max_row_rel_l2"):
        assert_within(errors, FP8_TIER_B)


def test_figures_of_a_known_difference() -> None:
    ref = np.array([[3.0, 4.0], [0.0, 10.0]], np.float32)
    errors = compare(np.array([[3.0, 4.5], [0.0, 10.0]], np.float32), ref)
    assert errors.rel_l2 == pytest.approx(0.5 / math.sqrt(125))
    assert errors.max_abs_over_max_ref == pytest.approx(0.05)
    assert errors.bit_equal == 0.75
    assert (errors.worst_index, errors.worst_out, errors.worst_ref) == ((0, 1), 4.5, 4.0)
    np.testing.assert_allclose(errors.row_rel_l2, [0.1, 0.0])


def test_zero_rows_must_be_zero() -> None:
    ref = changed(reference(), 3, 0)
    assert compare(ref, ref).max_row_rel_l2 == 0.0
    errors = compare(changed(ref, (3, 0), 1e-30), ref)
    assert math.isinf(errors.max_row_rel_l2)
    assert math.isinf(compare(np.ones((2, 2)), np.zeros((2, 2))).rel_l2)


def test_nonfinite_values_in_the_same_places_are_equal_and_the_rest_is_measured() -> None:
    ref = changed(changed(reference(), (1, 2), np.nan), (1, 3), np.inf)
    errors = compare(changed(ref, (4, 4), 100.0), ref)
    assert errors.nonfinite_mismatches == 0
    assert errors.worst_index == (4, 4)
    assert 0 < errors.rel_l2 < math.inf
    assert compare(ref, ref).bit_equal == 1.0


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1.0], ids=str)
def test_misplaced_nonfinite_is_reported_first(value: float) -> None:
    ref = changed(reference(), (1, 3), np.inf)
    errors = compare(changed(changed(ref, (1, 3), value), (0, 0), 100.0), ref)
    assert (errors.nonfinite_mismatches, errors.worst_index) == (1, (1, 3))
    with pytest.raises(AssertionError, match=r"1 NaN/Inf out of place, first at \(1, 3\)"):
        assert_within(errors, FP8_TIER_B)


def test_message_says_how_much_of_each_bound_was_used() -> None:
    ref = reference()
    with pytest.raises(AssertionError) as failure:
        assert_within(compare(ref.astype(np.float32) * 1.02, ref), FP8_TIER_A, "fc2")
    message = str(failure.value)
    assert message.startswith("fc2: outside FP8 tier A")
    for figure in ("rel_l2", "max_abs_over_max_ref", "bit_equal", "max_row_rel_l2"):
        assert figure in message
    assert "rel_l2: 0.02, bound 0.004, 500 % of the bound  <-- exceeded" in message


def test_shares_count_unequal_bits_against_what_is_allowed() -> None:
    ref = reference(10, 10)
    out = ref.copy()
    out.view(np.uint16)[0, :2] ^= 1  # 2 % of the elements, one unit in the last place
    assert shares(compare(out, ref), FP8_TIER_A)["bit_equal"] == pytest.approx(0.02 / 0.05)


def test_finalize_allows_more_where_slots_cancel() -> None:
    ref = np.full((1, 4096), 1e-3, np.float32)
    out = ref.copy()
    out[0, 0] += 2e-5
    small, large = np.full_like(ref, 1e-3), np.full_like(ref, 1.0)
    within = cmp.finalize_element_bound(ref, large)
    assert_within(compare(out, ref, element_bound=within), FINALIZE)
    exceeded = cmp.finalize_element_bound(ref, small)
    with pytest.raises(AssertionError, match="element_share"):
        assert_within(compare(out, ref, element_bound=exceeded), FINALIZE)
    with pytest.raises(ValueError, match="element_bound"):
        assert_within(compare(out, ref), FINALIZE)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(4,\)"):
        compare(np.zeros((1, 4)), np.zeros(4))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0,)])
def test_empty_arrays_are_equal(shape: tuple[int, ...]) -> None:
    errors = compare(np.zeros(shape, BF16), np.zeros(shape, BF16))
    assert (errors.rel_l2, errors.bit_equal, errors.max_row_rel_l2) == (0.0, 1.0, 0.0)
    assert_within(errors, FP8_TIER_A)


def test_bits_are_taken_in_the_dtype_of_the_output() -> None:
    exact = np.array([[1.0, 1.0 + 2**-12]], np.float32)
    errors = compare(exact.astype(BF16), exact)
    assert errors.bit_equal == 1.0
    assert errors.rel_l2 > 0.0


def test_median_bound() -> None:
    ref = reference()
    cases = [compare((ref.astype(np.float32) * f).astype(BF16), ref) for f in (1.0, 1.01, 1.3)]
    assert_median_within(cases)
    with pytest.raises(AssertionError, match="median rel_l2 of 2 cases"):
        assert_median_within(cases[1:])


class TestBitEqual:
    """``assert_bit_equal`` is for determinism: nothing but the NaN payload may differ."""

    def test_accepts_equal_arrays_with_nan(self) -> None:
        ref = changed(reference(), (0, 0), np.nan)
        assert_bit_equal(ref.copy(), ref)

    @pytest.mark.parametrize(
        ("out", "ref"),
        [
            (np.array([0.0], BF16), np.array([-0.0], BF16)),
            (np.array([1], np.int32), np.array([2], np.int32)),
            (np.array([1.0], BF16), np.array([1.0], np.float32)),
            (np.array([[1.0]], BF16), np.array([1.0], BF16)),
            (np.array([np.nan], np.float32), np.array([np.inf], np.float32)),
        ],
        ids=["sign of zero", "integers", "dtype", "shape", "NaN for infinity"],
    )
    def test_refuses(self, out: np.ndarray, ref: np.ndarray) -> None:
        with pytest.raises(AssertionError):
            assert_bit_equal(out, ref)

    def test_message_names_the_first_difference(self) -> None:
        ref = reference()
        with pytest.raises(AssertionError, match=r"run 3: 1 of 16384 .*first at \(2, 5\)"):
            assert_bit_equal(changed(ref, (2, 5), 9.0), ref, "run 3")


@pytest.mark.parametrize("dtype", [BF16, ml_dtypes.float8_e4m3fn, np.float32, np.int32, np.uint8])
def test_to_host_keeps_dtype_and_bits_of_torch_tensors(dtype: type) -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(24, dtype=np.uint8).reshape(4, 6).astype(dtype)
    name = np.dtype(dtype).name
    tensor = torch.from_numpy(array.astype(np.float32)).to(getattr(torch, name))
    for ours, theirs in [(array, tensor), (array.T, tensor.T), (array[1], tensor[1])]:
        assert_bit_equal(cmp.to_host(theirs), ours)


# --- inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", inputs.ROUTING_PATTERNS)
def test_topk_names_distinct_experts(pattern: str) -> None:
    ids, weights = inputs.make_topk(500, 3, 16, pattern=pattern, dtype="float32")
    assert all(np.unique(row).size == 3 for row in ids)
    assert (ids.min(), ids.max()) == (0, 15) or pattern == "half_empty"
    assert (weights < 0).any()
    counts = np.bincount(ids.reshape(-1), minlength=16)
    assert {
        "uniform": counts.max() < 2 * counts.min(),
        "skewed": counts[0] > 5 * counts[-1],
        "one_expert": counts[-1] == 500,
        "half_empty": not counts[1::2].any(),
    }[pattern]


@pytest.mark.parametrize("invalid", inputs.INVALID_IDS)
def test_invalid_ids_have_nan_weights(invalid: str) -> None:
    ids, weights = inputs.make_topk(9, 2, 4, invalid=invalid, dtype="float32")
    dead = (ids < 0) | (ids >= 4)
    assert dead.any()
    np.testing.assert_array_equal(np.isnan(weights), dead)
    packed = inputs.make_topk(9, 2, 4, invalid=invalid)
    np.testing.assert_array_equal((packed >> 16 < 0) | (packed >> 16 >= 4), dead)


def test_inputs_depend_on_the_seed_alone() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_experts": 2}
    first, again, other = (inputs.make_fp8_layer(**sizes, seed=seed) for seed in (1, 1, 2))
    assert_bit_equal(again.weights.gemm1_weights, first.weights.gemm1_weights)
    with pytest.raises(AssertionError):
        assert_bit_equal(other.weights.gemm1_weights, first.weights.gemm1_weights)
    assert_bit_equal(inputs.make_topk(9, 2, 4, seed=3), inputs.make_topk(9, 2, 4, seed=3))


@pytest.mark.parametrize("activation", FP8_ACTIVATIONS, ids=lambda a: a.name)
def test_random_layers_use_the_range_of_their_formats(activation: ActivationType) -> None:
    """Nothing saturates, hardly anything underflows, and the output is of order one."""
    layer = inputs.make_fp8_layer(
        hidden_size=256,
        intermediate_size=384,
        num_experts=4,
        activation=activation,
        gains=(0.25, 0.5, 1.0, 2.0),
    )
    hidden = inputs.make_hidden_states(64, 256)
    codes = hidden.view(np.uint8) & 0x7F
    assert (codes == 0x7E).mean() < 1e-3
    topk = inputs.make_topk(64, 1, 4)
    out = routed_moe(**layer.arguments(hidden, topk)).astype(np.float32)
    assert np.isfinite(out).all()
    assert (np.abs(out).max(axis=1) > 1e-3).all()
    assert len(set(layer.weights.output2_scales_scalar.tolist())) == 4


@pytest.fixture(scope="module")
def golden() -> dict[str, vectors.GoldenCase]:
    """Golden cases of the FP8 layer by name."""
    cases = vectors.load_golden_cases(Path(__file__).parent / "data" / "fp8_moe.npz")
    return {case.name: case for case in cases}


def test_golden_arrays_are_typed(golden: dict[str, vectors.GoldenCase]) -> None:
    case = golden["swiglu_tuple_bf16"]
    dtypes = {name: array.dtype for name, array in case.arrays.items()}
    assert dtypes["out"] == dtypes["weights"] == BF16
    assert dtypes["x"] == dtypes["q"] == ml_dtypes.float8_e4m3fn
    arguments = vectors.golden_fp8_arguments(case)
    assert_bit_equal(
        arguments["gemm1_weights"].view(np.uint8), case.weights["w1_prepared_u8"], "prepared FC1"
    )
    assert_bit_equal(
        arguments["gemm2_weights"].view(np.uint8), case.weights["w2_prepared_u8"], "prepared FC2"
    )


def exchanged_halves(arguments: inputs.Arguments) -> None:
    """Take the gate for the up half."""
    w1 = weights.unprepare_gemm1_weights(arguments["gemm1_weights"])
    rows = np.roll(w1.view(np.uint8), w1.shape[1] // 2, axis=1)
    arguments["gemm1_weights"] = weights.prepare_gemm1_weights(rows.view(w1.dtype))


def first_expert_scales(arguments: inputs.Arguments) -> None:
    """Use the scale of expert 0 for all."""
    name = "output2_scales_scalar"
    arguments[name] = np.full_like(arguments[name], arguments[name][0])


def unshuffled_weights(arguments: inputs.Arguments) -> None:
    """Skip the preparation of FC2."""
    arguments["gemm2_weights"] = weights.unprepare_gemm2_weights(arguments["gemm2_weights"])


def one_slot_lost(arguments: inputs.Arguments) -> None:
    """Drop a single slot of a single token."""
    arguments["topk_ids"] = arguments["topk_ids"].copy()
    arguments["topk_ids"][3, 1] = -1 << 16


def neighbour_token(arguments: inputs.Arguments) -> None:
    """Route one token like its neighbour."""
    arguments["topk_ids"] = arguments["topk_ids"].copy()
    arguments["topk_ids"][3] = arguments["topk_ids"][4]


@pytest.mark.parametrize(
    "mistake",
    [exchanged_halves, first_expert_scales, unshuffled_weights, one_slot_lost, neighbour_token],
    ids=lambda m: m.__name__,
)
@pytest.mark.parametrize("tolerance", [FP8_TIER_A, FP8_TIER_B], ids=lambda t: t.name)
def test_bounds_refuse_typical_mistakes(
    golden: dict[str, vectors.GoldenCase], mistake, tolerance: cmp.Tolerance
) -> None:
    case = golden["swiglu_many"]
    arguments = vectors.golden_fp8_arguments(case)
    assert_within(compare(routed_moe(**arguments), case.arrays["out"]), FP8_TIER_A)
    mistake(arguments)
    with pytest.raises(AssertionError):
        assert_within(compare(routed_moe(**arguments), case.arrays["out"]), tolerance)
