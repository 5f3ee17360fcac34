"""The sweep over tilings, on made-up times."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cupy_moe import pipeline
from cupy_moe.bench import sweep
from cupy_moe.bench.fp4 import FORMS, FP4_WORKLOADS, MODES, padded
from cupy_moe.bench.sweep import SweepRow, fastest_first, problem_of
from cupy_moe.bench.workloads import TOKENS, WORKLOADS
from cupy_moe.cli import bench, bench_sweep
from cupy_moe.problem import DeviceTraits
from cupy_moe.tiling import choose_tiling, tile_candidates


def printed(*renderables: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(*renderables)
    return captured.get()


def test_sweep_rows_are_ordered_and_printed() -> None:
    workload = WORKLOADS["W-A"]
    device = DeviceTraits(arch="sm_90a", num_sms=132)
    tilings = tile_candidates(problem_of(workload, 64), device)
    assert len(tilings) > 3
    figures = [(90.0, None), (50.0, 48.0), (47.0, 48.0), (80.0, None)]
    rows = fastest_first(
        SweepRow("W-A", 64, tiling, *times)
        for tiling, times in zip(tilings[:4], figures, strict=True)
    )
    assert [row.us for row in rows] == [47.0, 50.0, 80.0, 90.0]
    assert rows[0].ratio == pytest.approx(47 / 48)
    text = printed(bench_sweep.sweep_table([rows]))
    assert str(tilings[2]) in text
    assert "0.979" in text
    assert json.loads(json.dumps(rows[-1].as_dict()))["us_of_choice"] is None


def test_sweep_repeats_close_tilings_against_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times by token tile; the plan's choice takes 50."""
    workload = WORKLOADS["W-A"]
    tilings = tile_candidates(problem_of(workload, 64), DeviceTraits("sm_90a", 132))
    us = {None: 50.0, **{tiling: 40.0 + tiling.tile_n for tiling in tilings}}

    def capture(calls: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(replay=pipeline._tiling_override.get())

    def interleaved(works: dict[str, Any], rounds: int, rest_s: float) -> dict[str, list[float]]:
        return {name: [4 * us[tiling]] * rounds for name, tiling in works.items()}

    class Ours:
        def __init__(self, layer: Any) -> None:
            pass

        def prepare(self, *_: Any) -> Any:
            return lambda: None

    monkeypatch.setattr(sweep, "capture", capture)
    monkeypatch.setattr(sweep, "interleaved_us", interleaved)
    monkeypatch.setattr(sweep, "CupyMoe", Ours)
    batch = SimpleNamespace(hidden=None, weights=None, routings=[None] * 4, num_tokens=64)
    rows = sweep._sweep_batch(SimpleNamespace(name="W-A"), batch, tilings, replays=3)
    assert {row.tiling for row in rows} == set(tilings)
    least = min(tiling.tile_n for tiling in tilings)
    assert rows[0].tiling.tile_n == least
    assert rows[0].ratio == pytest.approx((40 + least) / 50)
    for row in rows:
        is_close = us[row.tiling] <= sweep.CLOSE * (40 + least)
        assert row.us_of_choice == (50.0 if is_close else None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_problems_of_fp4_layers_have_candidates(mode: str, form: str) -> None:
    workload = padded(FP4_WORKLOADS["W-C"], form)
    problem = problem_of(workload, 64, mode, form, () if form == "whole" else (64, 64))
    assert problem.moe_format.value == mode
    assert problem.strategy == (None if form == "whole" else form)
    candidates = sweep.sensible_candidates(problem, DeviceTraits("sm_90a", 132))
    assert choose_tiling(problem, DeviceTraits("sm_90a", 132)) in candidates


def test_sweep_leaves_out_tiny_tiles_of_many_rows() -> None:
    device = DeviceTraits("sm_90a", 132)
    many = problem_of(WORKLOADS["W-A"], 8192)  # 512 rows an expert
    assert {tiling.tile_n for tiling in sweep.sensible_candidates(many, device)} == {128}
    few = problem_of(WORKLOADS["W-A"], 64)
    assert sweep.sensible_candidates(few, device) == tile_candidates(few, device)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("key", WORKLOADS)
def test_sweep_keeps_the_largest_token_tile(key: str, arch: str) -> None:
    device = DeviceTraits(arch, 132)
    for num_tokens in (*TOKENS, 1 << 20):
        problem = problem_of(WORKLOADS[key], num_tokens)
        every = tile_candidates(problem, device)
        largest = max(tiling.tile_n for tiling in every)
        kept = sweep.sensible_candidates(problem, device)
        assert [t for t in every if t.tile_n == largest] == [t for t in kept if t.tile_n == largest]


def test_batches_swept_before_an_error_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = WORKLOADS["W-A"]
    tiling = tile_candidates(problem_of(workload, 64), DeviceTraits("sm_90a", 132))[0]

    def fail_after_one(*_: Any) -> Iterator[list[SweepRow]]:
        yield [SweepRow("W-A", 64, tiling, 47.0, 48.0)]
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(bench_sweep, "require_fp8_gpu", lambda: None)
    monkeypatch.setattr(bench_sweep, "sweep", fail_after_one)
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    options = ["--workload", "W-A", "--json", str(tmp_path / "rows.json")]
    args = parser.parse_args(["bench", "sweep", *options])
    console = Console(width=200)
    with console.capture() as captured, pytest.raises(RuntimeError, match="the GPU is gone"):
        args.run(args, console)
    assert str(tiling) in captured.get()
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["us"] == 47.0
