"""``bench``: the layer's times against what bounds it and against other implementations."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cupy_moe.bench.ceilings import measure_ceilings
from cupy_moe.bench.contenders import Contender, CupyMoe
from cupy_moe.bench.measure import describe_environment, measure_all, require_fp8_gpu
from cupy_moe.bench.peers import PEERS, present_peers
from cupy_moe.bench.report import (
    by_workload,
    cells,
    headers,
    notes,
    peer_names,
    plot,
    write_json,
)
from cupy_moe.bench.rows import Report, Row
from cupy_moe.bench.sweep import SweepRow, sweep
from cupy_moe.bench.timing import free_memory
from cupy_moe.bench.workloads import TOKENS, WORKLOADS, Workload
from cupy_moe.cli import bench_finalize, bench_fp4

__all__ = ["add_parser"]

SHOWN_TILINGS = 5


def _workloads(args: argparse.Namespace) -> list[Workload]:
    return [WORKLOADS[key] for key in args.workload]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _check_files(args: argparse.Namespace) -> None:
    """Refuse what would fail after minutes of work."""
    if getattr(args, "plot", None) and find_spec("matplotlib") is None:
        raise RuntimeError('--plot needs matplotlib: pip install "cupy-moe[bench]"')
    for path in (args.json, getattr(args, "plot", None)):
        if path and not path.parent.is_dir():
            raise ValueError(f"bench: the folder of {path} does not exist.")


# --- fp8 ------------------------------------------------------------------------------------------


def table(title: str, rows: Sequence[Row]) -> Table:
    """One workload's times."""
    result = Table(title=title, title_justify="left", header_style="bold")
    for header in headers(rows):
        result.add_column(header, justify="right")
    peers = peer_names(rows)
    for row in rows:
        result.add_row(*cells(row, peers))
    return result


def show(report: Report, console: Console) -> None:
    """Print ceilings, tables and notes."""
    environment = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    console.print(environment, markup=False)
    ceilings = report.ceilings
    console.print(
        f"read {ceilings.read_bytes_per_s / 1e12:.3f} TB/s, "
        f"dense FP8 {ceilings.fp8_flops_per_s / 1e12:.0f} TFLOP/s after a rest, "
        f"{ceilings.sustained_fp8_flops_per_s / 1e12:.0f} sustained (torch._scaled_mm "
        f"{'with' if ceilings.fp8_fast_accumulation else 'without'} fast accumulation, the faster)"
    )
    for title, rows in by_workload(report.rows):
        console.print(table(title, rows))
    for note in notes(report):
        console.print(note, markup=False)


def run_fp8(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench fp8``: 1 if a peer failed in some row, 0 where peers are only missing.

    Rows that were measured before an error are reported before it is raised.
    """
    _check_files(args)
    require_fp8_gpu()
    peers, missing = present_peers(() if args.peers == ["none"] else args.peers)
    with console.status("ceilings"):
        ceilings = measure_ceilings()
        free_memory()
    contenders: list[type[Contender]] = [CupyMoe, *peers]
    rows: list[Row] = []
    report = Report(
        environment=describe_environment(contenders),
        ceilings=ceilings,
        scopes={contender.name: contender.scope for contender in contenders},
        missing=missing,
        rows=rows,
    )
    workloads = _workloads(args)
    try:
        with _progress(console) as progress:
            task = progress.add_task("rows", total=len(workloads) * len(args.tokens))
            for row in measure_all(workloads, args.tokens, peers, ceilings, args.replays):
                rows.append(row)
                name = f"{row.workload.key}, {row.num_tokens}"
                progress.update(task, advance=1, description=name)
    finally:
        if rows:
            _deliver(report, args, console)
    return int(any(row.failures for row in rows))


def _deliver(report: Report, args: argparse.Namespace, console: Console) -> None:
    show(report, console)
    if args.json:
        write_json(args.json, report.as_dict())
        console.print(f"figures written to {args.json}", markup=False)
    if args.plot:
        plot(args.plot, report)
        console.print(f"plot written to {args.plot}", markup=False)


# --- sweep ----------------------------------------------------------------------------------------


def sweep_table(groups: Iterable[Sequence[SweepRow]]) -> Table:
    """Best tilings of every workload and number of tokens."""
    result = Table("workload", "tokens", "tiling", "us", "/ plan's choice", header_style="bold")
    for rows in groups:
        for row in rows[:SHOWN_TILINGS]:
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            line = (row.workload.key, str(row.num_tokens), str(row.tiling), f"{row.us:.1f}", ratio)
            result.add_row(*line)
        result.add_section()
    return result


def run_sweep(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench sweep``; batches that were measured before an error are reported."""
    _check_files(args)
    require_fp8_gpu()
    workloads = _workloads(args)
    groups: list[list[SweepRow]] = []
    try:
        with _progress(console) as progress:
            task = progress.add_task("batches", total=len(workloads) * len(args.tokens))
            for rows in sweep(workloads, args.tokens, args.replays):
                groups.append(rows)
                progress.advance(task)
    finally:
        if groups:
            _deliver_sweep(groups, args, console)
    return 0


def _deliver_sweep(
    groups: Sequence[Sequence[SweepRow]], args: argparse.Namespace, console: Console
) -> None:
    console.print(sweep_table(groups))
    if args.json:
        write_json(args.json, {"rows": [row.as_dict() for rows in groups for row in rows]})
        console.print(f"figures written to {args.json}", markup=False)


# --- options --------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all"
    )
    _add_measurement(parser, TOKENS)


def _add_measurement(parser: argparse.ArgumentParser, tokens: Sequence[int]) -> None:
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=_positive,
        default=list(tokens),
        metavar="T",
        help=f"rows of a workload; default: {' '.join(map(str, tokens))}",
    )
    parser.add_argument(
        "--replays", type=_positive, default=15, help="of every graph; the median counts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def add_parser(subparsers: Any) -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("bench", help="time the layers on this machine's GPU")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    fp8 = kinds.add_parser("fp8", help="FP8 layers against their floor and other implementations")
    _add_common(fp8)
    fp8.add_argument(
        "--peers",
        nargs="+",
        choices=[*PEERS, "none"],
        default=list(PEERS),
        help="those that are not installed are named; default: all",
    )
    fp8.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (matplotlib)")
    fp8.set_defaults(run=run_fp8)
    tilings = kinds.add_parser("sweep", help="FP8 layers with every tiling of sensible token tiles")
    _add_common(tilings)
    tilings.set_defaults(run=run_sweep)
    fp4 = kinds.add_parser(
        "fp4", help="FP4 layers against their floor, whole and in two partitions"
    )
    for option, values in (
        ("--workload", bench_fp4.FP4_WORKLOADS),
        ("--mode", bench_fp4.MODES),
        ("--form", bench_fp4.FORMS),
    ):
        fp4.add_argument(
            option, nargs="+", choices=list(values), default=list(values), help="default: all"
        )
    _add_measurement(fp4, TOKENS)
    fp4.set_defaults(run=bench_fp4.run_fp4)
    finalize = kinds.add_parser("finalize", help="the tensor-parallel finalize on several GPUs")
    _add_measurement(finalize, bench_finalize.TOKENS)
    bench_finalize.add_options(finalize)
    finalize.set_defaults(run=bench_finalize.run_finalize)
