"""What the benchmark of the finalize counts and shows; the times themselves need GPUs."""

from __future__ import annotations

import io
import queue
from types import SimpleNamespace

import pytest
from rich.console import Console

from cupy_moe.bench import finalize, finalize_ranks
from cupy_moe.bench.finalize_ranks import FinalizeJob, FinalizeRow, busiest_bytes, floor_us
from cupy_moe.bench.finalize_schemes import switch_points
from cupy_moe.cli.bench_finalize import finalize_table, switch_lines
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme


@pytest.mark.parametrize(
    ("num_ranks", "by_expert", "by_token"),
    [(2, 49_152, 36_864), (4, 98_304, 55_296), (8, 172_032, 64_512)],
)
def test_bytes_of_a_token(num_ranks: int, by_expert: int, by_token: int) -> None:
    assert busiest_bytes(FinalizeScheme.ExpertOwner, num_ranks, 1) == by_expert
    assert busiest_bytes(FinalizeScheme.TokenOwner, num_ranks, 16) == 16 * by_token
    assert busiest_bytes(FinalizeScheme.EveryRank, num_ranks, 1) == 65_536 * (num_ranks - 1)


@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "kib"),
    [(2, 1, 64), (4, 1, 192), (8, 1, 448), (8, 4, 472), (8, 12, 976), (8, 7, 496)],
)
def test_owners_of_tokens_receive_at_once(num_ranks: int, num_tokens: int, kib: int) -> None:
    assert busiest_bytes(FinalizeScheme.TokenOwner, num_ranks, num_tokens) == kib * 1024


def test_floor_has_a_way_for_every_hop() -> None:
    one = floor_us(FinalizeScheme.EveryRank, 2, 0, 345e9)
    assert floor_us(FinalizeScheme.TokenOwner, 2, 0, 345e9) == 2 * one
    assert floor_us(FinalizeScheme.TokenOwner, 2, 2048, 345e9) == pytest.approx(218.8 + 1.2, 0.01)


def test_table_names_what_failed() -> None:
    row = FinalizeRow(2, 16, "TokenOwner", 3.0, {"cupy_moe": 8.0, "two-shot": 10.0}, 20.0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(finalize_table([row]))
    text = console.export_text()
    assert "10.0 (1.25x)" in text
    assert text.count("failed") == 2
    assert "EveryRank" not in text


def times(every: float | None, expert: float | None, token: float) -> dict[str, float]:
    named = {"EveryRank": every, "ExpertOwner": expert, "TokenOwner": token}
    return {name: us for name, us in named.items() if us is not None}


@pytest.mark.parametrize(
    ("found", "limits"),
    [
        ({1: times(5, 6, 7), 4: times(8, 7, 9), 16: times(20, 13, 12)}, SchemeLimits(1, 4)),
        ({1: times(5, 6, 7), 4: times(8, 9, 9), 16: times(20, 13, 12)}, SchemeLimits(4, 0)),
        ({1: times(7, 6, 5), 4: times(9, 9, 8)}, SchemeLimits(0, 0)),
        # An outlier costs less than to lose on both sides of it.
        ({1: times(5, 9, 9), 2: times(5.1, 9, 5), 4: times(6, 9, 9)}, SchemeLimits(4, 0)),
        ({1: times(5, 6, 7), 99: times(None, 9, 8), 999: times(None, None, 9)}, SchemeLimits(1, 0)),
    ],
)
def test_switch_points(found: dict[int, dict[str, float]], limits: SchemeLimits) -> None:
    assert switch_points(found, 4) == limits


def test_table_of_schemes() -> None:
    rows = [
        FinalizeRow(4, 1, "EveryRank", 1.0, {"cupy_moe": 5.0}, by_scheme=times(5.25, 6.25, 7.25)),
        FinalizeRow(4, 64, "TokenOwner", 9.0, {"cupy_moe": 12.0}, by_scheme=times(None, 14, 12)),
        FinalizeRow(2, 1, "EveryRank", 1.0, {"cupy_moe": 5.0}),
    ]
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(finalize_table(rows))
    text = console.export_text()
    assert "7.2" in text
    assert "ExpertOwner" in text
    (line,) = switch_lines(rows)
    assert line.startswith("4 ranks: EveryRank up to 1 tokens, then ExpertOwner up to 0, then")


# --- ranks that fail ------------------------------------------------------------------------------


def collect(answers: list[tuple[int, list[str], str | None]], codes: list[int | None]) -> object:
    results: queue.Queue[object] = queue.Queue()
    for answer in answers:
        results.put(answer)
    return finalize._collect(results, [SimpleNamespace(exitcode=code) for code in codes])


def test_rows_of_rank_0() -> None:
    assert collect([(1, ["other"], None), (0, ["row"], None)], [0, 0]) == ["row"]


@pytest.mark.parametrize(
    ("answers", "codes", "message"),
    [
        ([(0, ["row"], None)], [0, -9], "rank 1 ended without a result, exit code -9"),
        ([(0, ["row"], None), (1, [], "no memory")], [0, 0], "rank 1: no memory"),
        ([(0, ["row"], None)], [0, None], r"no result of ranks \[1\]"),
    ],
)
def test_a_rank_without_a_result(
    answers: list[tuple[int, list[str], str | None]],
    codes: list[int | None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finalize, "_POLL_S", 0.01)
    monkeypatch.setattr(finalize, "_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=message):
        collect(answers, codes)


def test_ranks_without_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(finalize_ranks, "init_tp_moe_finalize_rmsnorm", lambda **sizes: False)
    with pytest.raises(RuntimeError, match="not supported"):
        finalize_ranks.measure_rank(FinalizeJob((1,), 1))
