"""Rules on single arguments of the FP4 operations: refused by name, in words, before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fp4_calls import (
    BF16,
    E4M3,
    EXPERTS,
    FORMS,
    HIDDEN,
    MODES,
    NUM_TOKENS,
    TOP_K,
    accepted,
    assert_refused,
    case_of,
    every_argument,
    fp4_arguments,
    run,
)
from tests.fp4_calls import __file__ as calls_file
from tests.moe_cases import STRATEGIES, fp4_call

NOT_SUPPORTED = NotImplementedError
WHOLE, PARTITIONED = ("whole",), STRATEGIES
WEIGHTS = ("gemm1_weights", "gemm2_weights")
WEIGHT_SCALES = ("gemm1_weights_scale", "gemm2_weights_scale")
ACTIVATION = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
E8M0 = ml_dtypes.float8_e8m0fnu


@dataclass(frozen=True)
class Rule:
    """A change of a valid call that breaks one rule."""

    id: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    error: type[Exception]
    pattern: str
    forms: tuple[str, ...] = FORMS
    modes: tuple[str, ...] = MODES


def zeros(name: str, shape: tuple[int, ...], dtype: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda _: {name: np.zeros(shape, dtype)}


def value(name: str, x: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda _: {name: x}


def tokens_of(hidden_size: int, like: np.ndarray) -> np.ndarray:
    columns = hidden_size // 2 if like.dtype == np.uint8 else hidden_size
    return np.zeros((NUM_TOKENS, columns), like.dtype)


def activation(number: int) -> Callable[[Any], dict[str, Any]]:
    return lambda _: dict.fromkeys(ACTIVATION) | {"activation_type": number}


def plain(id: str, name: str, x: Any, error: type[Exception], pattern: str) -> Rule:
    return Rule(id, value(name, x), error, pattern)


RULES = [
    plain("per_token_scale", "per_token_scale", np.ones(9), NOT_SUPPORTED, "must be None"),
    *(
        Rule(b, value(b, np.ones((4, 8))), NOT_SUPPORTED, f"{b} must be None", WHOLE)
        for b in ("gemm1_bias", "gemm2_bias")
    ),
    *(
        Rule(
            f"hidden_states {np.dtype(d).name}",
            zeros("hidden_states", (NUM_TOKENS, HIDDEN), d),
            ValueError,
            "FP4 MoE supports NVFP4, MXFP8, or BF16 activations",
        )
        for d in (np.float16, np.float32, np.int8, ml_dtypes.float8_e5m2)
    ),
    Rule(
        "partitioned message",
        zeros("hidden_states", (NUM_TOKENS, HIDDEN), np.float16),
        ValueError,
        "Partitioned FP4 MoE supports NVFP4, MXFP8, or BF16 activations",
        PARTITIONED,
    ),
    Rule(
        "no resources",
        value("partition_resources", None),
        ValueError,
        r"partition_resources must be a MoePartitionResources, got None\. Arrays in host",
        PARTITIONED,
    ),
    Rule(
        "streams for resources",
        value("partition_resources", (None, None)),
        ValueError,
        "partition_resources must be a MoePartitionResources, got tuple",
        PARTITIONED,
    ),
    *(
        Rule(
            f"strategy {s}",
            value("partition_strategy", s),
            ValueError,
            "partition_strategy must be 'tp_n_tp_n' or 'tp_n_tp_k', got ",
            PARTITIONED,
        )
        for s in (None, "tp_k_tp_n", 0)
    ),
    *(
        Rule(
            f"{name} {kind}",
            lambda a, name=name, cut=cut: {name: cut(a[name])},
            ValueError,
            f"{name} must be a list of exactly two shards",
            PARTITIONED,
        )
        for name in (*WEIGHTS, *WEIGHT_SCALES)
        for kind, cut in {
            "alone": lambda shards: shards[:1],
            "three": lambda shards: [*shards, shards[0]],
            "None": lambda _: None,
            "stacked": np.stack,
        }.items()
    ),
    plain("MajorMn", "weight_layout", 1, ValueError, r"MajorK \(0\) or BlockMajorK \(2\), got 1"),
    plain("layout 3", "weight_layout", 3, ValueError, "weight_layout must be .*got 3"),
    plain("layout None", "weight_layout", None, TypeError, "weight_layout must be an integer"),
    plain("3-D BlockMajorK", "weight_layout", 2, ValueError, r"gemm1_weights.*block 64 or 128"),
    *(
        Rule(f"activation {a}", activation(a), NOT_SUPPORTED, rf"\({a}\) is not gated; .*Situ")
        for a in (0, 1, 2, 6, 9, 12)
    ),
    *(
        Rule(f"activation {a}", activation(a), NOT_SUPPORTED, rf"\({a}\) has no FP4 form")
        for a in (5, 8, 13)
    ),
    Rule(
        "SwigluStep in partitions",
        activation(7),
        NOT_SUPPORTED,
        r"SwigluStep \(7\) has no partitioned form",
        PARTITIONED,
    ),
    Rule(
        "SwigluStep of other tokens",
        activation(7),
        NOT_SUPPORTED,
        r"SwigluStep \(7\) needs hidden_states in NVFP4",
        WHOLE,
        ("mxfp8", "bf16"),
    ),
    *(
        Rule(
            f"SwigluStep with {name}",
            lambda a, name=name: activation(7)(a) | {name: np.ones(EXPERTS, np.float32)},
            ValueError,
            rf"{name} must be None for activation_type SwigluStep \(7\)",
            WHOLE,
            ("nvfp4",),
        )
        for name in ACTIVATION[:2]
    ),
    *(
        Rule(f"activation {a}", activation(a), ValueError, "activation_type must be one of")
        for a in (11, 14, -1)
    ),
    *(
        Rule(
            f"Geglu with {name}",
            lambda a, name=name: activation(4)(a) | {name: np.ones(EXPERTS, np.float32)},
            ValueError,
            rf"{name} must be None for activation_type Geglu \(4\)",
        )
        for name in ACTIVATION
    ),
    Rule(
        "scales of BF16",
        zeros("hidden_states_scale", (NUM_TOKENS, HIDDEN // 32), E4M3),
        ValueError,
        "hidden_states_scale must be None for hidden_states in bfloat16",
        modes=("bf16",),
    ),
    Rule(
        "E8M0 for E4M3",
        lambda a: {"hidden_states_scale": a["hidden_states_scale"].view(E8M0)},
        ValueError,
        "hidden_states_scale must be float8_e4m3fn or uint8, got float8_e8m0fnu",
        modes=("nvfp4",),
    ),
    Rule(
        "padded scales",
        zeros("hidden_states_scale", (NUM_TOKENS, 32), E4M3),
        ValueError,
        r"hidden_states_scale must have num_tokens \* hidden_size/16 = 144 elements",
        modes=("nvfp4",),
    ),
    Rule(
        "flat tokens",
        lambda a: {"hidden_states": a["hidden_states"].ravel()},
        ValueError,
        r"hidden_states must be \(num_tokens, hidden_size(/2)?\), got shape",
    ),
    *(
        Rule(
            f"hidden_size {size}",
            lambda a, size=size: {"hidden_states": tokens_of(size, a["hidden_states"])},
            ValueError,
            f"hidden_size that is a positive multiple of {multiple}.*, got {size}",
            forms,
        )
        for size, multiple, forms in (
            (0, "(128|256)", FORMS),
            (192, "(128|256)", FORMS),
            (128, "256 with tp_n_tp_n, which halves the rows of FC2", ("tp_n_tp_n",)),
        )
    ),
    Rule(
        "other number of tokens",
        lambda a: {"hidden_states": a["hidden_states"][1:]},
        ValueError,
        r"hidden_states_scale must have num_tokens .* got (144|72)|topk_ids must be .*\(8, 2\)",
    ),
    plain("I 192", "intermediate_size", 192, ValueError, "positive multiple of 128, got 192"),
    plain("I 0", "intermediate_size", 0, ValueError, "positive multiple of 128, got 0"),
    plain("I float", "intermediate_size", 256.0, TypeError, "must be an integer"),
    plain("I 128", "intermediate_size", 128, ValueError, "gemm1_weights|intermediate_size"),
    Rule(
        "half of I in half tiles",
        value("intermediate_size", 384),
        ValueError,
        "intermediate_size must be a multiple of 256 with tp_n_tp_k, .* got 384",
        ("tp_n_tp_k",),
        ("mxfp8", "bf16"),
    ),
    plain("top_k 0", "top_k", 0, ValueError, r"top_k must be in \[1, num_experts\]"),
    plain("top_k 5", "top_k", 5, ValueError, r"top_k must be in \[1, num_experts\] = \[1, 4\]"),
    plain("EL 0", "local_num_experts", 0, ValueError, "local_num_experts must be in"),
    plain("EL 5", "local_num_experts", 5, ValueError, "local_num_experts must be in"),
    plain("O -1", "local_expert_offset", -1, ValueError, "local_expert_offset must be in"),
    plain("O 1", "local_expert_offset", 1, ValueError, r"local_expert_offset .* = \[0, 0\]"),
    plain("E 0", "num_experts", 0, ValueError, "num_experts must be at least 1"),
    plain("method 10", "routing_method_type", 10, ValueError, "routing_method_type must be 0"),
    plain("method 3", "routing_method_type", 3, ValueError, "top_k must be 1 for .*Llama4"),
    plain("tune 0", "tune_max_num_tokens", 0, ValueError, "tune_max_num_tokens must be at least"),
    plain("do_finalize 1", "do_finalize", 1, TypeError, "do_finalize must be True or False"),
    plain("enable_pdl 1", "enable_pdl", 1, TypeError, "enable_pdl must be True or False"),
    plain("norm 1", "norm_topk_prob", 1, TypeError, "norm_topk_prob must be True or False"),
    plain("factor", "routed_scaling_factor", "2", TypeError, "must be a real number or None"),
    plain("factor 1e39", "routed_scaling_factor", 1e39, ValueError, "the range of FP32.* 1e.39"),
    Rule("no routing", value("topk_ids", None), ValueError, "topk_ids must be given", PARTITIONED),
    Rule("no ids", value("topk_ids", None), ValueError, "topk_ids must be given", WHOLE),
    *(
        Rule(f"input mode {m}", value("routing_input_mode", m), ValueError, pattern, WHOLE)
        for m, pattern in {
            0: r"routing_logits must be given for .*FromLogits \(0\), got None\. Pass",
            2: r"topk_weights must be given for .*UnpackedPrecomputed \(2\)",
            3: r"routing_input_mode must be one of FromLogits \(0\), .*got 3",
        }.items()
    ),
    Rule(
        "logits beside ids",
        zeros("routing_logits", (NUM_TOKENS, EXPERTS), np.float32),
        ValueError,
        r"routing_logits must be None for routing_input_mode PackedPrecomputed \(1\)",
        WHOLE,
    ),
    Rule(
        "weights beside packed ids",
        zeros("topk_weights", (NUM_TOKENS, 2), np.float32),
        ValueError,
        r"topk_weights must be None for routing_input_mode PackedPrecomputed \(1\), .*mode 2",
        WHOLE,
    ),
    *(
        Rule(
            f"topk_weights {id}",
            lambda _, w=w: {"topk_weights": w, "routing_input_mode": 2},
            ValueError,
            pattern,
            WHOLE,
        )
        for id, w, pattern in (
            ("float16", np.zeros((NUM_TOKENS, TOP_K), np.float16), "topk_weights must be bfloat16"),
            ("shape", np.zeros((NUM_TOKENS, 3), np.float32), r"topk_weights .*got \(9, 3\)"),
            ("gaps", np.zeros((NUM_TOKENS, 4), BF16)[:, ::2], "topk_weights must be contiguous"),
        )
    ),
    Rule(
        "short replay",
        zeros("routing_replay_out", (NUM_TOKENS - 1, TOP_K), np.int16),
        ValueError,
        r"routing_replay_out must be \(num_tokens, top_k\) = \(9, 2\), got \(8, 2\)",
    ),
]
CHANGES = [
    pytest.param(mode, form, rule, id=f"{rule.id}-{mode}-{form}")
    for rule in RULES
    for mode, form in product(rule.modes, rule.forms)
]


@pytest.mark.parametrize(("mode", "form", "rule"), CHANGES)
def test_rule(mode: str, form: str, rule: Rule) -> None:
    arguments = every_argument(mode, form)
    assert_refused(form, arguments | rule.change(arguments), rule.error, rule.pattern)


# --- BlockMajorK ----------------------------------------------------------------------------------


def blocked(mode: str, form: str, block: int) -> dict[str, Any]:
    """A valid call on weights in blocks."""
    case, strategy = case_of(mode), None if form == "whole" else form
    call = fp4_call(mode, case, strategy, block_major_k_bytes=block)
    weights = {
        f"{w}_weights": call[w][0] if strategy is None else call[w] for w in ("gemm1", "gemm2")
    }
    return fp4_arguments(mode, case, form) | weights | {"weight_layout": 2}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_blocks(mode: str, form: str) -> None:
    accepted(form, blocked(mode, form, 64))
    small = blocked(mode, form, 32)
    assert_refused(form, small, ValueError, r"gemm1_weights.* block 64 or 128 .*got shape \(4, 4,")
    mixed = blocked(mode, form, 64)
    other = blocked(mode, form, 32 if form == "tp_n_tp_k" else 128)["gemm2_weights"]
    pattern = "block 64 or 128" if form == "tp_n_tp_k" else "blocks of 64 bytes like gemm1_weights"
    assert_refused(form, mixed | {"gemm2_weights": other}, ValueError, f"gemm2_weights.*{pattern}")
    flat = blocked(mode, form, 64) | {"weight_layout": 0}
    assert_refused(form, flat, ValueError, r"gemm1_weights.* must be \(.*, got \(4, 2, ")


def test_blocks_do_not_cross_the_cut_of_k() -> None:
    arguments = blocked("nvfp4", "tp_n_tp_k", 64)
    arguments["intermediate_size"] = 128  # 32 bytes in half a row
    for name in ("gemm1_weights", "gemm1_weights_scale"):
        half = [np.ascontiguousarray(x[:, :, :128]) for x in arguments[name]]
        arguments[name] = (
            half if name.endswith("weights") else [x[:, :128] for x in arguments[name]]
        )
    arguments["gemm1_weights_scale"] = [x.copy() for x in arguments["gemm1_weights_scale"]]
    assert_refused("tp_n_tp_k", arguments, ValueError, r"gemm2_weights\[0\] .* of the 32 in a row")


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_groups_of_llama4_are_a_warning_to_the_caller(form: str) -> None:
    arguments = fp4_arguments("bf16", case_of("bf16", "logits_llama4"), form, n_group=2)
    with pytest.warns(UserWarning, match="Llama4 .* ignores n_group") as caught:
        run(form, arguments)
    assert caught[0].filename == calls_file


@pytest.mark.parametrize("form", FORMS)
def test_limits_of_routing_hold_for_logits_only(form: str) -> None:
    grouped = {"routing_method_type": 2, "n_group": 3, "topk_group": 1}
    accepted(form, every_argument("bf16", form) | grouped)
    arguments = fp4_arguments("bf16", case_of("bf16", "logits_topk_raw"), form) | grouped
    assert_refused(form, arguments, ValueError, "needs num_experts % n_group == 0")
