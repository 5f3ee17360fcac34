"""FP4 layers from a model's weights: near the unquantized layer, alike in all forms and ranks."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, compare
from cupy_moe.testing.fp4_inputs import HOST_RESOURCES, Fp4Sizes, partition_weights
from cupy_moe.testing.unquantized import unquantized_moe
from cupy_moe.types import ActivationType
from cupy_moe.weights import (
    pack_topk_ids,
    quantize_activations_mxfp8,
    quantize_activations_nvfp4,
    quantize_experts_mxfp4,
    quantize_experts_nvfp4,
)
from tests.array_kinds import ArrayKind
from tests.fp4_calls import FORMS, MODES, moved, run

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 24, 256, 512, 6, 2
INTERMEDIATE_SCALE = 300.0
# E2M1 has one bit of mantissa: a rounding moves a value by up to 20 %, two layers of them add up.
MAX_REL_L2 = 0.25

each_form = pytest.mark.parametrize("form", FORMS)
each_mode = pytest.mark.parametrize("mode", MODES)


@cache
def model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "x": rng.standard_normal((TOKENS, HIDDEN), np.float32),
        "w1": rng.standard_normal((EXPERTS, 2 * INTERMEDIATE, HIDDEN), np.float32) / 16,
        "w2": rng.standard_normal((EXPERTS, HIDDEN, INTERMEDIATE), np.float32) / 22.6,
        "topk_ids": rng.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32),
        "topk_weights": rng.random((TOKENS, TOP_K), np.float32),
    }


@cache
def quantized(mode: str) -> dict[str, Any]:
    """Arguments with the names of the whole operation: tokens, weights and scale vectors."""
    m = model()
    if mode == "nvfp4":
        tokens, scales, g = quantize_activations_nvfp4(m["x"])
        experts = quantize_experts_nvfp4(
            m["w1"],
            m["w2"],
            activation_type=ActivationType.Swiglu,
            input_scale=g,
            intermediate_scale=INTERMEDIATE_SCALE,
        )
    else:
        tokens, scales = m["x"].astype(ml_dtypes.bfloat16), None
        if mode == "mxfp8":
            tokens, scales = quantize_activations_mxfp8(m["x"])
        experts = quantize_experts_mxfp4(m["w1"], m["w2"])
    return {
        "hidden_states": tokens,
        "hidden_states_scale": scales,
        **{f.name: getattr(experts, f.name) for f in fields(experts)},
    }


def layer(mode: str, form: str, offset: int = 0, count: int = EXPERTS) -> dict[str, Any]:
    """Arguments of one rank of the layer."""
    arguments = dict(quantized(mode))
    for name, value in arguments.items():
        if name.startswith(("gemm", "output")):
            arguments[name] = value[offset : offset + count].copy()
    arguments |= {
        "routing_logits": None,
        "routing_bias": None,
        "topk_ids": model()["topk_ids"],
        "topk_weights": model()["topk_weights"],
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": INTERMEDIATE,
        "local_expert_offset": offset,
        "local_num_experts": count,
        "routed_scaling_factor": None,
    }
    if form == "whole":
        absent = ("gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
        return arguments | dict.fromkeys(absent) | {"routing_input_mode": 2}
    sizes = Fp4Sizes(TOKENS, HIDDEN, INTERMEDIATE)
    shards = partition_weights(mode, form, sizes, arguments)
    return arguments | shards | {"partition_resources": HOST_RESOURCES}


@each_form
@each_mode
def test_near_the_unquantized_layer(mode: str, form: str) -> None:
    (out,) = run(form, layer(mode, form))
    exact = unquantized_moe(**model())
    assert compare(out, exact).rel_l2 < MAX_REL_L2
    assert compare(-out, exact).rel_l2 > 1


@each_mode
def test_forms_agree(mode: str) -> None:
    whole, by_rows, along_k = (run(form, layer(mode, form))[0] for form in FORMS)
    assert_bit_equal(by_rows, whole)
    assert 0 < compare(along_k, whole).rel_l2 < 2**-7  # one more rounding to BF16


@each_form
@each_mode
def test_expert_parallel_ranks_add_up(mode: str, form: str) -> None:
    whole = run(form, layer(mode, form))[0].astype(np.float32)
    ranks = [run(form, layer(mode, form, *rank))[0] for rank in ((0, 1), (1, 2), (3, 3))]
    total = sum(rank.astype(np.float32) for rank in ranks)
    np.testing.assert_allclose(total, whole, atol=2**-7 * np.abs(whole).max())


@each_form
@each_mode
def test_packed_words_are_ids_with_rounded_weights(mode: str, form: str) -> None:
    arguments = layer(mode, form)
    rounded = arguments["topk_weights"].astype(ml_dtypes.bfloat16)
    (expected,) = run(form, arguments | {"topk_weights": rounded})
    packed = arguments | {
        "topk_ids": pack_topk_ids(arguments["topk_ids"], rounded),
        "topk_weights": None,
    }
    if form == "whole":
        packed["routing_input_mode"] = 1
    assert_bit_equal(run(form, packed)[0], expected)


@each_form
@each_mode
def test_slots_of_other_ranks_contribute_nothing(mode: str, form: str) -> None:
    arguments = layer(mode, form)
    (expected,) = run(form, arguments)
    ids, weights = (arguments[name].copy() for name in ("topk_ids", "topk_weights"))
    ids[::3], weights[::3] = [-1, EXPERTS], np.nan
    arguments |= {"topk_ids": ids, "topk_weights": weights}
    (out,) = run(form, arguments)
    assert not out[::3].any()
    for rest in (1, 2):
        assert_bit_equal(out[rest::3], expected[rest::3])


@each_form
@each_mode
def test_torch_gives_the_same(mode: str, form: str) -> None:
    torch = ArrayKind("torch")
    (expected,) = run(form, layer(mode, form))
    (out,) = run(form, moved(torch, layer(mode, form)))
    assert_bit_equal(torch.host(out), expected)


@pytest.mark.parametrize("name", ["hidden_states", "topk_ids", "gemm1_weights"])
def test_results_come_from_the_library_of_the_hidden_states(name: str) -> None:
    torch, arguments = ArrayKind("torch"), layer("mxfp8", "tp_n_tp_n")
    (expected,) = run("tp_n_tp_n", arguments)
    (out,) = run("tp_n_tp_n", arguments | {name: moved(torch, arguments[name])})
    kind = torch if name == "hidden_states" else ArrayKind("numpy")
    assert_bit_equal(kind.host(out), expected)


@pytest.mark.parametrize("limit", [None, 1.0])
def test_swiglu_step_clamps_the_gate_after_its_silu(limit: float | None) -> None:
    """In NVFP4, against its definition on the unquantized layer; the limit is physical here."""
    arguments, m = layer("nvfp4", "whole"), model()
    vector = None
    if limit is not None:
        vector = np.float32(limit) / arguments["output1_scale_gate_scalar"]
    options = {"activation_type": 7, "gemm1_clamp_limit": vector}
    (out,) = run("whole", arguments | options)
    bound = 7.0 if limit is None else limit
    exact = np.zeros((TOKENS, HIDDEN))
    for slot in np.ndindex(TOKENS, TOP_K):
        expert = m["topk_ids"][slot]
        up, gate = np.split(m["w1"][expert].astype(float) @ m["x"][slot[0]], 2)
        y = np.clip(up, -bound, bound) * np.minimum(gate / (1 + np.exp(-gate)), bound)
        exact[slot[0]] += m["topk_weights"][slot] * (m["w2"][expert] @ y)
    assert compare(out, exact).rel_l2 < 1.1 * MAX_REL_L2  # 0.36 with the clamp before the SiLU
