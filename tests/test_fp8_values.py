"""Plain arguments of the FP8 operations: rules, kinds, and the problem that they make."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupy_moe.fused_moe import (
    ActivationType,
    RoutingMethodType,
    execution,
    fp8_layers,
    host,
    operands,
)
from cupy_moe.fused_moe.settings import MoeSettings
from cupy_moe.problem import RoutingSource
from cupy_moe.runtime.arrays import describe
from tests import fp8_calls
from tests.array_kinds import ArrayKind
from tests.fp8_calls import (
    BF16,
    E4M3,
    EXPERTS,
    GROUPED,
    HIDDEN,
    NUM_TOKENS,
    NUMPY,
    OPERATIONS,
    TOP_K,
    aligned_bytes,
    assert_refused,
    both_operations,
    call,
    host_kinds,
    layer_arguments,
    on,
)

LOGITS = ("logits",)

# --- plain values ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """Plain arguments that break one rule together."""

    arguments: dict[str, Any]
    pattern: str
    error: type[Exception] = ValueError
    operations: tuple[str, ...] = tuple(OPERATIONS)

    @property
    def id(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.arguments.items())


DEEPSEEK = {"routing_method_type": 2, "local_num_experts": 2, "top_k": 2}


def grouped(pattern: str, **arguments: Any) -> Value:
    return Value({**DEEPSEEK, **arguments}, f"n_group > 1 needs {pattern}, got", operations=LOGITS)


VALUES = [
    Value({"top_k": 0}, r"top_k must be in \[1, num_experts\] = \[1, 8\], got 0"),
    Value({"top_k": -1}, "top_k must be .*got -1"),
    Value({"top_k": 9}, "top_k must be .*got 9"),
    Value({"num_experts": 0}, "num_experts must be at least 1, got 0"),
    Value({"num_experts": 2**31}, "num_experts must be at most 2147483647, got 2147483648"),
    Value({"n_group": -2}, "n_group must not be negative, got -2"),
    Value({"topk_group": -1}, "topk_group must not be negative, got -1"),
    Value({"local_num_experts": 0}, r"local_num_experts must be in \[1, num_experts\].*got 0"),
    Value({"local_num_experts": 9}, "local_num_experts must be .*got 9"),
    Value({"local_expert_offset": -1}, r"local_expert_offset must be in \[0, .*got -1"),
    Value({"local_expert_offset": 1}, r"local_expert_offset must be in .*= \[0, 0\], got 1"),
    Value({"intermediate_size": 64}, "intermediate_size must be a positive multiple of 128.*64"),
    Value({"intermediate_size": 0}, "intermediate_size must be .*got 0"),
    Value({"intermediate_size": -128}, "intermediate_size must be .*got -128"),
    Value({"tune_max_num_tokens": 0}, "tune_max_num_tokens must be at least 1, got 0"),
    *(
        Value({"activation_type": a}, rf"activation_type must be one of Silu \(2\).*got {got}\.")
        for a, got in {
            0: r"Gelu \(0\)",
            1: r"Relu \(1\)",
            5: r"SwigluBias \(5\)",
            8: r"GegluTanh \(8\)",
            11: "11",
            12: "12",
            13: "13",
            -1: "-1",
        }.items()
    ),
    *(
        Value({"routing_method_type": m}, rf"routing_method_type must be 0 .*to 9 .*got {m}\.")
        for m in (10, 11, -1)
    ),
    Value({"routing_method_type": 3}, r"top_k must be 1 for .*Llama4 \(3\), got 2"),
    Value(
        {"use_routing_scales_on_input": True},
        r"use_routing_scales_on_input needs routing_method_type Llama4 \(3\), got Default \(0\)",
    ),
    Value(
        {"routing_method_type": 2, "n_group": 2, "top_k": 23, "num_experts": 32},
        "n_group > 1 needs top_k <= 22, got .*top_k 23",
    ),
    Value(
        {"routing_method_type": 2, "n_group": 8, "topk_group": 5, "num_experts": 16},
        "n_group > 1 needs topk_group <= 4, got .*topk_group 5",
    ),
    # routing from logits
    Value({"top_k": 33, "num_experts": 64}, "top_k must be at most 32", operations=LOGITS),
    Value(
        {"num_experts": 2049},
        "num_experts up to 2048, got 2049. Select the experts beforehand",
        NotImplementedError,
        LOGITS,
    ),
    grouped("n_group <= 8", num_experts=32, n_group=16, topk_group=2),
    grouped("num_experts % 4 == 0", num_experts=6, n_group=2, topk_group=1),
    grouped("num_experts % n_group == 0", num_experts=8, n_group=3, topk_group=1),
    grouped("num_experts / n_group >= 2", num_experts=8, n_group=8, topk_group=4),
    grouped("num_experts / n_group <= 32", num_experts=68, n_group=2, topk_group=1),
    grouped("1 <= topk_group <= n_group", num_experts=8, n_group=2, topk_group=None),
    grouped("1 <= topk_group <= n_group", num_experts=8, n_group=2, topk_group=3),
    grouped("1 <= topk_group <= n_group", num_experts=8, n_group=2, topk_group=-1),
    grouped(
        r"top_k <= topk_group \* num_experts / n_group",
        num_experts=8,
        n_group=4,
        topk_group=1,
        top_k=3,
    ),
]


@pytest.mark.parametrize(
    ("operation", "value"),
    [pytest.param(o, v, id=f"{o}-{v.id}") for v in VALUES for o in v.operations],
)
def test_value_rule(operation: str, value: Value) -> None:
    arguments = {**layer_arguments(operation), **value.arguments}
    assert_refused(operation, arguments, value.error, value.pattern)


INTEGERS = [
    "num_experts",
    "top_k",
    "n_group",
    "topk_group",
    "intermediate_size",
    "local_expert_offset",
    "local_num_experts",
    "routing_method_type",
    "tune_max_num_tokens",
    "activation_type",
]
MAY_BE_NONE = ("n_group", "topk_group")
FLAGS = [
    *((o, flag) for o in OPERATIONS for flag in ("use_routing_scales_on_input", "do_finalize")),
    *((o, "enable_pdl") for o in OPERATIONS),
    ("logits", "norm_topk_prob"),
]


@pytest.mark.parametrize("kind", [bool, float, np.float32, str, None, lambda v: [v]])
@pytest.mark.parametrize("name", INTEGERS)
@both_operations
def test_integers_of_other_kinds(operation: str, name: str, kind: Any) -> None:
    arguments = {"activation_type": 3, "tune_max_num_tokens": 8192, **layer_arguments(operation)}
    value = None if kind is None else kind(arguments[name] or 0)
    if value is None and name in MAY_BE_NONE:
        call(operation, {**arguments, name: value})
        return
    call(operation, arguments)  # now remembered: an equal value of another kind must not pass
    got = rf"{re.escape(repr(value))} \({type(value).__name__}\)"
    pattern = rf"{name} must be an integer, got {got}\."
    assert_refused(operation, {**arguments, name: value}, TypeError, pattern)


@pytest.mark.parametrize("value", [0, 1, 1.0, "True", None, [True]], ids=repr)
@pytest.mark.parametrize(("operation", "name"), FLAGS)
def test_flags_of_other_kinds(operation: str, name: str, value: object) -> None:
    arguments = {**layer_arguments(operation), name: value}
    if name == "enable_pdl" and value is None:
        call(operation, arguments)
        return
    pattern = rf"{name} must be True or False, got {re.escape(repr(value))}"
    assert_refused(operation, arguments, TypeError, pattern)


@pytest.mark.parametrize("value", ["1", True, 1j, np.complex64(1), [1.0]], ids=repr)
@both_operations
def test_scaling_factor_of_other_kinds(operation: str, value: object) -> None:
    arguments = {**layer_arguments(operation), "routed_scaling_factor": value}
    pattern = r"routed_scaling_factor must be a real number or None, got "
    assert_refused(operation, arguments, TypeError, pattern)


def test_long_values_are_cut_in_messages() -> None:
    arguments = {**layer_arguments("routed"), "top_k": "x" * 500}
    assert_refused("routed", arguments, TypeError, r"got 'x{50,60}\.\.\. \(str\)\.$")


# --- what passes ----------------------------------------------------------------------------------


@both_operations
def test_equal_integers_of_numpy_and_enums(operation: str) -> None:
    arguments = {"activation_type": 3, "tune_max_num_tokens": 8192, **layer_arguments(operation)}
    for name in INTEGERS:
        if arguments[name] is not None:
            arguments[name] = np.int64(arguments[name])
    arguments |= {"do_finalize": np.True_, "enable_pdl": np.False_}
    arguments["routed_scaling_factor"] = np.float32(2.5)
    assert call(operation, arguments).enable_pdl is False
    arguments["activation_type"] = ActivationType.Swiglu
    arguments["routing_method_type"] = RoutingMethodType.TopK
    call(operation, arguments)


@pytest.mark.parametrize("method", [m for m in RoutingMethodType if m < 10])
@both_operations
def test_every_routing_method(operation: str, method: RoutingMethodType) -> None:
    top_k = 1 if method is RoutingMethodType.Llama4 else TOP_K
    call(operation, layer_arguments(operation, top_k=top_k, routing_method_type=int(method)))


@pytest.mark.parametrize("activation", sorted(operands.ACTIVATIONS))
@both_operations
def test_every_activation(operation: str, activation: ActivationType) -> None:
    call(operation, layer_arguments(operation, activation))


@pytest.mark.parametrize(
    "groups",
    [
        {"n_group": 8, "topk_group": 4, "num_experts": 256, "top_k": 22},  # 8 groups of 32
        {"n_group": 4, "topk_group": 1, "num_experts": 8, "top_k": 2},  # the whole group
        {"n_group": 1, "topk_group": 9},  # ungrouped: without effect
        {"n_group": 0, "topk_group": None},
    ],
    ids=str,
)
def test_groups_within_limits(groups: dict[str, Any]) -> None:
    arguments = {**layer_arguments("logits"), **groups, "routing_method_type": 2}
    arguments["routing_logits"] = np.zeros((NUM_TOKENS, arguments["num_experts"]), np.float32)
    call("logits", arguments)


def test_groups_without_effect_on_given_routing() -> None:
    """Only two limits of grouped routing hold where nothing is selected."""
    for groups in ({"n_group": 3, "topk_group": 4}, {"n_group": 100, "topk_group": None}):
        call("routed", {**layer_arguments("routed"), **groups, "routing_method_type": 2})


def test_many_slots_without_selection() -> None:
    arguments = {**layer_arguments("routed", top_k=EXPERTS), "num_experts": 5000, "top_k": 40}
    arguments["topk_ids"] = np.zeros((NUM_TOKENS, 40), np.int32)
    call("routed", arguments)


@host_kinds
def test_one_token_with_any_row_stride(kind: ArrayKind) -> None:
    arguments = on(kind, layer_arguments("routed", num_tokens=1))
    rows = kind.make(np.zeros((2, 2, HIDDEN), E4M3))
    arguments["hidden_states"] = rows[:1, 0]
    assert describe(arguments["hidden_states"]).strides == (2 * HIDDEN, 1)
    call("routed", arguments)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@both_operations
def test_bias_of_a_method_without_bias_is_no_operand(operation: str, dtype: Any) -> None:
    arguments = {**layer_arguments(operation), "routing_bias": np.zeros(EXPERTS, dtype)}
    assert call(operation, arguments).routing_bias is None
    arguments["routing_method_type"] = int(RoutingMethodType.MiniMax2)
    assert (call(operation, arguments).routing_bias is None) == (operation == "routed")


def test_empty_and_signed_workspace() -> None:
    for buffer in (aligned_bytes(NUMPY, 0), aligned_bytes(NUMPY, 64, np.int8)):
        call("routed", {**layer_arguments("routed"), "workspace_buffer": buffer})


def test_llama4_warns_about_groups() -> None:
    arguments = layer_arguments("logits", top_k=1, routing_method_type=3, n_group=4, topk_group=2)
    with pytest.warns(UserWarning, match=r"Llama4 \(3\) ignores n_group and topk_group") as caught:
        call("logits", arguments)
    assert caught[0].filename == fp8_calls.__file__  # who called the operation


@pytest.mark.parametrize(
    "arguments",
    [
        {"routing_method_type": 3, "n_group": None, "topk_group": None},
        {"routing_method_type": 3, "n_group": 1, "topk_group": 1},
        {"routing_method_type": 0, "n_group": 4, "topk_group": 2},
    ],
    ids=str,
)
def test_other_calls_do_not_warn(arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("logits", {**layer_arguments("logits", top_k=1), **arguments})


# --- problems -------------------------------------------------------------------------------------


def problem_of(operation: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """The problem that a call is planned by."""
    seen = []
    monkeypatch.setattr(fp8_layers, "bind", execution.bind)
    monkeypatch.setattr(host, "HostLayer", lambda problem, _operands: seen.append(problem))
    with pytest.raises(AttributeError):  # there is no layer
        OPERATIONS[operation](**{**layer_arguments(operation), **changes})
    return seen[0]


def test_choices_without_effect_share_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = problem_of("routed", monkeypatch)
    assert plain.routing_source is RoutingSource.Packed
    bias = np.zeros(EXPERTS, np.float32)
    for change in (
        {**GROUPED, "routed_scaling_factor": 2.5},
        {"routing_bias": bias, "routing_method_type": 7},
        {"enable_pdl": True, "tune_max_num_tokens": 1},
    ):
        assert problem_of("routed", monkeypatch, **change) == plain
    plain = problem_of("logits", monkeypatch)
    for change in (
        {"n_group": 4, "topk_group": 2},
        {"routing_bias": bias},
        {"norm_topk_prob": False},
    ):
        assert problem_of("logits", monkeypatch, **change) == plain


def test_choices_with_effect_make_another_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        problem_of("logits", monkeypatch, **change)
        for change in (
            {},
            GROUPED,
            {"routing_method_type": 2},
            {"routing_method_type": 6},
            {"routing_method_type": 6, "norm_topk_prob": False},
            {"routing_method_type": 7, "routing_bias": np.zeros(EXPERTS, np.float32)},
            {"routing_method_type": 7, "routing_bias": np.zeros(EXPERTS, BF16)},
            {"routing_logits": np.zeros((NUM_TOKENS, EXPERTS), BF16)},
            {"do_finalize": False},
        )
    ]
    assert len(set(seen)) == len(seen)


def test_more_slots_than_indices() -> None:
    settings = fp8_layers.moe_settings(
        "op", operands.ACTIVATIONS, False, 8, 8, None, None, 128, 0, 8, False, 0, True, None, 8192,
        3, True,
    )  # fmt: skip
    make = execution._problem
    arguments = (HIDDEN, RoutingSource.Packed, "bfloat16", None, None)
    assert make("op", settings, 2**27, *arguments).num_slots == 2**30
    with pytest.raises(NotImplementedError, match=r"^op: num_tokens \* top_k must be at most"):
        make("op", settings, 2**27 + 1, *arguments)


def test_more_experts_than_the_permutation_counts() -> None:
    def settings(experts: int) -> MoeSettings:
        return fp8_layers.moe_settings(
            "op", operands.ACTIVATIONS, False, 4096, 8, None, None, 128, 0, experts, False, 0, True,
            None, 8192, 3, True,
        )  # fmt: skip

    make = execution._problem
    arguments = (1, HIDDEN, RoutingSource.Packed, "bfloat16", None, None)
    assert make("op", settings(2048), *arguments).local_num_experts == 2048
    with pytest.raises(NotImplementedError, match=r"^op: local_num_experts must be at most 2048"):
        make("op", settings(2049), *arguments)
