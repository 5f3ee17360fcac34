"""What the benchmark reports: derived figures, tables, JSON, plot, notes, errors of the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cupy_moe.bench import ceilings, contenders, timing
from cupy_moe.bench.peers import FP4_PEERS, FP8_PEERS, present_peers
from cupy_moe.bench.report import by_layer, cells, headers, notes, peer_names, plot, write_json
from cupy_moe.bench.rows import Timing
from cupy_moe.bench.timing import interleaved_us, sustained_us
from cupy_moe.cli import bench_layers
from tests.bench_rows import fake_report, fake_row

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
    rate = ceilings.dense_fp8(size=100)
    assert rate.flops_per_s == pytest.approx(2e6 / 10e-6)
    assert rate.sustained_flops_per_s == pytest.approx(2e6 / 20e-6)
    assert rate.how == f"torch._scaled_mm {'with' if fast else 'without'} fast accumulation"
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
    own = ["4.0", "25.0", "30.0", "3.20", "80%", "40", "20.0", "80%"]
    assert cells(rows[0], peers) == ["16", *own, "30.0", "1.20"]
    assert cells(rows[1], peers) == ["64", *own, "failed: no kernel", ""]
    assert cells(rows[2], peers) == ["256", *own, "-", ""]


def test_fp4_layers_have_tables_of_their_own() -> None:
    """Without a sustained time there is none in the table."""
    forms = [("bf16", "whole"), ("mxfp8", "whole"), ("mxfp8", "tp_n_tp_k")]
    rows = [fake_row("W-D", mode=m, form=f, sustained_us=None) for m, f in forms for _ in range(2)]
    titles = [title for title, group in by_layer(rows) if len(group) == 2]
    assert [title.partition("K8, ")[2] for title in titles] == [
        "FP4, bf16",
        "FP4, mxfp8",
        "FP4, mxfp8, in two partitions tp_n_tp_k",
    ]
    assert cells(rows[0], [])[2:4] == ["25.0", "-"]


def test_printed_report_names_everyone() -> None:
    rows = [fake_row("W-A", peers={"Fast": 30.0}), fake_row("W-B", failures={"Fast": "no kernel"})]
    console = Console(width=200)
    with console.capture() as captured:
        bench_layers.show(fake_report(*rows), console)
    text = captured.get()
    for part in (
        "a GPU",
        "read 4.000 TB/s, dense FP8 1000 TFLOP/s after a rest, 800 sustained",
        "(torch._scaled_mm with fast accumulation)",
        "W-A: Qwen3-235B-A22B, H4096 I1536 E128 K8, FP8",
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
        "dense": {
            "number_format": "FP8",
            "how": "torch._scaled_mm with fast accumulation",
            "tflops": 1000.0,
            "sustained_tflops": 800.0,
        },
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
    assert [len(group) for _, group in by_layer(report.rows)] == [2, 2]
    plot(tmp_path / "bench.png", report)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


# --- peers ----------------------------------------------------------------------------------------


EVERY_PEER = [
    *(pytest.param(peer, id=f"fp8-{key}") for key, peer in FP8_PEERS.items()),
    *(pytest.param(peer, id=f"fp4-{key}") for key, peer in FP4_PEERS.items()),
]


@pytest.mark.parametrize("peer", EVERY_PEER)
def test_missing_peers_are_named(
    peer: type[contenders.Contender], monkeypatch: pytest.MonkeyPatch
) -> None:
    if peer.package == "torch":
        torch = pytest.importorskip("torch")
        needed = "_scaled_grouped_mm" if peer.name == "torch grouped GEMM" else "_grouped_mm"
        monkeypatch.delattr(torch, needed)
        reason = f"has no {needed}"
    else:
        reason = f"{peer.package} is not installed: pip install"

    def absent(name: str) -> str:
        raise contenders.PackageNotFoundError(name)

    monkeypatch.setattr(contenders, "version", absent)
    present, missing = present_peers([peer])
    assert present == []
    assert missing.keys() == {peer.name}
    assert reason in missing[peer.name]


@pytest.mark.parametrize("peers", [FP8_PEERS, FP4_PEERS], ids=["fp8", "fp4"])
def test_every_peer_says_what_is_timed(peers: dict[str, type[contenders.Contender]]) -> None:
    assert len({peer.name for peer in peers.values()}) == len(peers)
    for key, peer in peers.items():
        assert peer.key == key
        assert peer.scope.startswith("whole layer" if peer.whole_layer else "two GEMMs alone")
