"""Measured times of the tensor-parallel finalize, beside all-reduces of the same rows.

Rows are recorded as evidence; speed is not asserted. ``cupy_moe.bench.finalize`` defines what is
timed.
"""

from __future__ import annotations

import pytest

from cupy_moe.bench.finalize import measure_finalize
from cupy_moe.bench.finalize_ranks import FinalizeJob
from tests.gpu.finalize_ranks import need_gpus
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

TOKENS = (1, 4, 16, 64, 256, 2048)
SWITCHES = (2, 3, 6, 8, 12, 24, 32)  # where schemes may change, with more than two ranks
REPLAYS = 15


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_finalize(num_ranks: int, evidence: Evidence) -> None:
    """One process a GPU; with more than two, every scheme as well."""
    need_gpus(num_ranks)
    has_switches = num_ranks > 2
    tokens = tuple(sorted(TOKENS + SWITCHES)) if has_switches else TOKENS
    rows = measure_finalize(FinalizeJob(tokens, REPLAYS, schemes=has_switches), [num_ranks])
    assert [row.num_tokens for row in rows] == list(tokens)
    for row in rows:
        assert row.failures == {}
        assert all(us > 0 for us in row.us.values())
        times = {f"{who} us": us for who, us in (row.us | row.by_scheme).items()}
        figures = {"scheme": row.scheme, "floor_us": row.floor_us, "host_us": row.host_us} | times
        evidence.benchmark(f"finalize/P{num_ranks}/T{row.num_tokens:05d}", figures)
