"""``bench sweep``: layers with every sensible tiling."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from cupy_moe.bench.measure import require_fp8_gpu, require_torch_gpu
from cupy_moe.bench.sweep import SweepRow, sweep
from cupy_moe.bench.workloads import WORKLOADS
from cupy_moe.cli.bench_layers import fp4_layers, fp8_layers
from cupy_moe.cli.output import check_files, progress_bar, write_figures

__all__ = ["run_sweep", "sweep_table"]

SHOWN_TILINGS = 5


def sweep_table(groups: Iterable[Sequence[SweepRow]]) -> Table:
    """Best tilings of every layer and number of tokens."""
    result = Table("layer", "tokens", "tiling", "us", "/ plan's choice", header_style="bold")
    for rows in groups:
        for row in rows[:SHOWN_TILINGS]:
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            line = (row.layer, str(row.num_tokens), str(row.tiling), f"{row.us:.1f}", ratio)
            result.add_row(*line)
        result.add_section()
    return result


def run_sweep(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench sweep``; batches that were measured before an error are reported."""
    check_files(args)
    (require_fp8_gpu if any(key in WORKLOADS for key in args.workload) else require_torch_gpu)()
    groups: list[list[SweepRow]] = []
    try:
        with progress_bar(console) as progress, fp4_layers(args) as fp4:
            layers = fp8_layers(args) + fp4
            task = progress.add_task("batches", total=len(layers) * len(args.tokens))
            for rows in sweep(layers, args.tokens, args.replays):
                groups.append(rows)
                progress.advance(task)
    finally:
        if groups:
            console.print(sweep_table(groups))
            figures = [row.as_dict() for rows in groups for row in rows]
            write_figures(args, console, {"rows": figures})
    return 0
