"""Few slots, sorted inside the GEMMs: the same bits as after the permutation kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_moe.kernels.gemm_tiles import MAX_SORTED_SLOTS, SORTED_TILE_N
from cupy_moe.pipeline import compiled_for, tiled_as
from cupy_moe.testing.compare import assert_bit_equal, to_host
from cupy_moe.testing.inputs import (
    INVALID_IDS,
    make_fp8_layer,
    make_hidden_states,
    make_topk,
    move_arguments,
)
from cupy_moe.tiling import Tiling
from tests.gpu.support import BF16, capture, full, overwrite_arguments, routed_moe

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN = 16, 256
SORTING = Tiling(SORTED_TILE_N, 128, 128, sort=True)
CODES = pytest.mark.parametrize("arch", [None, "compute_80"], ids=["native", "compute_80"])

BATCHES = [(1, 1), (1, 8), (5, 2), (16, 2), (32, 1), (8, 4)]
LOCAL = {"all": None, "first three": (0, 3), "last two": (14, 2)}


def calls() -> Iterator[Any]:
    for num_tokens, top_k in BATCHES:
        for pattern in ("uniform", "one_expert"):
            for dtype in ("packed", "bfloat16", "float32"):
                yield pytest.param(
                    {"num_tokens": num_tokens, "top_k": top_k, "pattern": pattern, "dtype": dtype},
                    id=f"T{num_tokens}-K{top_k}-{pattern}-{dtype}",
                )


def make_arguments(
    num_tokens: int, top_k: int, *, local: str = "all", seed: int = 0, **topk: Any
) -> dict[str, Any]:
    layer = make_fp8_layer(
        hidden_size=HIDDEN, intermediate_size=384, num_experts=EXPERTS, local=LOCAL[local]
    )
    hidden = make_hidden_states(num_tokens, HIDDEN, seed)
    routing = make_topk(num_tokens, top_k, EXPERTS, seed=seed, **topk)
    arguments = layer.arguments(hidden, routing)
    if top_k == 1:  # the only routing whose weights may scale the input
        arguments.update(routing_method_type=3, use_routing_scales_on_input=True)
    return arguments


def both_ways(arch: str | None, arguments: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Results with slots sorted in the GEMMs, and after the permutation kernel."""
    results, arguments = [], move_arguments(arguments, "torch")
    for tiling in (SORTING, replace(SORTING, sort=False)):
        with tiled_as(tiling), compiled_for(arch) if arch else nullcontext():
            results.append(routed_moe(**arguments, **options))
    sorted_result, permuted_result = results
    return sorted_result, permuted_result


@CODES
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("batch", list(calls()))
def test_same_output(batch: dict[str, Any], local: str, arch: str | None) -> None:
    assert batch["num_tokens"] * batch["top_k"] <= MAX_SORTED_SLOTS
    out, expected = both_ways(arch, make_arguments(**batch, local=local))
    assert_bit_equal(out, expected)


@CODES
@pytest.mark.parametrize("dtype", ["packed", "float32"])
@pytest.mark.parametrize("invalid", INVALID_IDS)
def test_ids_of_no_expert(invalid: str, dtype: str, arch: str | None) -> None:
    arguments = make_arguments(8, 4, local="first three", invalid=invalid, dtype=dtype)
    out, expected = both_ways(arch, arguments)
    assert_bit_equal(out, expected)


@CODES
@pytest.mark.parametrize("dtype", ["packed", "bfloat16", "float32"])
def test_same_unfinalized_results(dtype: str, arch: str | None) -> None:
    """Weights, index map, and of the rows those that the map names."""
    arguments = make_arguments(8, 4, local="last two", dtype=dtype)
    out, expected = both_ways(arch, arguments, do_finalize=False)
    rows, weights, index = (to_host(array) for array in out)
    expected_rows, expected_weights, expected_index = (to_host(array) for array in expected)
    assert_bit_equal(weights, expected_weights)
    assert_bit_equal(index, expected_index)
    used = index[index >= 0]
    assert 0 < used.size < index.size
    assert_bit_equal(rows[used], expected_rows[used])


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_one_slot_more_takes_the_kernel(library: str) -> None:
    """32 and 33 slots, a graph of either with another routing than it was captured with."""
    for num_tokens in (MAX_SORTED_SLOTS, MAX_SORTED_SLOTS + 1):
        first, second = (
            move_arguments(make_arguments(num_tokens, 1, seed=seed), library) for seed in (0, 1)
        )
        expected = to_host(routed_moe(**second))
        output = full((num_tokens, HIDDEN), np.nan, BF16, library)
        routed_moe(**first, output=output)
        replay = capture(library, lambda a=first, out=output: routed_moe(**a, output=out))
        overwrite_arguments(first, second)
        replay()
        assert_bit_equal(output, expected, f"{num_tokens} tokens")
