"""The FP8 operations as users call them, on host arrays of NumPy and torch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.fused_moe import (
    ActivationType,
    RoutingMethodType,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.reference.routing import select_experts
from cupy_moe.testing.compare import (
    FP8_TIER_A,
    FP8_TIER_A_GEGLU,
    assert_bit_equal,
    assert_within,
    compare,
)
from cupy_moe.testing.golden import GoldenCase, golden_fp8_arguments, load_golden_cases
from cupy_moe.testing.inputs import INVALID_IDS, make_topk
from cupy_moe.weights import pack_topk_ids
from tests.array_kinds import ArrayKind
from tests.fp8_calls import (
    BF16,
    EXPERTS,
    GROUPED,
    HIDDEN,
    NUM_TOKENS,
    OPERATIONS,
    TOP_K,
    aligned_bytes,
    both_operations,
    host_kinds,
    layer_arguments,
    on,
)

GOLDEN = load_golden_cases(Path(__file__).parent / "data" / "fp8_moe.npz")
NAN_ROWS = np.full((NUM_TOKENS, HIDDEN), np.nan, BF16)

routed_moe = trtllm_fp8_per_tensor_scale_routed_moe
logits_moe = trtllm_fp8_per_tensor_scale_moe


def is_finalized(case: GoldenCase) -> bool:
    return bool(case.parameters["do_finalize"])


def golden(cases: list[GoldenCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases])


# --- golden vectors -------------------------------------------------------------------------------


@golden([case for case in GOLDEN if is_finalized(case)])
@host_kinds
def test_golden_output(kind: ArrayKind, case: GoldenCase) -> None:
    out = kind.host(routed_moe(**on(kind, golden_fp8_arguments(case))))
    assert out.dtype == BF16
    is_geglu = case.parameters["activation_type"] == ActivationType.Geglu
    expected = case.arrays["out"]
    assert_within(compare(out, expected), FP8_TIER_A_GEGLU if is_geglu else FP8_TIER_A, case.name)
    assert_bit_equal(out[~expected.any(axis=1)], expected[~expected.any(axis=1)])  # nothing live


@golden([case for case in GOLDEN if not is_finalized(case)])
@host_kinds
def test_golden_rows(kind: ArrayKind, case: GoldenCase) -> None:
    arguments = on(kind, golden_fp8_arguments(case))
    result = routed_moe(**arguments)
    assert type(result) is list
    rows, weights, row_of_slot = (kind.host(x) for x in result)
    live = case.arrays["live_u8"].reshape(-1).astype(bool)
    num_tokens, top_k = case.arrays["live_u8"].shape

    assert rows.dtype == BF16
    assert rows.shape[1] == case.parameters["hidden_size"]
    assert (row_of_slot.dtype, row_of_slot.shape) == (np.int32, (num_tokens * top_k,))
    assert (row_of_slot[~live] == -1).all()
    used = row_of_slot[live]
    assert ((used >= 0) & (used < len(rows))).all()
    assert len(set(used)) == len(used)
    expected = case.arrays["z"].reshape(num_tokens * top_k, -1)
    assert_within(compare(rows[used], expected[live]), FP8_TIER_A, case.name)

    if isinstance(arguments["topk_ids"], tuple):
        assert result[1] is arguments["topk_ids"][1]
    else:
        assert_bit_equal(weights, case.arrays["weights"])


# --- arguments and results ------------------------------------------------------------------------


LAYER_PARAMETERS = """
    routing_bias hidden_states gemm1_weights output1_scales_scalar output1_scales_gate_scalar
    gemm2_weights output2_scales_scalar num_experts top_k n_group topk_group intermediate_size
    local_expert_offset local_num_experts routed_scaling_factor use_routing_scales_on_input
    routing_method_type=0 do_finalize=True enable_pdl=None tune_max_num_tokens=8192
    activation_type=3
"""
LAST_PARAMETERS = """
    routing_replay_out=None output=None gemm1_clamp_limit=None workspace_buffer=None
"""


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (routed_moe, f"topk_ids {LAYER_PARAMETERS} {LAST_PARAMETERS}"),
        (logits_moe, f"routing_logits {LAYER_PARAMETERS} norm_topk_prob=True {LAST_PARAMETERS}"),
    ],
    ids=list(OPERATIONS),
)
def test_signature(operation: Any, expected: str) -> None:
    parameters = inspect.signature(operation).parameters.values()
    bare = [str(p.replace(annotation=p.empty)) for p in parameters]
    assert bare == expected.split()


@both_operations
@host_kinds
def test_arguments_stay_as_they_are(kind: ArrayKind, operation: str) -> None:
    before = layer_arguments(operation, routing_bias=np.zeros(EXPERTS, np.float32))
    arguments = on(kind, before)
    for do_finalize in (True, False):
        OPERATIONS[operation](**arguments, do_finalize=do_finalize)
        for name, value in before.items():
            if isinstance(value, np.ndarray):
                assert_bit_equal(kind.host(arguments[name]), value, name)


@both_operations
@host_kinds
def test_output_is_written_in_place(kind: ArrayKind, operation: str) -> None:
    arguments = on(kind, layer_arguments(operation))
    expected = kind.host(OPERATIONS[operation](**arguments))
    output = kind.make(NAN_ROWS)
    assert OPERATIONS[operation](**arguments, output=output) is output
    assert_bit_equal(kind.host(output), expected)


@both_operations
@host_kinds
def test_ignored_output_is_not_written(kind: ArrayKind, operation: str) -> None:
    output = kind.make(NAN_ROWS)
    arguments = on(kind, layer_arguments(operation, do_finalize=False))
    assert len(OPERATIONS[operation](**arguments, output=output)) == 3
    assert_bit_equal(kind.host(output), NAN_ROWS)


@host_kinds
def test_results_of_mixed_host_libraries(kind: ArrayKind) -> None:
    """Results come from the library of the hidden states."""
    arguments = layer_arguments()
    expected = routed_moe(**arguments)
    arguments["hidden_states"] = kind.make(arguments["hidden_states"])
    assert_bit_equal(kind.host(routed_moe(**arguments)), expected)


@host_kinds
def test_options_without_effect(kind: ArrayKind) -> None:
    arguments = on(kind, layer_arguments())
    expected = kind.host(routed_moe(**arguments))
    for options in (
        {"enable_pdl": True, "tune_max_num_tokens": 1},
        {"routed_scaling_factor": 2.5, **GROUPED},
        {"routing_bias": kind.make(np.full(EXPERTS, 100.0, BF16)), "routing_method_type": 7},
        {"workspace_buffer": aligned_bytes(kind, 1 << 16)},
    ):
        out = kind.host(routed_moe(**{**arguments, **options}))
        assert_bit_equal(out, expected, str(list(options)))


@pytest.mark.parametrize("dtype", ["packed", "bfloat16", "float32"])
@pytest.mark.parametrize("given", [False, True], ids=["new output", "own output"])
@host_kinds
def test_no_tokens(kind: ArrayKind, dtype: str, given: bool) -> None:
    arguments = on(kind, layer_arguments(num_tokens=0, dtype=dtype))
    output = kind.make(np.empty((0, HIDDEN), BF16)) if given else None
    out = routed_moe(**arguments, output=output)
    assert (kind.host(out).shape, kind.host(out).dtype) == ((0, HIDDEN), BF16)
    assert out is output or not given
    rows, weights, row_of_slot = result = routed_moe(**arguments, do_finalize=False)
    assert type(result) is list
    assert kind.host(rows).shape == (0, HIDDEN)
    assert kind.host(weights).shape == (0, TOP_K)
    assert (kind.host(row_of_slot).shape, kind.host(row_of_slot).dtype) == ((0,), np.int32)
    if dtype != "packed":
        assert weights is arguments["topk_ids"][1]


@host_kinds
def test_no_tokens_from_logits(kind: ArrayKind) -> None:
    arguments = on(kind, layer_arguments("logits", num_tokens=0))
    replay = kind.make(np.full((3, TOP_K), -7, np.int16))
    assert kind.host(logits_moe(**arguments, routing_replay_out=replay)).shape == (0, HIDDEN)
    assert [kind.host(x).shape for x in logits_moe(**arguments, do_finalize=False)] == [
        (0, HIDDEN),
        (0, TOP_K),
        (0,),
    ]
    assert (kind.host(replay) == -7).all()


# --- given routing --------------------------------------------------------------------------------


@host_kinds
def test_replay_buffer_of_given_routing_is_left_alone(kind: ArrayKind) -> None:
    replay = kind.make(np.full((NUM_TOKENS + 2, TOP_K), -7, np.int16))
    for do_finalize in (True, False):
        arguments = on(kind, layer_arguments(do_finalize=do_finalize))
        routed_moe(**arguments, routing_replay_out=replay)
        assert (kind.host(replay) == -7).all()


@host_kinds
def test_packed_and_tuple_differ_by_rounding_the_weight(kind: ArrayKind) -> None:
    arguments = layer_arguments()
    ids, _ = make_topk(NUM_TOKENS, TOP_K, EXPERTS, dtype="float32")
    weights = np.resize(np.float32([1 / 3, -0.99999, 1e-3]), ids.shape)
    outputs = {
        name: kind.host(routed_moe(**on(kind, {**arguments, "topk_ids": topk})))
        for name, topk in {
            "packed": pack_topk_ids(ids, weights),
            "bfloat16": (ids, weights.astype(BF16)),
            "float32 of bfloat16": (ids, weights.astype(BF16).astype(np.float32)),
            "float32": (ids, weights),
        }.items()
    }
    for name in ("bfloat16", "float32 of bfloat16"):
        assert_bit_equal(outputs[name], outputs["packed"], name)
    assert compare(outputs["float32"], outputs["packed"]).bit_equal < 0.9


@pytest.mark.parametrize("dtype", ["packed", "float32"])
@pytest.mark.parametrize("invalid", INVALID_IDS)
@host_kinds
def test_invalid_ids_contribute_nothing(kind: ArrayKind, invalid: str, dtype: str) -> None:
    """The weights of such slots are NaN."""
    topk = make_topk(NUM_TOKENS, TOP_K, EXPERTS, invalid=invalid, dtype="float32")
    is_valid = ~np.isnan(topk[1])
    zero_weights = (np.where(is_valid, topk[0], 0), np.where(is_valid, topk[1], 0))
    if dtype == "packed":
        topk, zero_weights = pack_topk_ids(*topk), pack_topk_ids(*zero_weights)
    arguments = layer_arguments()
    out = kind.host(routed_moe(**on(kind, {**arguments, "topk_ids": topk})))
    expected = routed_moe(**{**arguments, "topk_ids": zero_weights})
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))
    assert not out[~is_valid.any(axis=1)].any()


@host_kinds
def test_nan_stays_in_its_token(kind: ArrayKind) -> None:
    arguments = layer_arguments()
    expected = routed_moe(**arguments)
    arguments["hidden_states"][1] = np.nan
    out = kind.host(routed_moe(**on(kind, arguments)))
    others = np.arange(NUM_TOKENS) != 1
    assert_bit_equal(out[others], expected[others])
    assert np.isnan(out[1].astype(np.float32)).all()


@host_kinds
def test_expert_parallel_ranks_add_up(kind: ArrayKind) -> None:
    arguments = layer_arguments()
    whole = routed_moe(**arguments).astype(np.float32)
    parts = []
    for offset, count in ((0, 3), (3, 1), (4, 4)):
        local = slice(offset, offset + count)
        rank = {
            name: value[local] if name.startswith(("gemm", "output")) else value
            for name, value in arguments.items()
        }
        rank |= {"local_expert_offset": offset, "local_num_experts": count}
        parts.append(kind.host(routed_moe(**on(kind, rank))).astype(np.float32))
    np.testing.assert_allclose(sum(parts), whole, atol=2**-7 * np.abs(whole).max())


@pytest.mark.parametrize("dtype", ["packed", "bfloat16", "float32"])
@host_kinds
def test_weight_of_llama4_scales_the_input_once(kind: ArrayKind, dtype: str) -> None:
    """f(x / 2) with weight 1/2, which differs from f(x) / 2 as the activation is not linear."""
    ids = make_topk(NUM_TOKENS, 1, EXPERTS, dtype="float32")[0]

    def run(weight: float, factor: float, scale_input: bool) -> np.ndarray:
        weights = np.full(ids.shape, weight, np.float32)
        is_packed = dtype == "packed"
        options = {
            "topk_ids": pack_topk_ids(ids, weights)
            if is_packed
            else (ids, weights.astype(getattr(ml_dtypes, dtype, dtype))),
            "use_routing_scales_on_input": scale_input,
            "routing_method_type": int(RoutingMethodType.Llama4),
        }
        arguments = {**layer_arguments(top_k=1), **options}
        for name in ("output1_scales_scalar", "output1_scales_gate_scalar"):
            arguments[name] = arguments[name] * np.float32(factor)  # scales both halves
        return kind.host(routed_moe(**on(kind, arguments)))

    assert_bit_equal(run(0.5, 1.0, True), run(1.0, 0.5, False))
    assert compare(run(0.5, 1.0, True), run(0.5, 1.0, False)).rel_l2 > 0.1


@host_kinds
def test_every_expert_has_its_own_scales(kind: ArrayKind) -> None:
    """Powers of two from 2^-20 to 2^15 move an expert's result exactly."""
    arguments = layer_arguments(top_k=1)
    ids = np.arange(NUM_TOKENS, dtype=np.int32)[:, None]
    arguments["topk_ids"] = (ids, np.ones_like(ids, np.float32))
    expected = routed_moe(**arguments).astype(np.float64)
    factors = np.exp2(5.0 * np.arange(EXPERTS) - 20)
    arguments["output2_scales_scalar"] = (arguments["output2_scales_scalar"] * factors).astype(
        np.float32
    )
    out = kind.host(routed_moe(**on(kind, arguments))).astype(np.float64)
    np.testing.assert_array_equal(out, expected * factors[ids])


# --- routing from logits --------------------------------------------------------------------------

ROUTING = {
    **{method.name: {"routing_method_type": int(method)} for method in RoutingMethodType},
    "grouped": GROUPED,
    "not normalized": {"routing_method_type": 6, "norm_topk_prob": False},
}
del ROUTING["Unspecified"]


@pytest.mark.parametrize("name", ROUTING)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@host_kinds
def test_logits_select_and_weigh_the_experts(kind: ArrayKind, name: str, dtype: Any) -> None:
    """The same layer as with the ids and weights that the reference of routing selects."""
    top_k = 1 if name == "Llama4" else TOP_K
    arguments = layer_arguments("logits", top_k=top_k, **ROUTING[name])
    rng = np.random.default_rng(3)
    logits = arguments["routing_logits"].astype(dtype)
    bias = rng.standard_normal(EXPERTS).astype(dtype)
    arguments |= {"routing_logits": logits, "routing_bias": bias, "routed_scaling_factor": 2.5}
    ids, weights = select_experts(
        logits.astype(np.float32),
        bias.astype(np.float32),
        method=RoutingMethodType(arguments["routing_method_type"]),
        top_k=top_k,
        n_group=arguments["n_group"],
        topk_group=arguments["topk_group"],
        routed_scaling_factor=2.5,
        norm_topk_prob=arguments.get("norm_topk_prob", True),
    )
    routed = layer_arguments(top_k=top_k) | {"topk_ids": (ids, weights)}

    arguments = on(kind, arguments)
    replay = kind.make(np.full((NUM_TOKENS + 2, top_k), -7, np.int16))
    out = kind.host(logits_moe(**arguments, routing_replay_out=replay))
    assert_bit_equal(out, routed_moe(**routed))
    replayed = kind.host(replay)
    np.testing.assert_array_equal(replayed[:NUM_TOKENS], ids)
    assert (replayed[NUM_TOKENS:] == -7).all()

    rows, given, row_of_slot = logits_moe(**arguments, do_finalize=False)
    expected = routed_moe(**routed, do_finalize=False)
    assert_bit_equal(kind.host(given), weights.astype(BF16))
    np.testing.assert_array_equal(kind.host(row_of_slot), expected[2])
    used = expected[2][expected[2] >= 0]
    assert_bit_equal(kind.host(rows)[used], expected[0][used])
