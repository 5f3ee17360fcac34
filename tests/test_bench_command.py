"""Options of ``bench`` and what its commands do with rows that are made up."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cupy_moe.bench import contenders
from cupy_moe.bench.fp4 import FORMS, FP4_WORKLOADS, MODES
from cupy_moe.bench.workloads import WORKLOADS
from cupy_moe.cli import bench, bench_layers
from tests.bench_rows import CEILINGS, fake_row


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def test_options_have_defaults() -> None:
    args = parse("fp8")
    assert args.workload == ["W-A", "W-B", "mixtral", "llama4"]
    assert args.tokens == [1, 4, 16, 64, 256, 1024, 4096, 8192, 16384]
    assert args.peers == ["torch", "humming", "flashinfer"]
    args = parse("fp4")
    assert args.workload == ["W-C", "W-D"]
    assert (args.mode, args.form) == (list(MODES), list(FORMS))
    assert args.peers == ["torch", "humming-indexed", "humming-grouped", "marlin", "flashinfer"]
    args = parse("sweep")
    assert args.workload == ["W-A", "W-B", "mixtral", "llama4", "W-C", "W-D"]
    assert (args.mode, args.form) == (list(MODES), ["whole"])


@pytest.mark.parametrize("option", ["--workload=W-Z", "--tokens=0", "--peers=none-such"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        parse("fp8", option)


@pytest.mark.parametrize("what", ["fp8", "fp4", "sweep", "finalize"])
def test_files_are_checked_before_the_work(what: str, tmp_path: Path) -> None:
    args = parse(what, "--json", str(tmp_path / "no" / "rows.json"))
    with pytest.raises(ValueError, match=r"rows.json does not exist"):
        args.run(args, Console())


# --- fp8 and fp4 ---


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Run ``bench fp8`` on rows that are given; an exception among them is raised there."""

    def run(*rows: Any, what: str = "fp8", options: tuple[str, ...] = ()) -> tuple[int, Path]:
        def measure_all(layers: Any, *_: Any) -> Iterator[Any]:
            assert len(layers) == 1
            for row in rows:
                if isinstance(row, Exception):
                    raise row
                yield row

        replacements = {
            "require_fp8_gpu": lambda: None,
            "require_torch_gpu": lambda: None,
            "read_bandwidth": lambda: CEILINGS.read_bytes_per_s,
            "dense_fp8": lambda: CEILINGS.dense,
            "dense_bf16": lambda: CEILINGS.dense,
            "free_memory": lambda: None,
            "describe_environment": lambda contenders: {"gpu": "a GPU"},
            "measure_all": measure_all,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(bench_layers, name, replacement)
        path = tmp_path / "rows.json"
        chosen = options or ("--peers", "none", "--workload", "W-A")
        args = parse(what, *chosen, "--json", str(path))
        return args.run(args, Console(quiet=True)), path

    return run


def test_exit_code_says_whether_a_peer_failed(run: Any) -> None:
    good, bad = fake_row(peers={"Fast": 30.0}), fake_row(failures={"Fast": "no kernel"})
    assert run(good)[0] == 0
    assert run(bad, good)[0] == 1


def test_rows_before_an_error_are_written(run: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        run(fake_row(num_tokens=4), RuntimeError("the GPU is gone"))
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["tokens"] == 4


@pytest.mark.parametrize(("mode", "num_missing", "num_remarks"), [("bf16", 4, 0), ("mxfp8", 0, 1)])
def test_fp4_has_peers_for_whole_layers_of_bf16_tokens(
    mode: str, num_missing: int, num_remarks: int, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but torch are absent here; the report says so, or why nobody was asked."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(contenders, "version", absent)
    row = fake_row("W-C", mode=mode, sustained_us=None)
    options = ("--workload", "W-C", "--mode", mode, "--form", "whole", "--tokens", "16")
    code, path = run(row, what="fp4", options=options)
    report = json.loads(path.read_text())
    assert code == 0
    assert len(report["missing"]) == num_missing
    assert len(report["remarks"]) == num_remarks
    assert report["rows"][0]["mode"] == mode


def test_only_layers_that_others_have_take_peers() -> None:
    answers = {
        (mode, form): bench_layers.takes_peers(SimpleNamespace(mode=mode, form=form))
        for mode in ("fp8", "bf16", "mxfp8", "nvfp4")
        for form in ("whole", "tp_n_tp_n", "tp_n_tp_k")
    }
    assert {key for key, takes in answers.items() if takes} == {("fp8", "whole"), ("bf16", "whole")}


def chosen_layers(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[list[Any], list[Any]]:
    """What ``bench sweep`` would make; partitions are simulated."""

    @contextmanager
    def partitions(device: int) -> Iterator[Any]:
        yield SimpleNamespace(streams=(None, None))

    monkeypatch.setattr(bench_layers, "GreenPartitions", partitions)
    args = parse("sweep", *options)
    with bench_layers.fp4_layers(args) as fp4:
        return [maker.args for maker in bench_layers.fp8_layers(args)], [m.args for m in fp4]


def test_layers_are_those_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--workload", "W-B", "W-D", "--mode", "bf16", "nvfp4")
    fp8, fp4 = chosen_layers(monkeypatch, *options)
    assert fp8 == [(WORKLOADS["W-B"],)]
    whole = [(FP4_WORKLOADS["W-D"], mode, "whole", None) for mode in ("bf16", "nvfp4")]
    assert [(*args, *[None] * (4 - len(args))) for args in fp4] == whole
    _, fp4 = chosen_layers(monkeypatch, *options, "--form", "whole", "tp_n_tp_k")
    assert [(mode, form) for _, mode, form, _ in fp4] == [
        (mode, form) for mode in ("bf16", "nvfp4") for form in ("whole", "tp_n_tp_k")
    ]
    assert [resources is None for *_, resources in fp4] == [True, False, True, False]
