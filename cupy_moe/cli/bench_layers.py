"""``bench fp8`` and ``bench fp4``: layers against what bounds them and against other packages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from cupy_moe.bench.ceilings import (
    Ceilings,
    DenseRate,
    dense_bf16,
    dense_fp8,
    read_bandwidth,
)
from cupy_moe.bench.contenders import Contender, CupyMoe
from cupy_moe.bench.fp4 import FP4_WORKLOADS, make_fp4_bench_layer
from cupy_moe.bench.fp8 import make_fp8_bench_layer
from cupy_moe.bench.layers import BenchLayer
from cupy_moe.bench.measure import (
    describe_environment,
    measure_all,
    require_fp8_gpu,
    require_torch_gpu,
)
from cupy_moe.bench.peers import FP4_PEERS, FP8_PEERS, present_peers
from cupy_moe.bench.report import by_layer, cells, headers, notes, peer_names, plot
from cupy_moe.bench.rows import Report, Row
from cupy_moe.bench.timing import free_memory
from cupy_moe.bench.workloads import WORKLOADS
from cupy_moe.cli.output import check_files, progress_bar, write_figures
from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime.streams import GreenPartitions

__all__ = ["Makers", "fp4_layers", "fp8_layers", "run_fp4", "run_fp8", "show", "table"]

Makers: TypeAlias = list[Callable[[], BenchLayer]]

PEERLESS = (
    "Peers take part in whole layers of BF16 tokens: nobody else rounds MXFP8 or NVFP4 tokens and "
    "intermediates as these layers do, or leaves half of the GPU to each partition."
)


# --- which layers ---------------------------------------------------------------------------------


def fp8_layers(args: argparse.Namespace) -> Makers:
    """Makers of the layers that were chosen."""
    return [
        partial(make_fp8_bench_layer, WORKLOADS[key]) for key in args.workload if key in WORKLOADS
    ]


@contextmanager
def fp4_layers(args: argparse.Namespace) -> Iterator[Makers]:
    """Makers of the layers that were chosen; the partitions of the GPU live as long as these."""
    chosen = [
        (FP4_WORKLOADS[key], mode, form)
        for key in args.workload
        if key in FP4_WORKLOADS
        for mode in args.mode
        for form in args.form
    ]
    if all(form == "whole" for _, _, form in chosen):
        yield [partial(make_fp4_bench_layer, *choice) for choice in chosen]
        return
    with GreenPartitions(0) as partitions:
        resources = MoePartitionResources(partitions.streams)
        yield [
            partial(make_fp4_bench_layer, *choice, None if choice[2] == "whole" else resources)
            for choice in chosen
        ]


def takes_peers(layer: BenchLayer) -> bool:
    """Whether other packages have the layer."""
    return layer.form == "whole" and layer.mode in ("fp8", "bf16")


# --- the commands ---------------------------------------------------------------------------------


def run_fp8(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench fp8``: 1 if a peer failed in some row, 0 where peers are only missing."""
    check_files(args)
    require_fp8_gpu()
    peers = [FP8_PEERS[key] for key in args.peers if key != "none"]
    return _run(args, console, fp8_layers(args), peers, dense_fp8, [])


def run_fp4(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench fp4``; the exit code is that of ``bench fp8``."""
    check_files(args)
    require_torch_gpu()
    peers = [FP4_PEERS[key] for key in args.peers if key != "none"]
    if not ("bf16" in args.mode and "whole" in args.form):
        peers = []
    remarks = [] if (args.mode, args.form) == (["bf16"], ["whole"]) else [PEERLESS]
    with fp4_layers(args) as layers:
        return _run(args, console, layers, peers, dense_bf16, remarks)


def _run(
    args: argparse.Namespace,
    console: Console,
    layers: Makers,
    asked: Sequence[type[Contender]],
    dense: Callable[[], DenseRate],
    remarks: Sequence[str],
) -> int:
    """Measure and report; rows that were measured before an error are reported before it leaves."""
    peers, missing = present_peers(asked)
    with console.status("ceilings"):
        ceilings = Ceilings(read_bandwidth(), dense())
        free_memory()
    contenders: list[type[Contender]] = [CupyMoe, *peers]
    rows: list[Row] = []
    report = Report(
        environment=describe_environment(contenders),
        ceilings=ceilings,
        scopes={contender.name: contender.scope for contender in contenders},
        missing=missing,
        rows=rows,
        remarks=remarks,
    )

    def peers_of(layer: BenchLayer) -> Sequence[type[Contender]]:
        return peers if takes_peers(layer) else ()

    try:
        with progress_bar(console) as progress:
            task = progress.add_task("rows", total=len(layers) * len(args.tokens))
            for row in measure_all(layers, args.tokens, peers_of, ceilings, args.replays):
                rows.append(row)
                name = f"{row.workload.key} {row.mode} {row.form}, {row.num_tokens}"
                progress.update(task, advance=1, description=name)
    finally:
        if rows:
            _deliver(report, args, console)
    return int(any(row.failures for row in rows))


# --- what comes out -------------------------------------------------------------------------------


def table(title: str, rows: Sequence[Row]) -> Table:
    """One layer's times."""
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
    dense = report.ceilings.dense
    console.print(
        f"read {report.ceilings.read_bytes_per_s / 1e12:.3f} TB/s, "
        f"dense {dense.number_format} {dense.flops_per_s / 1e12:.0f} TFLOP/s after a rest, "
        f"{dense.sustained_flops_per_s / 1e12:.0f} sustained ({dense.how})"
    )
    for title, rows in by_layer(report.rows):
        console.print(table(title, rows))
    for note in notes(report):
        console.print(note, markup=False)


def _deliver(report: Report, args: argparse.Namespace, console: Console) -> None:
    show(report, console)
    write_figures(args, console, report.as_dict())
    if args.plot:
        plot(args.plot, report)
        console.print(f"plot written to {args.plot}", markup=False)
