"""What the benchmark of the finalize counts and shows; the times themselves need GPUs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cupy_moe.bench.finalize_ranks import FinalizeRow, floor_us, sent_bytes
from cupy_moe.cli.bench_finalize import finalize_table
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme


@pytest.mark.parametrize(
    ("num_ranks", "by_expert", "by_token"),
    [(2, 49_152, 36_864), (4, 98_304, 55_296), (8, 172_032, 64_512)],
)
def test_bytes_of_a_token(num_ranks: int, by_expert: int, by_token: int) -> None:
    assert sent_bytes(FinalizeScheme.ExpertOwner, num_ranks, 1) == by_expert
    assert sent_bytes(FinalizeScheme.TokenOwner, num_ranks, 1) == by_token
    assert sent_bytes(FinalizeScheme.EveryRank, num_ranks, 1) == 65_536 * (num_ranks - 1)


def test_floor_has_a_way_for_every_hop() -> None:
    one = floor_us(FinalizeScheme.EveryRank, 2, 0, 345e9)
    assert floor_us(FinalizeScheme.TokenOwner, 2, 0, 345e9) == 2 * one
    assert floor_us(FinalizeScheme.TokenOwner, 2, 2048, 345e9) == pytest.approx(218.8 + 1.2, 0.01)


def test_table_names_what_failed() -> None:
    row = FinalizeRow(16, "TokenOwner", 3.0, {"cupy_moe": 8.0, "two-shot": 10.0}, 20.0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(finalize_table([row]))
    text = console.export_text()
    assert "10.0 (1.25x)" in text
    assert text.count("failed") == 2
