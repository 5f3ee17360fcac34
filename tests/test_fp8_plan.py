"""Planned FP8 calls on host arrays, and their agreement with the operations."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from cupy_moe.fused_moe import (
    PlannedMoe,
    fp8_layers,
    plan_fp8_per_tensor_scale_moe,
    plan_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.testing.compare import assert_bit_equal
from tests.array_kinds import ArrayKind
from tests.fp8_calls import (
    BF16,
    HIDDEN,
    NUM_TOKENS,
    NUMPY,
    OPERATIONS,
    TOP_K,
    both_operations,
    call,
    host_kinds,
    layer_arguments,
    on,
    zeros,
)

PLANS = {
    "routed": plan_fp8_per_tensor_scale_routed_moe,
    "logits": plan_fp8_per_tensor_scale_moe,
}
LAYERS = {"routed": fp8_layers.routed_layer, "logits": fp8_layers.logits_layer}


def host_results(kind: ArrayKind, results: Any) -> list[np.ndarray]:
    return [kind.host(r).copy() for r in (results if isinstance(results, list) else [results])]


def set_routing(arguments: dict[str, Any], source: dict[str, Any]) -> None:
    """Copy routing and hidden states of other arguments into the arrays of these."""
    for name in ("hidden_states", "topk_ids", "routing_logits"):
        if name in arguments:
            arguments[name][...] = source[name]


@both_operations
@pytest.mark.parametrize("do_finalize", [True, False])
@host_kinds
def test_a_plan_computes_what_the_operation_computes(
    kind: ArrayKind, do_finalize: bool, operation: str
) -> None:
    arguments = on(kind, layer_arguments(operation, do_finalize=do_finalize))
    plan = PLANS[operation](**arguments)
    assert plan.scratch_bytes == 0
    results = plan.run()
    assert results is plan.output
    assert plan.run() is results
    expected = host_results(kind, OPERATIONS[operation](**arguments))
    for got, want in zip(host_results(kind, results), expected, strict=True):
        assert_bit_equal(got, want)


@both_operations
@pytest.mark.parametrize("do_finalize", [True, False])
def test_a_plan_follows_the_contents_of_its_arrays(do_finalize: bool, operation: str) -> None:
    arguments = layer_arguments(operation, do_finalize=do_finalize)
    fresh = layer_arguments(operation, do_finalize=do_finalize)
    fresh["hidden_states"] = fresh["hidden_states"][::-1].copy()
    routing = "topk_ids" if operation == "routed" else "routing_logits"
    fresh[routing] = fresh[routing][::-1].copy()
    plan = PLANS[operation](**arguments)
    before = host_results(NUMPY, plan.run())
    set_routing(arguments, fresh)
    after = host_results(NUMPY, plan.run())
    expected = host_results(NUMPY, OPERATIONS[operation](**fresh))
    for got, want in zip(after, expected, strict=True):
        assert_bit_equal(got, want)
    pairs = zip(after, before, strict=True)
    assert any((a.view(np.uint8) != b.view(np.uint8)).any() for a, b in pairs)


@both_operations
@host_kinds
def test_a_plan_writes_into_the_given_output(kind: ArrayKind, operation: str) -> None:
    output = kind.make(np.full((NUM_TOKENS, HIDDEN), np.nan, BF16))
    arguments = on(kind, layer_arguments(operation))
    plan = PLANS[operation](**arguments, output=output)
    assert plan.output is output
    assert np.isnan(kind.host(output).astype(np.float32)).all(), "planning runs nothing"
    assert plan.run() is output
    assert_bit_equal(kind.host(output), kind.host(OPERATIONS[operation](**arguments)))


def test_weights_of_a_tuple_come_back_as_they_are() -> None:
    arguments = layer_arguments("routed", dtype="float32", do_finalize=False)
    plan = PLANS["routed"](**arguments)
    assert plan.run()[1] is arguments["topk_ids"][1]


@both_operations
@host_kinds
def test_a_plan_without_tokens(kind: ArrayKind, operation: str) -> None:
    plan = PLANS[operation](**on(kind, layer_arguments(operation, num_tokens=0)))
    assert tuple(plan.run().shape) == (0, HIDDEN)
    plan = PLANS[operation](**on(kind, layer_arguments(operation, num_tokens=0, do_finalize=False)))
    assert [tuple(r.shape) for r in plan.run()] == [(0, HIDDEN), (0, TOP_K), (0,)]


@both_operations
def test_plans_do_not_share_results(operation: str) -> None:
    arguments = layer_arguments(operation)
    first, second = (PLANS[operation](**arguments) for _ in range(2))
    expected = host_results(NUMPY, first.run())[0]
    arguments["hidden_states"][...] = arguments["hidden_states"][::-1].copy()
    second.run()
    assert_bit_equal(first.output, expected)


@both_operations
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"top_k": 0}, ValueError, r"top_k must be in \[1, num_experts\]"),
        ({"top_k": 1.0}, TypeError, "top_k must be an integer"),
        ({"output": np.zeros((NUM_TOKENS, HIDDEN), np.float32)}, TypeError, "output must be bf"),
        ({"hidden_states": np.zeros(3, np.float32)}, ValueError, "hidden_states must be"),
        ({"gemm2_weights": None}, TypeError, "gemm2_weights: expected an array"),
    ],
    ids=str,
)
def test_planning_refuses_what_the_operation_refuses(
    changes: dict[str, Any], error: type[Exception], message: str, operation: str
) -> None:
    arguments = layer_arguments(operation) | changes
    with pytest.raises(error, match=message) as caught:
        PLANS[operation](**arguments)
    with pytest.raises(error) as refused:
        call(operation, arguments)
    assert str(caught.value) == str(refused.value)


@both_operations
def test_planning_refuses_an_output_over_an_input(operation: str) -> None:
    arguments = layer_arguments(operation)
    memory = np.zeros((NUM_TOKENS, 2 * HIDDEN), np.uint8)
    tokens = memory.reshape(-1)[: NUM_TOKENS * HIDDEN].reshape(NUM_TOKENS, HIDDEN)
    arguments["hidden_states"] = tokens.view(arguments["hidden_states"].dtype)
    with pytest.raises(ValueError, match="output must not overlap hidden_states"):
        PLANS[operation](**arguments, output=memory.view(BF16))


def test_planning_refuses_arrays_that_dlpack_imports() -> None:
    class Foreign:
        """An array of a library that is known by DLPack only."""

        def __init__(self, array: np.ndarray) -> None:
            self._array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._array.__dlpack_device__()

    arguments = layer_arguments("routed")
    scales = arguments["output2_scales_scalar"]
    arguments["output2_scales_scalar"] = Foreign(scales)
    with pytest.raises(NotImplementedError, match=r"torch, CuPy or NumPy, got output2_scales_sca"):
        PLANS["routed"](**arguments)


@both_operations
def test_plans_take_the_arguments_of_their_operation(operation: str) -> None:
    expected = inspect.signature(OPERATIONS[operation])
    planned, layer = (inspect.signature(f[operation]) for f in (PLANS, LAYERS))
    assert planned.parameters == expected.parameters
    assert planned.return_annotation in (PlannedMoe, "PlannedMoe")
    assert layer.parameters == expected.parameters


@both_operations
def test_arguments_reach_the_layer_by_their_names(operation: str) -> None:
    """The operations pass their arguments on by position."""
    names = list(inspect.signature(OPERATIONS[operation]).parameters)
    sentinels = {name: object() for name in names}
    seen: dict[str, object] = {}

    def layer(*arguments: object) -> Any:
        seen.update(inspect.signature(LAYERS[operation]).bind(*arguments).arguments)
        raise RuntimeError("stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"cupy_moe.fused_moe.fp8.{operation}_layer", layer)
        with pytest.raises(RuntimeError, match="stop"):
            OPERATIONS[operation](**sentinels)
    assert seen == sentinels


def test_llama4_warning_points_at_the_caller_of_the_plan() -> None:
    arguments = layer_arguments("logits", top_k=1, routing_method_type=3, n_group=4, topk_group=2)
    with pytest.warns(UserWarning, match="ignores n_group") as caught:
        PLANS["logits"](**arguments)
    assert caught[0].filename == __file__


def test_ignored_arguments_of_a_plan_are_checked() -> None:
    arguments = layer_arguments("routed", routing_bias=zeros(NUMPY, (3,), np.float32))
    with pytest.raises(ValueError, match="routing_bias must be"):
        PLANS["routed"](**arguments)
