"""FP4 layers on random inputs: the NumPy backend, all tilings, both strategies, special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe import pipeline
from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from cupy_moe.tiling import tile_candidates
from cupy_moe.types import ActivationType
from cupy_moe.weights import prepare_gemm2_scales
from tests.fp4_calls import FORMS, MODES, run
from tests.gpu.fp4_layers import (
    TOLERANCES,
    compile_kernels,
    on_host,
    on_library,
)
from tests.gpu.support import BF16, LIBRARIES, full, poisoned_allocations
from tests.gpu.tilings import planned
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

each_form = pytest.mark.parametrize("form", FORMS)
each_mode = pytest.mark.parametrize("mode", MODES)

SIZES = [
    Fp4Sizes(1),
    Fp4Sizes(3, top_k=1, block_bytes=64),
    Fp4Sizes(17, hidden=512, inter=512, block_bytes=128),
    Fp4Sizes(33, hidden=512, activation=ActivationType.Situ, weights_dtype="bfloat16"),
    Fp4Sizes(70, activation=ActivationType.Geglu, local=(2, 3)),
    Fp4Sizes(150, pattern="one_expert", top_k=1),
    Fp4Sizes(300, inter=512, experts=3, block_bytes=64),
]
LARGE = Fp4Sizes(2000, hidden=1280, experts=3)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    compile_kernels()


def output_of(form: str, arguments: dict[str, Any]) -> np.ndarray:
    (out,) = run(form, arguments)
    return to_host(out)


def assert_like_numpy(mode: str, form: str, arguments: dict[str, Any]) -> np.ndarray:
    """Hold a call against the NumPy backend; returns its output."""
    out = output_of(form, arguments)
    (expected,) = run(form, on_host(arguments))
    assert_within(compare(out, expected), TOLERANCES[mode], f"{mode} {form}")
    return out


@each_form
@each_mode
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_random(sizes: Fp4Sizes, mode: str, form: str, evidence: Evidence) -> None:
    library = LIBRARIES[sizes.tokens % 2]
    arguments = on_library(fp4_layer(mode, form, sizes), library)
    output = full((sizes.tokens, sizes.hidden), np.nan, BF16, library)
    with poisoned_allocations(library):
        assert run(form, arguments | {"output": output})[0] is output
    (expected,) = run(form, on_host(arguments))
    errors = compare(output, expected)
    evidence.errors(f"fp4 random/{mode}/{form}/{sizes}", errors)
    assert_within(errors, TOLERANCES[mode], f"{mode} {form} {sizes}")


@pytest.mark.parametrize("form", ["whole", "tp_n_tp_k"])
@each_mode
def test_more_tiles_than_blocks(mode: str, form: str) -> None:
    """Tokens are wider than the blocks that place and add them, with a rest."""
    assert_like_numpy(mode, form, on_library(fp4_layer(mode, form, LARGE), "torch"))


def test_more_tiles_than_blocks_of_rows_that_are_handed_out() -> None:
    arguments = fp4_layer("mxfp8", "tp_n_tp_k", LARGE, do_finalize=False)
    here = run("tp_n_tp_k", on_library(arguments, "torch"))
    there = run("tp_n_tp_k", on_host(arguments))
    rows, expected = (to_host(x[0])[to_host(x[2])] for x in (here, there))
    assert_within(compare(rows, expected), TOLERANCES["mxfp8"])


@pytest.mark.parametrize("form", ["whole", "tp_n_tp_k"])
def test_half_of_k_that_is_half_a_step(form: str) -> None:
    """Partitions of 64 of the 128 columns of K."""
    sizes = Fp4Sizes(20, inter=128)
    assert_like_numpy("nvfp4", form, on_library(fp4_layer("nvfp4", form, sizes), "torch"))


@each_mode
def test_tilings_and_partitions_give_the_same_bits(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = planned(monkeypatch)
    for tokens in (2, 150):
        sizes = Fp4Sizes(tokens, hidden=512)
        arguments = on_library(fp4_layer(mode, "whole", sizes), "torch")
        expected = output_of("whole", arguments)
        tilings = tile_candidates(*problems[-1])
        assert {tiling.sort for tiling in tilings} == ({False, True} if tokens == 2 else {False})
        for tiling in tilings:
            with pipeline.tiled_as(tiling):
                assert_bit_equal(output_of("whole", arguments), expected, str(tiling))
        by_rows = on_library(fp4_layer(mode, "tp_n_tp_n", sizes), "torch")
        assert_bit_equal(output_of("tp_n_tp_n", by_rows), expected, "tp_n_tp_n")
        along_k = on_library(fp4_layer(mode, "tp_n_tp_k", sizes), "torch")
        first = output_of("tp_n_tp_k", along_k)
        assert 0 < compare(first, expected).rel_l2 < 2**-7  # one more rounding to BF16
        assert_bit_equal(output_of("tp_n_tp_k", along_k), first, "again")


@each_mode
def test_a_token_does_not_depend_on_the_others(mode: str) -> None:
    arguments = fp4_layer(mode, "whole", Fp4Sizes(40))
    expected = output_of("whole", on_library(arguments, "torch"))
    for token in (0, 17, 39):
        alone = dict(arguments)
        for name in ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights"):
            if alone[name] is not None:
                alone[name] = alone[name][token : token + 1].copy()
        out = output_of("whole", on_library(alone, "torch"))
        assert_bit_equal(out, expected[token : token + 1])


@each_form
@each_mode
def test_weights_that_are_handed_out(mode: str, form: str) -> None:
    """NVFP4 rounds FP32 weights, the other modes use and return them as they are."""
    arguments = on_library(fp4_layer(mode, form, Fp4Sizes(5), do_finalize=False), "torch")
    rows, weights, row_of_slot = run(form, arguments)
    expected = run(form, on_host(arguments))
    assert (weights is arguments["topk_weights"]) == (mode != "nvfp4")
    assert_bit_equal(weights, expected[1])
    here, there = (to_host(x[0])[to_host(x[2])] for x in ((rows, 0, row_of_slot), expected))
    assert_within(compare(here, there), TOLERANCES[mode])


@each_form
def test_the_gate_is_clamped_from_above_only(form: str) -> None:
    sizes = Fp4Sizes(12)
    limit, alpha, beta = (np.full(sizes.experts, v, np.float32) for v in (1.5, 1.702, 1.0))
    options = {"gemm1_clamp_limit": limit, "gemm1_alpha": alpha, "gemm1_beta": beta}
    plain = output_of(form, on_library(fp4_layer("bf16", form, sizes), "torch"))
    arguments = on_library(fp4_layer("bf16", form, sizes, **options), "torch")
    out = assert_like_numpy("bf16", form, arguments)
    assert compare(out, plain).rel_l2 > 0.1


@pytest.mark.parametrize("limit", [None, 2.0])
def test_swiglu_step(limit: float | None) -> None:
    sizes = Fp4Sizes(12, activation=ActivationType.SwigluStep)
    vector = None if limit is None else np.full(sizes.experts, limit, np.float32)
    arguments = fp4_layer("nvfp4", "whole", sizes, gemm1_clamp_limit=vector)
    assert_like_numpy("nvfp4", "whole", on_library(arguments, "torch"))


@pytest.mark.parametrize("byte", [0, 1, 64, 126, 127, 128, 129, 200, 253, 254, 255])
def test_every_scale_of_mx_weights(byte: int) -> None:
    """Tokens scale back what the scales of W1 do, as far as the ranges go."""
    arguments = fp4_layer("bf16", "whole", Fp4Sizes(4, top_k=1))
    arguments["gemm1_weights_scale"][...] = byte
    if byte >= 253:
        arguments["gemm1_weights"] &= 0xBB  # magnitudes up to 1.5: more overflows BF16
    x = arguments["hidden_states"].astype(np.float32)
    shift = np.clip(127 - byte, -120, 120) - 4
    arguments["hidden_states"] = (x * np.float32(2.0) ** shift).astype(BF16)
    out = assert_like_numpy("bf16", "whole", on_library(arguments, "torch")).astype(np.float32)
    assert np.isnan(out).all() if byte == 255 else np.isfinite(out).all()


@pytest.mark.parametrize("tokens", [24, 150])
@pytest.mark.parametrize("mode", ["bf16", "nvfp4"])
def test_rare_scales_among_others(mode: str, tokens: int) -> None:
    """Every column of the output has the size of a row of W2, one is NaN for one expert."""
    arguments = fp4_layer(mode, "whole", Fp4Sizes(tokens))
    scales, nan = arguments["gemm2_weights_scale"].copy(), (2, 37, 5)
    if mode == "bf16":
        bytes_of_rows = np.array([0, 1, 126, 127, 128, 129, 200], np.uint8)
        scales[...] = np.random.default_rng(1).choice(bytes_of_rows, scales.shape[1])[:, None]
        x = arguments["hidden_states"].astype(np.float32)
        arguments["hidden_states"] = (x * np.float32(16)).astype(BF16)  # no subnormal outputs
    scales[nan] = 255
    arguments["gemm2_weights_scale"] = prepare_gemm2_scales(scales)
    out = output_of("whole", on_library(arguments, "torch")).astype(np.float64)
    expected = run("whole", on_host(arguments))[0].astype(np.float64)
    to_one = 2.0 ** -np.floor(np.log2(np.nanmax(np.abs(expected), axis=0)))
    errors = compare(*((x * to_one).astype(BF16) for x in (out, expected)))
    assert_within(errors, TOLERANCES[mode], mode)
    is_nan = np.zeros(out.shape, bool)
    is_nan[:, nan[1]] = (arguments["topk_ids"] == nan[0]).any(axis=1)
    assert 0 < is_nan.sum() < tokens
    np.testing.assert_array_equal(np.isnan(out), is_nan)


@each_form
def test_zero_tokens(form: str) -> None:
    arguments = on_library(fp4_layer("bf16", form, Fp4Sizes(2)), "torch")
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        arguments[name] = arguments[name][:0]
    assert [tuple(r.shape) for r in run(form, arguments)] == [(0, 256)]


def test_last_expert_beyond_two_to_the_32_bytes() -> None:
    """Only the last of 512 experts is hit; the scales of all others are NaN."""
    import cupy

    sizes = Fp4Sizes(9, hidden=4096, inter=2048, experts=1, top_k=1)
    one = on_library(fp4_layer("bf16", "whole", sizes, xp=cupy), "cupy")
    expected = output_of("whole", one)
    experts, many = 512, dict(one)
    for name in ("gemm1_weights", "gemm2_weights"):
        weights = cupy.zeros((experts, *one[name].shape[1:]), np.uint8)
        weights[-1] = one[name][0]
        scales = cupy.full((experts, *one[f"{name}_scale"].shape[1:]), 0xFF, np.uint8)
        scales[-1] = one[f"{name}_scale"][0]
        many |= {name: weights, f"{name}_scale": scales}
    assert many["gemm1_weights"].nbytes == 2**32
    for name in [n for n in one if n.endswith("_scalar")]:
        many[name] = cupy.ones(experts, np.float32)
    many |= {"topk_ids": one["topk_ids"] + experts - 1, "num_experts": experts}
    many["local_num_experts"] = experts
    assert_bit_equal(output_of("whole", many), expected)
