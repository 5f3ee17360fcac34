"""Every tiling and both ways to bring token rows give the same bits, with any routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cupy_moe import pipeline
from cupy_moe.runtime.devices import compute_capability
from cupy_moe.runtime.jit import arch_for
from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.inputs import make_fp8_layer, make_hidden_states, make_topk, move_arguments
from cupy_moe.tiling import tile_candidates
from tests.gpu.support import BF16, full, routed_moe, tolerance_of, torch_oracle
from tests.gpu.tilings import planned, take_tiles
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and its routing."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    pattern: str

    def __str__(self) -> str:
        """As a test's name."""
        return (
            f"T{self.num_tokens}-H{self.hidden_size}-I{self.intermediate_size}"
            f"-E{self.num_experts}-K{self.top_k}-{self.pattern}"
        )


SHAPES = [
    Shape(1, 128, 128, 4, 2, "uniform"),  # one step of K
    Shape(3, 256, 128, 4, 2, "uniform"),
    Shape(70, 512, 256, 8, 2, "uniform"),
    Shape(333, 256, 384, 6, 1, "one_expert"),  # three token tiles of 128
    Shape(2500, 128, 256, 3, 1, "one_expert"),  # more token tiles than a band
    Shape(1000, 384, 128, 3, 2, "uniform"),
    Shape(33, 4096, 1536, 16, 4, "uniform"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits(shape: Shape, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = planned(monkeypatch)
    layer = make_fp8_layer(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
    )
    hidden = make_hidden_states(shape.num_tokens, shape.hidden_size)
    topk = make_topk(shape.num_tokens, shape.top_k, shape.num_experts, pattern=shape.pattern)
    arguments = move_arguments(layer.arguments(hidden, topk), "torch")
    chosen = to_host(routed_moe(**arguments))
    errors = compare(chosen, torch_oracle(arguments))
    evidence.errors(f"fp8 tilings/{shape}", errors)
    assert_within(errors, tolerance_of(arguments))

    candidates = tile_candidates(*problems[0])
    if arch_for(compute_capability(0)) == "sm_90a":
        assert len(candidates) > 20
    for takes_tiles in (False, True):
        take_tiles(monkeypatch, takes_tiles)
        for tiling in candidates:
            output = full(chosen.shape, np.nan, BF16, "torch")
            with pipeline.tiled_as(tiling):
                routed_moe(**arguments, output=output)
            assert_bit_equal(output, chosen, f"tiling {tiling}, takes tiles: {takes_tiles}")
