"""Rules on the arrays of the FP8 operations: refused by name, in words, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe import validate
from cupy_moe.runtime.arrays import NumpyFramework, describe
from tests.array_kinds import ArrayKind
from tests.fp8_calls import (
    BF16,
    E4M3,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    NUM_TOKENS,
    NUMPY,
    OPERATIONS,
    TOP_K,
    aligned_bytes,
    assert_refused,
    both_operations,
    call,
    each_array,
    every_argument,
    host_kinds,
    numpy_arguments,
    shifted,
    strided,
    zeros,
)

# --- rules on every array -------------------------------------------------------------------------

OTHER_DTYPE = {  # argument: a wrong dtype, and the advice
    "topk_ids": (np.int64, r'must be int32, got int64\. Convert with topk_ids\.astype\("int32"\)'),
    "routing_logits": (np.float16, r"must be bfloat16 or float32, got float16\. Convert"),
    "routing_bias": (np.float16, "must be bfloat16 or float32, got float16"),
    "hidden_states": (np.uint8, r"must be float8_e4m3fn, got uint8\. View the codes"),
    "gemm1_weights": (np.int8, r"must be float8_e4m3fn, got int8\. View the codes"),
    "gemm2_weights": (ml_dtypes.float8_e5m2, r"got float8_e5m2\. Quantize with cupy_moe\.weights"),
    "output1_scales_scalar": (BF16, r"must be float32, got bfloat16\. Convert"),
    "output1_scales_gate_scalar": (np.float64, "must be float32, got float64"),
    "output2_scales_scalar": (np.float16, "must be float32, got float16"),
    "routing_replay_out": (np.int32, r"must be int16, got int32\. Convert"),
    "output": (np.float32, r"must be bfloat16, got float32\. Convert"),
    "gemm1_clamp_limit": (BF16, "must be float32, got bfloat16"),
    "workspace_buffer": (np.int32, "must be uint8 or int8, got int32"),
}
OPTIONAL = ("routing_bias", "routing_replay_out", "output", "gemm1_clamp_limit", "workspace_buffer")
SYMBOLS = {
    "topk_ids": "(num_tokens, top_k) = (5, 2)",
    "routing_logits": "(num_tokens, num_experts) = (5, 8)",
    "routing_bias": "(num_experts,) = (8,)",
    "gemm1_weights": "(local_num_experts, 2*intermediate_size, hidden_size) = (8, 256, 256)",
    "gemm2_weights": "(local_num_experts, hidden_size, intermediate_size) = (8, 256, 128)",
    "output1_scales_scalar": "(local_num_experts,) = (8,)",
    "output1_scales_gate_scalar": "(local_num_experts,) = (8,)",
    "output2_scales_scalar": "(local_num_experts,) = (8,)",
    "routing_replay_out": "(num_tokens, top_k) = (5, 2)",
    "output": "(num_tokens, hidden_size) = (5, 256)",
    "gemm1_clamp_limit": "(local_num_experts,) = (8,)",
}
VECTOR_ALIGNED = ("hidden_states", "gemm1_weights", "gemm2_weights", "output")


@both_operations
@host_kinds
def test_every_argument_is_accepted(kind: ArrayKind, operation: str) -> None:
    arguments = every_argument(operation, kind)
    accepted = call(operation, arguments)
    assert accepted.output.owner is arguments["output"]
    assert accepted.workspace_buffer.owner is arguments["workspace_buffer"]
    assert accepted.clamp_limit.owner is arguments["gemm1_clamp_limit"]


@each_array([name for name in OTHER_DTYPE if name not in OPTIONAL])
def test_required_array_is_missing(operation: str, name: str) -> None:
    arguments = {**every_argument(operation, NUMPY), name: None}
    assert_refused(operation, arguments, TypeError, rf"{name}: expected an array .*NoneType")


@pytest.mark.parametrize("value", [[[1, 2]], "array", 3.0], ids=["list", "str", "float"])
@each_array(OTHER_DTYPE)
def test_argument_is_no_array(operation: str, name: str, value: object) -> None:
    arguments = {**every_argument(operation, NUMPY), name: value}
    got = type(value).__name__
    assert_refused(operation, arguments, TypeError, rf"{name}: expected an array .*got {got}")


@each_array(OTHER_DTYPE)
@host_kinds
def test_wrong_dtype(kind: ArrayKind, operation: str, name: str) -> None:
    arguments = every_argument(operation, kind)
    dtype, pattern = OTHER_DTYPE[name]
    arguments[name] = kind.make(np.zeros(tuple(arguments[name].shape), dtype))
    assert_refused(operation, arguments, TypeError, rf"{name} .*{pattern}")


@pytest.mark.parametrize("change", ["flat", "extra axis", "shorter", "longer"])
@each_array(SYMBOLS)
@host_kinds
def test_wrong_shape(kind: ArrayKind, operation: str, name: str, change: str) -> None:
    arguments = every_argument(operation, kind)
    shape = tuple(arguments[name].shape)
    if name == "routing_replay_out":  # more rows than tokens are legal
        shape = (NUM_TOKENS, TOP_K)
    other = {
        "flat": (int(np.prod(shape)),) if len(shape) > 1 else (),
        "extra axis": (*shape, 1),
        "shorter": (shape[0] - 1, *shape[1:]),
        "longer": (*shape[:-1], shape[-1] + 1),
    }[change]
    dtype = np.dtype(describe(arguments[name]).dtype)
    arguments[name] = kind.make(np.zeros(other, dtype))
    pattern = rf"{name} must be {re.escape(SYMBOLS[name])}, got {re.escape(str(other))}"
    assert_refused(operation, arguments, ValueError, pattern)


@each_array([name for name in OTHER_DTYPE if name != "workspace_buffer"])
@host_kinds
def test_not_contiguous(kind: ArrayKind, operation: str, name: str) -> None:
    arguments = every_argument(operation, kind)
    arguments[name] = strided(kind, numpy_arguments(operation)[name])
    pattern = rf"{name} must be contiguous, strides \(.*\) for shape \(.*\), got strides \(.*2,?\)"
    assert_refused(operation, arguments, ValueError, pattern)


@each_array(VECTOR_ALIGNED)
@host_kinds
def test_vector_alignment(kind: ArrayKind, operation: str, name: str) -> None:
    arguments = every_argument(operation, kind)
    arguments[name] = shifted(kind, numpy_arguments(operation)[name])
    pattern = rf"{name} must start at a multiple of 16 bytes, got address 0x"
    assert_refused(operation, arguments, ValueError, pattern)


@each_array([n for n in OTHER_DTYPE if n not in VECTOR_ALIGNED and n != "workspace_buffer"])
@host_kinds
def test_other_arrays_start_at_any_element(kind: ArrayKind, operation: str, name: str) -> None:
    arguments = every_argument(operation, kind)
    arguments[name] = shifted(kind, numpy_arguments(operation)[name])
    call(operation, arguments)


def test_address_inside_an_element() -> None:
    arguments = every_argument("routed", NUMPY)
    size = arguments["output2_scales_scalar"].nbytes
    arguments["output2_scales_scalar"] = np.zeros(size + 1, np.uint8)[1:].view(np.float32)
    pattern = "output2_scales_scalar must start at a multiple of 4 bytes"
    assert_refused("routed", arguments, ValueError, pattern)


@pytest.mark.parametrize("device", [0, 1])
@each_array([name for name in OTHER_DTYPE if name != "hidden_states"])
def test_array_on_another_device(
    operation: str, name: str, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arrays of the call are on cuda:0 or in host memory, except one."""
    arguments = every_argument(operation, NUMPY)
    away = arguments[name]
    elsewhere = {0: (-1, 0), 1: (0, 1)}[device]  # of the others, of the one

    describe = NumpyFramework.describe

    def describe_elsewhere(self: NumpyFramework, x: Any, what: str) -> Any:
        return replace(describe(self, x, what), device=elsewhere[x is away])

    monkeypatch.setattr(NumpyFramework, "describe", describe_elsewhere)
    here, there = {0: ("cpu", "cuda:0"), 1: ("cuda:0", "cuda:1")}[device]
    pattern = rf"{name} must be on {here}, the device of hidden_states, got {there}\."
    mixed = r" Host and CUDA arrays cannot be mixed\." if device == 0 else "$"
    assert_refused(operation, arguments, ValueError, pattern + mixed)


def test_unsupported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "compute_capability", lambda device: (7, 5) if device else (8, 0))
    validate.require_supported_device("op", 0)
    with pytest.raises(NotImplementedError, match=r"^op: .* 8\.0 or newer, cuda:17 has 7\.5\."):
        validate.require_supported_device("op", 17)


# --- rules on single arguments --------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A change of a valid call that breaks one rule."""

    id: str
    change: Callable[[ArrayKind], dict[str, Any]]
    error: type[Exception]
    pattern: str
    operations: tuple[str, ...] = tuple(OPERATIONS)


def ids_and_weights(
    kind: ArrayKind,
    ids: Any = np.int32,
    weights: Any = np.float32,
    shape: tuple[int, ...] = (NUM_TOKENS, TOP_K),
) -> tuple[Any, Any]:
    return zeros(kind, (NUM_TOKENS, TOP_K), ids), zeros(kind, shape, weights)


ROUTED, LOGITS = ("routed",), ("logits",)
ARRAY_RULES = [
    # topk_ids
    Rule(
        "ids and weights in a list",
        lambda k: {"topk_ids": list(ids_and_weights(k))},
        TypeError,
        "topk_ids: expected an array .*got list",
        ROUTED,
    ),
    Rule(
        "ids alone in a tuple",
        lambda k: {"topk_ids": ids_and_weights(k)[:1]},
        ValueError,
        "topk_ids must be a packed array or a tuple of two .* got a tuple of 1",
        ROUTED,
    ),
    Rule(
        "tuple of three",
        lambda k: {"topk_ids": (*ids_and_weights(k), None)},
        ValueError,
        "topk_ids must be .*got a tuple of 3",
        ROUTED,
    ),
    Rule(
        "int64 ids in a tuple",
        lambda k: {"topk_ids": ids_and_weights(k, ids=np.int64)},
        TypeError,
        r"topk_ids\[0\] must be int32, got int64\. Convert",
        ROUTED,
    ),
    Rule(
        "weights before ids",
        lambda k: {"topk_ids": ids_and_weights(k)[::-1]},
        TypeError,
        r"topk_ids\[0\] must be int32, got float32",
        ROUTED,
    ),
    Rule(
        "float16 weights",
        lambda k: {"topk_ids": ids_and_weights(k, weights=np.float16)},
        TypeError,
        r"topk_ids\[1\] must be bfloat16 or float32, got float16",
        ROUTED,
    ),
    Rule(
        "weights of another shape",
        lambda k: {"topk_ids": ids_and_weights(k, shape=(NUM_TOKENS, TOP_K + 1))},
        ValueError,
        r"topk_ids\[1\] must be \(num_tokens, top_k\) = \(5, 2\), got \(5, 3\)",
        ROUTED,
    ),
    Rule(
        "strided weights",
        lambda k: {
            "topk_ids": (
                ids_and_weights(k)[0],
                strided(k, np.zeros((NUM_TOKENS, TOP_K), np.float32)),
            )
        },
        ValueError,
        r"topk_ids\[1\] must be contiguous",
        ROUTED,
    ),
    # hidden_states
    Rule(
        "float16 tokens",
        lambda k: {"hidden_states": zeros(k, (NUM_TOKENS, HIDDEN), np.float16)},
        NotImplementedError,
        r"hidden_states must be float8_e4m3fn, got float16\. Quantize with",
    ),
    Rule(
        "bfloat16 tokens",
        lambda k: {"hidden_states": zeros(k, (NUM_TOKENS, HIDDEN), BF16)},
        NotImplementedError,
        "hidden_states must be float8_e4m3fn, got bfloat16",
    ),
    Rule(
        "flat tokens",
        lambda k: {"hidden_states": zeros(k, (HIDDEN,), E4M3)},
        ValueError,
        r"hidden_states must be \(num_tokens, hidden_size\), got shape \(256,\)",
    ),
    Rule(
        "batched tokens",
        lambda k: {"hidden_states": zeros(k, (1, NUM_TOKENS, HIDDEN), E4M3)},
        ValueError,
        r"hidden_states must be .*got shape \(1, 5, 256\)",
    ),
    Rule(
        "hidden_size 192",
        lambda k: {"hidden_states": zeros(k, (NUM_TOKENS, 192), E4M3)},
        ValueError,
        "hidden_states must have a hidden_size that is a positive multiple of 128, got 192",
    ),
    Rule(
        "hidden_size 0",
        lambda k: {"hidden_states": zeros(k, (NUM_TOKENS, 0), E4M3)},
        ValueError,
        "hidden_size that is a positive multiple of 128, got 0",
    ),
    Rule(
        "other number of tokens",
        lambda k: {"hidden_states": zeros(k, (NUM_TOKENS + 1, HIDDEN), E4M3)},
        ValueError,
        r"(topk_ids|routing_logits) must be \(num_tokens, .*\) = \(6, .*got \(5, ",
    ),
    # weights
    Rule(
        "ungated weights for a gated activation",
        lambda k: {"gemm1_weights": zeros(k, (EXPERTS, INTERMEDIATE, HIDDEN), E4M3)},
        ValueError,
        r"\(8, 256, 256\), got \(8, 128, 256\)\. SwigluStep \(7\) is gated; not gated\? "
        r"Pass activation_type 2, 6, 9\.",
    ),
    Rule(
        "gated weights for an ungated activation",
        lambda _: {"activation_type": 6, "gemm1_clamp_limit": None},
        ValueError,
        r"gemm1_weights must be \(local_num_experts, intermediate_size, hidden_size\) = "
        r"\(8, 128, 256\), got \(8, 256, 256\)\. Relu2 \(6\) is not gated; gated\? Pass "
        r"activation_type 3, 4, 7, 10\.",
    ),
    Rule(
        "weights of all experts on one of two ranks",
        lambda _: {"local_num_experts": 4},
        ValueError,
        r"gemm1_weights must be .*= \(4, 256, 256\), got \(8, 256, 256\)",
    ),
    # the rest
    Rule(
        "limit without SwigluStep",
        lambda _: {"activation_type": 3},
        ValueError,
        r"gemm1_clamp_limit must be None unless activation_type is SwigluStep \(7\), got an array "
        r"with Swiglu \(3\)",
    ),
    Rule(
        "replay buffer with too few rows",
        lambda k: {"routing_replay_out": zeros(k, (NUM_TOKENS - 1, TOP_K), np.int16)},
        ValueError,
        r"routing_replay_out must be \(num_tokens, top_k\) = \(5, 2\), got \(4, 2\)",
    ),
    Rule(
        "longer replay buffer of another width",
        lambda k: {"routing_replay_out": zeros(k, (NUM_TOKENS + 3, TOP_K - 1), np.int16)},
        ValueError,
        r"routing_replay_out must be .*got \(8, 1\)",
    ),
    Rule(
        "two-dimensional workspace",
        lambda k: {"workspace_buffer": aligned_bytes(k, 1024).reshape(2, 512)},
        ValueError,
        r"workspace_buffer must be 1-D, got shape \(2, 512\)",
    ),
    Rule(
        "strided workspace",
        lambda k: {"workspace_buffer": aligned_bytes(k, 1024)[::2]},
        ValueError,
        r"workspace_buffer must be contiguous, .*got strides \(2,\)",
    ),
    Rule(
        "misaligned workspace",
        lambda k: {"workspace_buffer": aligned_bytes(k, 1024, offset=128)},
        ValueError,
        "workspace_buffer must start at a multiple of 256 bytes",
    ),
    Rule(
        "workspace without finalization",
        lambda _: {"do_finalize": False},
        ValueError,
        "workspace_buffer must be None unless do_finalize is True",
    ),
]


@pytest.mark.parametrize(
    ("operation", "rule"),
    [pytest.param(o, rule, id=f"{o}-{rule.id}") for rule in ARRAY_RULES for o in rule.operations],
)
@host_kinds
def test_array_rule(kind: ArrayKind, operation: str, rule: Rule) -> None:
    arguments = {**every_argument(operation, kind), **rule.change(kind)}
    assert_refused(operation, arguments, rule.error, rule.pattern)
