"""Every tiling of FP4 layers gives the same bits, whole and in partitions, in any layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from cupy_moe import pipeline
from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime.jit import source_dir
from cupy_moe.runtime.streams import GreenPartitions
from cupy_moe.testing.compare import Errors, assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from cupy_moe.tiling import tile_candidates
from cupy_moe.weights.layouts import prepare_gemm2_scales
from tests.fp4_calls import FORMS, MODES, run
from tests.gpu.fp4_layers import TOLERANCES, compile_kernels, on_host, on_library
from tests.gpu.support import BF16, full, synchronize
from tests.gpu.tilings import planned, take_tiles
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

# K of whole stages of 128 and 256, of one and a half, of half a one; all layouts. Rows of one tile
# and of several, also where a cluster's last block has none.
SIZES = [
    Fp4Sizes(1),
    Fp4Sizes(4, hidden=512, inter=512, block_bytes=128),
    Fp4Sizes(17, hidden=512, inter=128),
    Fp4Sizes(70, hidden=768, inter=384, block_bytes=64),
    Fp4Sizes(190, hidden=768, inter=256, pattern="one_expert", top_k=1),
    Fp4Sizes(600, hidden=512, inter=256, experts=3, block_bytes=128),
]
LARGE = Fp4Sizes(2500, hidden=768, inter=256, experts=3, top_k=1)  # more tiles than blocks
# Rows of experts: products of all widths; two, three and four large tiles.
ROWS = (40, 72, 80, 120, 125, 133, 140, 150, 165, 175, 190)
SHARED_ROWS = (161, 193, 256, 289, 321, 400, 500)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    compile_kernels()


def is_legal(mode: str, form: str, sizes: Fp4Sizes) -> bool:
    """Halves of rows are whole tiles, those of K have whole tiles of scales and whole blocks."""
    if form == "whole":
        return True
    half = sizes.inter // 2
    scaled = half % (64 if mode == "nvfp4" else 128) == 0
    divides_k = scaled and half // 2 % (sizes.block_bytes or 1) == 0
    return sizes.hidden % 256 == 0 and (form == "tp_n_tp_n" or divides_k)


CASES = [
    (mode, form, sizes)
    for mode in MODES
    for form in FORMS
    for sizes in SIZES
    if is_legal(mode, form, sizes)
]


def assert_same_bits(
    mode: str, form: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Errors:
    """Run a call on torch arrays in every tiling; returns the errors of the chosen one."""
    problems = planned(monkeypatch)
    chosen = to_host(run(form, arguments)[0]).copy()
    errors = compare(chosen, run(form, on_host(arguments))[0])
    assert_within(errors, TOLERANCES[mode])

    candidates = tile_candidates(*problems[0])
    assert len(candidates) > 3
    for takes_tiles in (False, True):
        take_tiles(monkeypatch, takes_tiles)
        for tiling in candidates:
            output = full(chosen.shape, np.nan, BF16, "torch")
            with pipeline.tiled_as(tiling):
                run(form, arguments | {"output": output})
            assert_bit_equal(output, chosen, f"tiling {tiling}, takes tiles: {takes_tiles}")
    return errors


@pytest.mark.parametrize(("mode", "form", "sizes"), [*CASES, ("nvfp4", "whole", LARGE)], ids=str)
def test_same_bits(
    mode: str,
    form: str,
    sizes: Fp4Sizes,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = on_library(fp4_layer(mode, form, sizes), "torch")
    errors = assert_same_bits(mode, form, arguments, monkeypatch)
    evidence.errors(f"fp4 tilings/{mode}/{form}/{sizes}", errors)


def mixed_layer(mode: str, rows: Sequence[int], **sizes: int) -> dict[str, Any]:
    """Make a call whose experts have so many rows."""
    shape = Fp4Sizes(sum(rows), experts=len(rows), top_k=1, **sizes)
    arguments = fp4_layer(mode, "whole", shape)
    experts = np.repeat(np.arange(len(rows)), rows)
    arguments["topk_ids"][:, 0] = np.random.default_rng(0).permutation(experts)
    return arguments


def widths_of_tiles() -> dict[int, set[int]]:
    """Read the widths of products by tokens of a tile from the sources."""
    text = (source_dir() / "gemm" / "product_widths.cuh").read_text()
    pattern = r"ProductWidths<(\d+)> \{\s*static constexpr i32 kWidths\[\] = \{(.*)\}"
    listed = re.findall(pattern, text)
    assert listed
    return {int(tile_n): {*map(int, widths.split(", "))} for tile_n, widths in listed}


def rows_of_tiles(rows: int, tile_n: int) -> list[int]:
    """Rows of an expert's tiles, as gemm::TileList gives them out."""
    num_tiles = -(-rows // tile_n)
    if tile_n < 160:
        return [min(rows - first, tile_n) for first in range(0, rows, tile_n)]
    least, more = divmod(-(-rows // 8), num_tiles)
    eights = [least + 1] * more + [least] * (num_tiles - more)
    first = list(accumulate(eights, initial=0))
    return [min(8 * end, rows) - 8 * begin for begin, end in pairwise(first)]


def reached(tile_n: int, widths: set[int]) -> set[int]:
    """Widths of the products of ROWS."""
    columns = {n for rows in ROWS for n in rows_of_tiles(rows, tile_n)}
    return {min(width for width in widths if width >= n) for n in columns}


@pytest.mark.parametrize("mode", MODES)
def test_every_width_of_products(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tile_n, widths in widths_of_tiles().items():
        assert reached(tile_n, widths) == widths
    arguments = on_library(mixed_layer(mode, ROWS, hidden=640, inter=384), "torch")
    assert_same_bits(mode, "whole", arguments, monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_tiles_that_share_rows(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {len(rows_of_tiles(rows, 160)) for rows in SHARED_ROWS} == {2, 3, 4}
    arguments = on_library(mixed_layer(mode, SHARED_ROWS, hidden=640, inter=384), "torch")
    assert_same_bits(mode, "whole", arguments, monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_limits_of_some_experts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, of which NaN is the limit of one, have an epilogue without clamps."""
    arguments = mixed_layer(mode, ROWS, hidden=256, inter=128)
    vectors = {
        "gemm1_clamp_limit": np.resize(np.float32([1.5, np.inf, np.nan]), len(ROWS)),
        "gemm1_alpha": np.full(len(ROWS), 1.702, np.float32),
        "gemm1_beta": np.full(len(ROWS), 1.0, np.float32),
    }
    assert_same_bits(mode, "whole", on_library(arguments | vectors, "torch"), monkeypatch)


def test_rare_scales_here_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row of FC2, with plain stages before, between and after, in one block of a cluster."""
    arguments = mixed_layer("bf16", ROWS, hidden=512, inter=1024)
    scales = arguments["gemm2_weights_scale"].copy()
    scales[:, 5, [8, 20]] = 130  # 128 of K are four scales
    arguments["gemm2_weights_scale"] = prepare_gemm2_scales(scales)
    assert_same_bits("bf16", "whole", on_library(arguments, "torch"), monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_many_tiles_a_cluster(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On few multiprocessors: more than a queue of tiles holds, some with nothing for a block."""
    with GreenPartitions(0, (8, 8)) as partitions:
        resources = MoePartitionResources(partitions.streams)
        arguments = on_library(fp4_layer(mode, "tp_n_tp_n", LARGE), "torch", resources)
        assert_same_bits(mode, "tp_n_tp_n", arguments, monkeypatch)
        synchronize()
