"""Every tiling of FP4 layers gives the same bits, whole and in partitions, in any layout."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_moe import pipeline
from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from cupy_moe.tiling import tile_candidates
from tests.fp4_calls import FORMS, MODES, run
from tests.gpu.fp4_layers import TOLERANCES, compile_kernels, on_host, on_library
from tests.gpu.support import BF16, full
from tests.gpu.tilings import planned, take_tiles
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

# K of whole stages of 128 and 256, of one and a half, of half a one; all layouts. Rows of one tile
# and of several, also where a cluster's last block has none; all widths of products.
SIZES = [
    Fp4Sizes(1),
    Fp4Sizes(4, hidden=512, inter=512, block_bytes=128),
    Fp4Sizes(17, hidden=512, inter=128),
    Fp4Sizes(70, hidden=768, inter=384, block_bytes=64),
    Fp4Sizes(120, hidden=640, inter=128, pattern="one_expert", top_k=1),
    Fp4Sizes(150, hidden=512, inter=384, pattern="one_expert", top_k=1),
    Fp4Sizes(190, hidden=768, inter=256, pattern="one_expert", top_k=1),
    Fp4Sizes(600, hidden=512, inter=256, experts=3, block_bytes=128),
]
LARGE = Fp4Sizes(2500, hidden=768, inter=256, experts=3, top_k=1)  # more tiles than blocks


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


@pytest.mark.parametrize(("mode", "form", "sizes"), [*CASES, ("nvfp4", "whole", LARGE)], ids=str)
def test_same_bits(
    mode: str,
    form: str,
    sizes: Fp4Sizes,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = planned(monkeypatch)
    arguments = on_library(fp4_layer(mode, form, sizes), "torch")
    chosen = to_host(run(form, arguments)[0]).copy()
    errors = compare(chosen, run(form, on_host(arguments))[0])
    evidence.errors(f"fp4 tilings/{mode}/{form}/{sizes}", errors)
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
