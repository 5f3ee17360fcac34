"""The FP4 operations as users call them, on host arrays of NumPy and torch."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.fused_moe import RoutingMethodType
from cupy_moe.reference import moe
from cupy_moe.reference.routing import select_experts
from cupy_moe.testing.compare import (
    FP4_BF16,
    FP4_MXFP8,
    FP4_NVFP4,
    assert_bit_equal,
    assert_within,
    compare,
)
from tests.array_kinds import ArrayKind
from tests.fp4_calls import (
    BF16,
    E4M3,
    EXPERTS,
    FORMS,
    HIDDEN,
    MODES,
    NUM_TOKENS,
    OPERATIONS,
    TOP_K,
    case_of,
    every_argument,
    fp4_arguments,
    moved,
    run,
)
from tests.fp8_calls import GROUPED, host_kinds
from tests.moe_cases import STRATEGIES, cases_of, fp4_call

TOLERANCES = {"nvfp4": FP4_NVFP4, "mxfp8": FP4_MXFP8, "bf16": FP4_BF16}
CASES = [(mode, name) for mode in MODES for name in cases_of(f"fp4_moe_{mode}.npz")]
MIN_BIT_EQUAL = 0.999  # as of the reference: nothing but the order of float64 sums differs
E8M0 = ml_dtypes.float8_e8m0fnu

each_form = pytest.mark.parametrize("form", FORMS)
each_mode = pytest.mark.parametrize("mode", MODES)


def expected_key(form: str) -> str:
    return STRATEGIES[0] if form == "whole" else form


def raw(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def check(mode: str, out: np.ndarray, expected: np.ndarray) -> None:
    errors = compare(out, expected)
    assert_within(errors, TOLERANCES[mode])
    assert errors.bit_equal >= MIN_BIT_EQUAL


# --- golden vectors -------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_golden_output(mode: str, name: str, form: str) -> None:
    case = case_of(mode, name)
    result = run(form, fp4_arguments(mode, case, form))
    assert type(result) is list
    (out,) = result
    assert out.dtype == BF16
    check(mode, out, case.arrays[f"{expected_key(form)}_out"])


@each_form
@each_mode
def test_golden_output_of_torch(mode: str, form: str) -> None:
    torch = ArrayKind("torch")
    for name in ("swiglu_packed", "swiglu_unpacked_f32", "logits_default_bf16"):
        case = case_of(mode, name)
        (out,) = run(form, moved(torch, fp4_arguments(mode, case, form)))
        check(mode, torch.host(out), case.arrays[f"{expected_key(form)}_out"])


@host_kinds
@each_form
@each_mode
def test_golden_rows(mode: str, form: str, kind: ArrayKind) -> None:
    case = case_of(mode, "swiglu_unfinalized")
    arguments = moved(kind, fp4_arguments(mode, case, form, do_finalize=False))
    result = run(form, arguments)
    assert type(result) is list
    rows, weights, row_of_slot = (kind.host(x) for x in result)
    live = case.arrays["live_u8"].astype(bool).ravel()
    assert (rows.dtype, rows.shape[1]) == (BF16, HIDDEN)
    assert (row_of_slot.dtype, row_of_slot.shape) == (np.int32, live.shape)
    np.testing.assert_array_equal(row_of_slot >= 0, live)
    assert len(set(row_of_slot[live])) == live.sum()
    expected = case.arrays[f"{expected_key(form)}_z"].reshape(live.size, -1)
    check(mode, rows[row_of_slot[live]], expected[live])
    assert_bit_equal(weights, case.arrays["weights"])


@pytest.mark.parametrize("name", [name for mode, name in CASES[:30] if name.startswith("logits")])
@host_kinds
@each_mode
def test_golden_ids_are_replayed(mode: str, kind: ArrayKind, name: str) -> None:
    case = case_of(mode, name)
    ids = case.arrays["ids_i32"]
    replay = kind.make(np.full((len(ids) + 2, ids.shape[1]), -7, np.int16))
    arguments = moved(kind, fp4_arguments(mode, case, "tp_n_tp_k"))
    run("tp_n_tp_k", arguments | {"routing_replay_out": replay})
    np.testing.assert_array_equal(kind.host(replay)[: len(ids)], ids)
    assert (kind.host(replay)[len(ids) :] == -7).all()
    _, weights, _ = run("tp_n_tp_k", arguments | {"do_finalize": False})
    assert compare(kind.host(weights), case.arrays["weights"]).bit_equal >= 0.99


# --- arguments and results ------------------------------------------------------------------------

SIZES = """
    num_experts top_k n_group topk_group intermediate_size local_expert_offset local_num_experts
"""
OPTIONS = """
    routing_method_type=0 weight_layout=0 do_finalize=True enable_pdl=None activation_type=3
    per_token_scale=None output=None tune_max_num_tokens=8192 norm_topk_prob=True
    routing_replay_out=None
"""
SCALARS = "output1_scale_scalar output1_scale_gate_scalar output2_scale_scalar"
SIGNATURES = {
    "whole": f"""
        routing_logits routing_bias hidden_states hidden_states_scale gemm1_weights
        gemm1_weights_scale gemm1_bias gemm1_alpha gemm1_beta gemm1_clamp_limit gemm2_weights
        gemm2_weights_scale gemm2_bias {SCALARS} {SIZES} routed_scaling_factor {OPTIONS}
        routing_input_mode=0 topk_ids=None topk_weights=None
    """,
    "tp_n_tp_n": f"""
        routing_logits routing_bias topk_ids topk_weights hidden_states hidden_states_scale
        gemm1_weights gemm1_weights_scale gemm2_weights gemm2_weights_scale {SCALARS} {SIZES}
        partition_resources partition_strategy routed_scaling_factor=None {OPTIONS}
        gemm1_alpha=None gemm1_beta=None gemm1_clamp_limit=None
    """,
}


@pytest.mark.parametrize("form", SIGNATURES)
def test_signature(form: str) -> None:
    parameters = inspect.signature(OPERATIONS[form]).parameters.values()
    bare = [str(p.replace(annotation=p.empty)) for p in parameters]
    assert bare == SIGNATURES[form].split()


@host_kinds
@each_form
@each_mode
def test_arguments_stay_as_they_are(mode: str, form: str, kind: ArrayKind) -> None:
    before = every_argument(mode, form)
    arguments = moved(kind, before)
    for do_finalize in (True, False):
        run(form, arguments | {"do_finalize": do_finalize, "output": None})
    for name, value in before.items():
        pairs = zip(value, arguments[name], strict=True) if isinstance(value, list) else ()
        pairs = [(value, arguments[name])] if isinstance(value, np.ndarray) else list(pairs)
        for old, new in pairs:
            np.testing.assert_array_equal(raw(kind.host(new)), raw(old), name)


@host_kinds
@each_form
@each_mode
def test_output_is_written_in_place(mode: str, form: str, kind: ArrayKind) -> None:
    arguments = moved(kind, fp4_arguments(mode, case_of(mode), form))
    (expected,) = run(form, arguments)
    output = kind.make(np.full((NUM_TOKENS, HIDDEN), np.nan, BF16))
    result = run(form, arguments | {"output": output})
    assert type(result) is list
    assert len(result) == 1
    assert result[0] is output
    assert_bit_equal(kind.host(output), kind.host(expected))
    ignored = kind.make(np.full((NUM_TOKENS, HIDDEN), np.nan, BF16))
    assert len(run(form, arguments | {"output": ignored, "do_finalize": False})) == 3
    assert np.isnan(kind.host(ignored).astype(np.float32)).all()


@each_form
@each_mode
def test_scales_may_be_typed_and_shaped_as_bytes(mode: str, form: str) -> None:
    case = case_of(mode)
    (expected,) = run(form, fp4_arguments(mode, case, form))
    for dtype in (np.uint8, E4M3) if mode == "nvfp4" else (np.uint8, E4M3, E8M0):
        arguments = fp4_arguments(mode, case, form, scale_dtype=dtype)
        for name in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
            value = arguments[name]
            if isinstance(value, list):
                arguments[name] = [x.ravel() for x in value]
            elif value is not None:
                arguments[name] = value.ravel()
        assert_bit_equal(run(form, arguments)[0], expected)


@each_form
def test_mxfp8_scales_may_be_padded(form: str) -> None:
    arguments = fp4_arguments("mxfp8", case_of("mxfp8"), form)
    (expected,) = run(form, arguments)
    scales = raw(arguments["hidden_states_scale"])
    padded = np.pad(scales, ((0, 0), (0, 16 - scales.shape[1])), constant_values=0x7F)
    arguments["hidden_states_scale"] = padded.view(E4M3)
    assert_bit_equal(run(form, arguments)[0], expected)


@pytest.mark.parametrize("block", [64, 128])
@each_form
@each_mode
def test_block_major_k(mode: str, form: str, block: int) -> None:
    if form == "tp_n_tp_k":
        block = 64  # half of K is 64 bytes
    case = case_of(mode)
    arguments = fp4_arguments(mode, case, form)
    (expected,) = run(form, arguments)
    strategy = None if form == "whole" else form
    blocked = fp4_call(mode, case, strategy, block_major_k_bytes=block)
    for name in ("gemm1", "gemm2"):
        shards = blocked[name]
        arguments[f"{name}_weights"] = shards[0] if form == "whole" else shards
    assert_bit_equal(run(form, arguments | {"weight_layout": 2})[0], expected)


@each_form
@each_mode
def test_scalar_vectors_may_be_longer(mode: str, form: str) -> None:
    arguments = every_argument(mode, form)
    expected = run(form, arguments)[0].copy()
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value.shape == (EXPERTS,) and "gemm1" in name:
            arguments[name] = np.concatenate([value, np.full(3, np.nan, np.float32)])
        if name.startswith("output") and name.endswith("scalar"):
            arguments[name] = np.concatenate([value, np.full(3, np.nan, np.float32)])
    assert_bit_equal(run(form, arguments)[0], expected)


@each_mode
def test_expert_weights_are_handed_back_unless_they_were_rounded(mode: str) -> None:
    for form, (dtype, name) in product(
        FORMS, ((np.float32, "swiglu_unpacked_f32"), (BF16, "swiglu_many"))
    ):
        arguments = fp4_arguments(mode, case_of(mode, name), form, do_finalize=False)
        given = arguments["topk_weights"]
        assert given.dtype == dtype
        returned = run(form, arguments)[1]
        if mode == "nvfp4" and dtype is np.float32:
            assert_bit_equal(returned, given.astype(BF16))
        else:
            assert returned is given


@each_form
@each_mode
def test_replay_buffer_of_given_routing_is_left_alone(mode: str, form: str) -> None:
    replay = np.full((NUM_TOKENS + 2, TOP_K), -7, np.int16)
    run(form, fp4_arguments(mode, case_of(mode), form, routing_replay_out=replay))
    assert (replay == -7).all()


@pytest.mark.parametrize("name", ["swiglu_packed", "swiglu_unpacked_f32", "logits_minimax2"])
@host_kinds
@each_form
@each_mode
def test_no_tokens(mode: str, form: str, kind: ArrayKind, name: str) -> None:
    arguments = fp4_arguments(mode, case_of(mode, name), form)
    per_token = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
    for argument in (*per_token, "routing_logits"):
        if arguments.get(argument) is not None:
            arguments[argument] = arguments[argument][:0]
    arguments = moved(kind, arguments)
    (out,) = run(form, arguments)
    assert (kind.host(out).shape, kind.host(out).dtype) == ((0, HIDDEN), BF16)
    output = kind.make(np.empty((0, HIDDEN), BF16))
    assert run(form, arguments | {"output": output})[0] is output
    shapes = [kind.host(x).shape for x in run(form, arguments | {"do_finalize": False})]
    assert shapes == [(0, HIDDEN), (0, arguments["top_k"]), (0,)]


@each_mode
def test_given_routing_is_not_looked_at_beside_logits(mode: str) -> None:
    arguments = fp4_arguments(mode, case_of(mode, "logits_topk_raw"), "tp_n_tp_n")
    (expected,) = run("tp_n_tp_n", arguments)
    arguments |= {"topk_ids": "nothing", "topk_weights": np.zeros(3)}
    assert_bit_equal(run("tp_n_tp_n", arguments)[0], expected)


@each_mode
def test_options_without_effect(mode: str) -> None:
    arguments = fp4_arguments(mode, case_of(mode), "whole")
    (expected,) = run("whole", arguments)
    for options in (
        {"enable_pdl": True, "tune_max_num_tokens": 1},
        {"routed_scaling_factor": 2.5, **GROUPED},
        {"routing_bias": np.full(EXPERTS, 100.0, BF16), "routing_method_type": 7},
    ):
        assert_bit_equal(run("whole", arguments | options)[0], expected, str(list(options)))


def test_logits_leave_ids_and_weights_unread() -> None:
    logits = np.random.default_rng(0).standard_normal((NUM_TOKENS, EXPERTS)).astype(np.float32)
    arguments = fp4_arguments("bf16", case_of("bf16"), "whole") | {"routing_input_mode": 0}
    arguments |= {"routing_logits": logits, "topk_ids": None, "topk_weights": None}
    (expected,) = run("whole", arguments)
    unread = {"topk_ids": "not looked at", "topk_weights": "not looked at"}
    assert_bit_equal(run("whole", arguments | unread)[0], expected, "unread")


# --- properties -----------------------------------------------------------------------------------

ROUTING = {
    **{method.name: {"routing_method_type": int(method)} for method in RoutingMethodType},
    "grouped": {"routing_method_type": 2, "n_group": 2, "topk_group": 1},
    "not normalized": {"routing_method_type": 6, "norm_topk_prob": False},
}
del ROUTING["Unspecified"]


@pytest.mark.parametrize("name", ROUTING)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@each_form
def test_logits_select_and_weigh_the_experts(form: str, dtype: Any, name: str) -> None:
    """The same layer as with the ids and weights that the reference of routing selects."""
    mode, rng = "mxfp8", np.random.default_rng(3)
    top_k = 1 if name == "Llama4" else TOP_K
    routing = {"n_group": None, "topk_group": None, **ROUTING[name]}
    given = fp4_arguments(mode, case_of(mode), form, top_k=top_k)
    logits, bias = (rng.standard_normal(s).astype(dtype) for s in ((NUM_TOKENS, EXPERTS), EXPERTS))
    ids, weights = select_experts(
        logits.astype(np.float32),
        bias.astype(np.float32),
        method=RoutingMethodType(routing["routing_method_type"]),
        top_k=top_k,
        n_group=routing["n_group"],
        topk_group=routing["topk_group"],
        routed_scaling_factor=2.5,
        norm_topk_prob=routing.get("norm_topk_prob", True),
    )
    from_logits = given | routing
    from_logits |= {"routing_logits": logits, "routing_bias": bias, "topk_ids": None}
    from_logits["routed_scaling_factor"] = 2.5
    given |= {"topk_ids": ids, "topk_weights": weights}
    if form == "whole":
        from_logits["routing_input_mode"], given["routing_input_mode"] = 0, 2
    assert_bit_equal(run(form, from_logits)[0], run(form, given)[0])


@each_form
@each_mode
def test_nonfinite_tokens_stay_in_their_rows(mode: str, form: str) -> None:
    arguments = fp4_arguments(mode, case_of(mode), form)
    (expected,) = run(form, arguments)
    name, bits = {
        "nvfp4": ("hidden_states_scale", 0x7F),  # NaN block scale
        "mxfp8": ("hidden_states", 0x7F),  # NaN element
        "bf16": ("hidden_states", 0x7FC0),
    }[mode]
    arguments[name] = arguments[name].copy()
    raw(arguments[name])[3, 5] = bits
    (out,) = run(form, arguments)
    assert (out[3] != expected[3]).any()
    assert_bit_equal(np.delete(out, 3, axis=0), np.delete(expected, 3, axis=0))


@each_mode
def test_the_public_call_is_the_reference(mode: str) -> None:
    for form in FORMS:
        case = case_of(mode, "situ_alpha_beta_clamp")
        expected = moe.fp4_moe(**fp4_call(mode, case, None if form == "whole" else form))
        assert_bit_equal(run(form, fp4_arguments(mode, case, form))[0], expected.view(BF16))
