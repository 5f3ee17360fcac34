"""What the benchmark reports: derived figures, tables, JSON, plot, notes, errors of the command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cupy_moe import pipeline
from cupy_moe.bench import ceilings, contenders, sweep, timing
from cupy_moe.bench.peers import PEERS, present_peers
from cupy_moe.bench.report import by_workload, cells, headers, notes, peer_names, plot, write_json
from cupy_moe.bench.rows import Timing
from cupy_moe.bench.sweep import SweepRow, fastest_first, problem_of
from cupy_moe.bench.timing import interleaved_us, sustained_us
from cupy_moe.bench.workloads import TOKENS, WORKLOADS
from cupy_moe.cli import bench
from cupy_moe.problem import DeviceTraits
from cupy_moe.tiling import tile_candidates
from tests.bench_rows import fake_report, fake_row


def printed(*renderables: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(*renderables)
    return captured.get()


# --- rows -----------------------------------------------------------------------------------------


def test_derived_figures() -> None:
    row = fake_row(peers={"Fast": 30.0})
    assert row.floor_us == pytest.approx(20)  # 80 MB at 4 TB/s; 1 GFLOP takes 1 us
    assert row.tb_per_s == pytest.approx(3.2)
    assert row.tflops == pytest.approx(40)
    assert row.share_of_floor() == pytest.approx(0.8)
    assert row.share_of_floor("Fast") == pytest.approx(2 / 3)
    assert row.ratio("Fast") == pytest.approx(1.2)


def test_graph_times_are_shared_among_its_calls() -> None:
    assert Timing.of([44.0, 40.0, 80.0], num_calls=4) == Timing(11.0, 10.0, 20.0)


class FakeTime:
    """A GPU whose clock advances with the works; ``order`` is what happened."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.order: list[str] = []

    def work(self, name: str, milliseconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.order.append(name)
            self.milliseconds += milliseconds()

        return run

    def sleep(self, seconds: float) -> None:
        self.order.append("rest")
        self.milliseconds += 1e3 * seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.milliseconds

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: time.order.append("synchronize"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(timing.time, "sleep", time.sleep)
    return time


@pytest.mark.parametrize("rest_s", [0.0, 0.5])
def test_contenders_take_turns(rest_s: float, fake_time: FakeTime) -> None:
    """A rest and the run after it are not timed; it begins when the GPU has nothing to do."""
    works = {"a": fake_time.work("a", lambda: 2.0), "b": fake_time.work("b", lambda: 3.0)}
    times = interleaved_us(works, rounds=4, warmups=1, rest_s=rest_s)
    assert times == {"a": pytest.approx([2000.0] * 4), "b": pytest.approx([3000.0] * 4)}
    turns = [["synchronize", "rest", name, name] if rest_s else [name] for name in works]
    assert fake_time.order == [step for turn in turns for step in turn] * 5 + ["synchronize"]


@pytest.mark.parametrize(("fast_ms", "slow_ms"), [(0.5, 0.75), (40.0, 50.0), (500.0, 600.0)])
def test_sustained_runs_are_timed_once_the_clocks_have_settled(
    fast_ms: float, slow_ms: float, fake_time: FakeTime
) -> None:
    """A GPU whose clocks fall after 0.25 s of work, however short a run is."""
    work = fake_time.work("a", lambda: fast_ms if fake_time.milliseconds < 250 else slow_ms)
    assert sustained_us(work, rounds=3) == pytest.approx(1e3 * slow_ms)
    assert "rest" not in fake_time.order
    assert fake_time.milliseconds < 350 + 9 * slow_ms


@pytest.mark.parametrize("fast", [True, False])
def test_dense_ceiling_is_the_faster_accumulation(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up times of both; the sustained rate is that of the same product."""
    torch = pytest.importorskip("torch")
    ran: list[bool] = []

    def us_of(work: Callable[[], Any]) -> float:
        work()
        return 10.0 if ran[-1] == fast else 16.0

    def interleaved(works: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        return {name: [us_of(work)] * rounds for name, work in works.items()}

    zeros, ones = torch.zeros, torch.ones
    monkeypatch.setattr(torch, "randn", lambda *shape, device: zeros(shape))
    monkeypatch.setattr(torch, "ones", lambda shape, device: ones(shape))
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *_, use_fast_accum, **__: ran.append(use_fast_accum)
    )
    monkeypatch.setattr(ceilings, "interleaved_us", interleaved)
    monkeypatch.setattr(ceilings, "sustained_us", lambda work, rounds: 2 * us_of(work))
    rested, sustained, is_fast = ceilings.dense_fp8_rates(size=100)
    assert (rested, sustained) == (pytest.approx(2e6 / 10e-6), pytest.approx(2e6 / 20e-6))
    assert is_fast is fast
    assert sorted(ran[:2]) == [False, True]


# --- tables, notes, files -------------------------------------------------------------------------


def test_table_cells() -> None:
    rows = [
        fake_row(num_tokens=16, peers={"Fast": 30.0}),
        fake_row(num_tokens=64, failures={"Fast": "no kernel"}),
        fake_row(num_tokens=256),
    ]
    peers = peer_names(rows)
    assert headers(rows)[-2:] == ["Fast, us", "/ ours"]
    own = ["4.0", "25.0", "30.0", "3.20", "40", "20.0", "80%"]
    assert cells(rows[0], peers) == ["16", *own, "30.0", "1.20"]
    assert cells(rows[1], peers) == ["64", *own, "failed: no kernel", ""]
    assert cells(rows[2], peers) == ["256", *own, "-", ""]


def test_printed_report_names_everyone() -> None:
    rows = [fake_row("W-A", peers={"Fast": 30.0}), fake_row("W-B", failures={"Fast": "no kernel"})]
    console = Console(width=200)
    with console.capture() as captured:
        bench.show(fake_report(*rows), console)
    text = captured.get()
    for part in (
        "a GPU",
        "read 4.000 TB/s, dense FP8 1000 TFLOP/s after a rest, 800 sustained",
        "torch._scaled_mm with fast accumulation, the faster",
        "W-A: Qwen3-235B-A22B, H4096 I1536 E128 K8",
        "W-B: DeepSeek-V3",
        "1.20",
        "Fast: whole layer, tuned.",
        "inside a graph are joined by programmatic dependent launch",
        "Absent did not take part: absent is not installed: pip install absent.",
        "Fast failed on W-B, 16 tokens: no kernel.",
    ):
        assert part in text


def test_one_note_for_equal_failures() -> None:
    rows = [fake_row(num_tokens=t, failures={"Fast": "no kernel"}) for t in (1, 4)]
    rows.append(fake_row(num_tokens=16, failures={"Fast": "out of memory"}))
    assert notes(fake_report(*rows))[-2:] == [
        "Fast failed on W-A, 1, 4 tokens: no kernel.",
        "Fast failed on W-A, 16 tokens: out of memory.",
    ]


def test_json_holds_every_figure(tmp_path: Path) -> None:
    rows = [fake_row(peers={"Fast": 30.0}), fake_row(failures={"Fast": "no kernel"})]
    write_json(tmp_path / "rows.json", fake_report(*rows).as_dict())
    read = json.loads((tmp_path / "rows.json").read_text())
    assert read["ceilings"] == {
        "read_tb_per_s": 4.0,
        "fp8_tflops": 1000.0,
        "sustained_fp8_tflops": 800.0,
        "fp8_fast_accumulation": True,
    }
    assert read["missing"] == {"Absent": "absent is not installed: pip install absent"}
    first, second = read["rows"]
    assert (first["us"], first["us_min"], first["us_max"]) == (25.0, 24.0, 26.0)
    assert first["peers"]["Fast"]["us_over_ours"] == pytest.approx(1.2)
    assert first["peers"]["Fast"]["rel_l2_from_ours"] == 0.01
    assert second["peers"] == {}
    assert second["failures"] == {"Fast": "no kernel"}


def test_plot_has_a_column_for_each_workload(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [fake_row(key, t, peers={"Fast": 30.0}) for key in ("W-A", "W-B") for t in (1, 16)]
    report = fake_report(*rows)
    assert [len(group) for _, group in by_workload(report.rows)] == [2, 2]
    plot(tmp_path / "bench.png", report)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "package"), [("humming", "humming-kernels"), ("flashinfer", "flashinfer-python")]
)
def test_missing_peers_are_named(key: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise contenders.PackageNotFoundError(name)

    monkeypatch.setattr(contenders, "version", absent)
    present, missing = present_peers([key])
    assert present == []
    assert missing.keys() == {PEERS[key].name}
    assert f"{package} is not installed: pip install" in missing[PEERS[key].name]


def test_a_torch_without_the_grouped_gemm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "_scaled_grouped_mm")
    _, missing = present_peers(["torch"])
    assert "has no _scaled_grouped_mm" in missing["torch grouped GEMM"]


def test_every_peer_says_what_is_timed() -> None:
    for key, peer in PEERS.items():
        assert peer.key == key
        assert peer.scope.startswith("whole layer" if peer.whole_layer else "two GEMMs alone")


# --- sweep ----------------------------------------------------------------------------------------


def test_sweep_rows_are_ordered_and_printed() -> None:
    workload = WORKLOADS["W-A"]
    device = DeviceTraits(arch="sm_90a", num_sms=132)
    tilings = tile_candidates(problem_of(workload, 64), device)
    assert len(tilings) > 3
    figures = [(90.0, None), (50.0, 48.0), (47.0, 48.0), (80.0, None)]
    rows = fastest_first(
        SweepRow(workload, 64, tiling, *times)
        for tiling, times in zip(tilings[:4], figures, strict=True)
    )
    assert [row.us for row in rows] == [47.0, 50.0, 80.0, 90.0]
    assert rows[0].ratio == pytest.approx(47 / 48)
    text = printed(bench.sweep_table([rows]))
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
    rows = sweep._sweep_batch(SimpleNamespace(workload=workload), batch, tilings, replays=3)
    assert {row.tiling for row in rows} == set(tilings)
    least = min(tiling.tile_n for tiling in tilings)
    assert rows[0].tiling.tile_n == least
    assert rows[0].ratio == pytest.approx((40 + least) / 50)
    for row in rows:
        is_close = us[row.tiling] <= sweep.CLOSE * (40 + least)
        assert row.us_of_choice == (50.0 if is_close else None)


# --- the command ----------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def test_options_have_defaults() -> None:
    args = parse("fp8")
    assert args.workload == ["W-A", "W-B", "mixtral", "llama4"]
    assert args.tokens == [1, 4, 16, 64, 256, 1024, 4096, 8192, 16384]
    assert args.peers == ["torch", "humming", "flashinfer"]


@pytest.mark.parametrize("option", ["--workload=W-Z", "--tokens=0", "--peers=none-such"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        parse("fp8", option)


def test_files_are_checked_before_the_work(tmp_path: Path) -> None:
    args = parse("fp8", "--json", str(tmp_path / "no" / "rows.json"))
    with pytest.raises(ValueError, match=r"rows.json does not exist"):
        args.run(args, Console())


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
        yield [SweepRow(workload, 64, tiling, 47.0, 48.0)]
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(bench, "require_fp8_gpu", lambda: None)
    monkeypatch.setattr(bench, "sweep", fail_after_one)
    args = parse("sweep", "--json", str(tmp_path / "rows.json"))
    console = Console(width=200)
    with console.capture() as captured, pytest.raises(RuntimeError, match="the GPU is gone"):
        args.run(args, console)
    assert str(tiling) in captured.get()
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["us"] == 47.0
