"""What one slot or token holds reaches its own row only, and reaches it unaltered.

Invalid ids, NaN and infinities, repeated experts, the bits of packed words, weights on the input.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.inputs import INVALID_IDS, make_hidden_states, make_topk, move_arguments
from cupy_moe.weights import pack_topk_ids, unpack_topk_ids
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    poisoned_allocations,
    reference,
    routed_moe,
    small_arguments,
    small_layer,
    tolerance_of,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("dtype", ["packed", "float32"])
@pytest.mark.parametrize("invalid", INVALID_IDS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_invalid_ids(library: str, invalid: str, dtype: str, tokens: int) -> None:
    """Slots of no expert carry NaN weights here, and every buffer starts as NaN."""
    arguments = small_arguments(tokens, invalid=invalid, dtype=dtype, seed=3)
    expected = reference(arguments)
    on_device = move_arguments(arguments, library)
    with poisoned_allocations(library):
        out = to_host(routed_moe(**on_device))
    ids = arguments["topk_ids"][0] if dtype == "float32" else arguments["topk_ids"] >> 16
    dead_rows = ((ids < 0) | (ids >= small_layer().num_experts)).all(axis=1)
    assert dead_rows.any() or invalid in ("one_slot", "num_experts", "extremes")
    assert_bit_equal(out[dead_rows], np.zeros_like(out[dead_rows]), "rows without an expert")
    assert_within(compare(out, expected), tolerance_of(arguments))
    for moved, original in zip(
        as_tuple(on_device["topk_ids"]), as_tuple(arguments["topk_ids"]), strict=True
    ):
        assert_bit_equal(moved, original, "routing input after the call")


def as_tuple(topk: Any) -> tuple[Any, ...]:
    """Treat packed words like a tuple of one."""
    return topk if isinstance(topk, tuple) else (topk,)


@pytest.mark.parametrize("tokens", [2, 65, 300])
@pytest.mark.parametrize("library", LIBRARIES)
def test_nan_in_hidden_states_stays_in_its_row(library: str, tokens: int) -> None:
    arguments = small_arguments(tokens)
    clean = to_host(routed_moe(**move_arguments(arguments, library)))
    row = tokens // 2
    arguments["hidden_states"].view(np.uint8)[row, 17] = 0x7F
    out = to_host(routed_moe(**move_arguments(arguments, library)))
    assert np.isnan(out[row].astype(np.float32)).all()
    others = np.arange(tokens) != row
    assert_bit_equal(out[others], clean[others], "rows of other tokens")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", ["packed", "bfloat16", "float32"])
def test_nonfinite_weight_of_a_live_slot_stays_in_its_row(dtype: str, value: float) -> None:
    layer, tokens, row = small_layer(), 65, 7
    ids, weights = make_topk(tokens, 2, layer.num_experts, dtype="float32")
    weights[row, 1] = value
    if dtype == "packed":
        topk = pack_topk_ids(ids, weights)
    else:
        topk = (ids, weights.astype(getattr(ml_dtypes, dtype, dtype)))
    arguments = layer.arguments(make_hidden_states(tokens, layer.hidden_size), topk)
    out, expected = to_host(routed_moe(**move_arguments(arguments, "torch"))), reference(arguments)
    others = np.arange(tokens) != row
    assert np.isfinite(expected[others].astype(np.float32)).all()
    assert not np.isfinite(expected[row].astype(np.float32)).any()
    assert_within(compare(out, expected), tolerance_of(arguments))


def test_repeated_experts_of_a_token_each_count() -> None:
    for tokens in (1, 4, 5, 40):
        layer = small_layer()
        ids = np.full((tokens, 3), 2, np.int32)
        weights = np.full((tokens, 3), 0.25, np.float32)
        arguments = layer.arguments(make_hidden_states(tokens, layer.hidden_size), (ids, weights))
        out = routed_moe(**move_arguments(arguments, "torch"))
        assert_within(compare(out, reference(arguments)), tolerance_of(arguments), f"T = {tokens}")


def test_packed_and_tuple_differ_by_the_rounding_of_the_weights() -> None:
    """1/3 and 0.99999 are no BF16 numbers: a rounded tuple equals packed, an exact one does not."""
    layer, tokens = small_layer(), 64
    ids, _ = make_topk(tokens, 2, layer.num_experts, dtype="float32")
    weights = np.tile(np.array([1 / 3, -0.99999], np.float32), (tokens, 1))
    hidden = make_hidden_states(tokens, layer.hidden_size)

    def run(topk: Any) -> np.ndarray:
        return to_host(routed_moe(**move_arguments(layer.arguments(hidden, topk), "torch")))

    packed = run(pack_topk_ids(ids, weights))
    assert_bit_equal(run((ids, weights.astype(BF16))), packed, "BF16 tuple")
    assert_bit_equal(run((ids, weights.astype(BF16).astype(np.float32))), packed, "rounded FP32")
    exact = run((ids, weights))
    assert compare(exact, packed).bit_equal < 0.95
    arguments = layer.arguments(hidden, (ids, weights))
    assert_within(compare(exact, reference(arguments)), tolerance_of(arguments))


def test_input_scale_acts_before_the_activation() -> None:
    """With weight 0.5 the layer computes f(x / 2), not f(x) / 2."""
    layer, tokens = small_layer(), 40
    ids = make_topk(tokens, 1, layer.num_experts, dtype="float32")[0]
    hidden = make_hidden_states(tokens, layer.hidden_size)
    halved = (hidden.astype(np.float32) / 2).astype(hidden.dtype)
    exact = hidden.astype(np.float32) / 2 == halved.astype(np.float32)
    hidden = np.where(exact, hidden.view(np.uint8), 0).view(hidden.dtype)
    halved = np.where(exact, halved.view(np.uint8), 0).view(hidden.dtype)

    def run(x: np.ndarray, weight: float, **options: Any) -> np.ndarray:
        weights = np.full(ids.shape, weight, np.float32)
        arguments = layer.arguments(x, (ids, weights), routing_method_type=3, **options)
        return to_host(routed_moe(**move_arguments(arguments, "torch")))

    before = run(hidden, 0.5, use_routing_scales_on_input=True)
    assert_bit_equal(before, run(halved, 1.0), "weight 0.5 on the input side")
    assert compare(before, run(hidden, 0.5)).rel_l2 > 0.2


def test_packed_words_keep_sign_and_id_apart() -> None:
    """A negative weight does not leak into the id, nor a negative id into the weight."""
    layer = small_layer()
    ids = np.array([[0, 1], [3, -1], [-7, 2]], np.int32)
    weights = np.array([[-0.5, 0.5], [-1.0, -1.0], [0.5, -0.25]], np.float32)
    packed = pack_topk_ids(ids, weights)
    assert_bit_equal(unpack_topk_ids(packed)[1], weights.astype(BF16))
    hidden = make_hidden_states(3, layer.hidden_size)
    arguments = move_arguments(layer.arguments(hidden, packed), "cupy")
    expected = reference(layer.arguments(hidden, (ids, weights)))
    assert_within(compare(routed_moe(**arguments), expected), tolerance_of(arguments))
