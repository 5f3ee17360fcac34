"""``bench finalize``: the tensor-parallel finalize against all-reduces of the same rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cupy_moe.bench.finalize import measure_finalize
from cupy_moe.bench.finalize_ranks import FinalizeJob, FinalizeRow
from cupy_moe.bench.finalize_schemes import switch_points
from cupy_moe.cli.output import check_files, write_figures
from cupy_moe.comm.layout import default_limits
from cupy_moe.kernels.finalize_rmsnorm import RANKS, FinalizeScheme
from cupy_moe.runtime import require_gpu

__all__ = ["TOKENS", "add_options", "finalize_table", "run_finalize"]

TOKENS = (1, 4, 16, 64, 256, 2048)
CONTENDERS = {
    "cupy_moe": "cupy_moe",
    "two-shot": "two-shot all-reduce alone",
    "NCCL": "NCCL all-reduce alone",
    "NCCL + torch": "gather + NCCL all-reduce + torch",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what only this benchmark has."""
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        choices=[n for n in RANKS if n > 1],
        help="sizes of groups, one after another; default: as many as there are GPUs",
    )
    parser.add_argument(
        "--schemes",
        action="store_true",
        help="time every scheme besides, and say where it pays to change it",
    )
    parser.add_argument(
        "--transport",
        choices=["ipc", "nccl"],
        default="ipc",
        help="how rows get from rank to rank: stores into mapped memory, or messages of NCCL",
    )


def finalize_table(rows: Sequence[FinalizeRow]) -> Table:
    """Show times in us, and how often ours goes into them."""
    schemes = [s.name for s in FinalizeScheme if any(s.name in row.by_scheme for row in rows)]
    headers = ["ranks", "tokens", "scheme", "floor", *CONTENDERS.values(), *schemes, "host time"]
    table = Table(*headers, title="finalize, us a call", title_justify="left", header_style="bold")
    for row in rows:
        ours = row.us.get("cupy_moe")
        cells = [_cell(row.us.get(name), ours) for name in CONTENDERS]
        times = [f"{row.by_scheme[name]:.1f}" if name in row.by_scheme else "" for name in schemes]
        table.add_row(
            *(str(row.num_ranks), str(row.num_tokens), row.scheme, f"{row.floor_us:.1f}"),
            *cells,
            *times,
            f"{row.host_us:.1f}",
        )
    return table


def switch_lines(rows: Sequence[FinalizeRow]) -> list[str]:
    """Say for every number of ranks which scheme is best up to how many tokens."""
    lines = []
    for num_ranks in sorted({row.num_ranks for row in rows}):
        times = {
            row.num_tokens: row.by_scheme
            for row in rows
            if row.num_ranks == num_ranks and row.by_scheme
        }
        if times:
            limits = switch_points(times, num_ranks)
            lines.append(
                f"{num_ranks} ranks: EveryRank up to {limits.every_rank} tokens, then ExpertOwner "
                f"up to {limits.expert_owner}, then TokenOwner; in use: "
                f"{default_limits(num_ranks)}"
            )
    return lines


def _cell(us: float | None, ours: float | None) -> str:
    if us is None:
        return "failed"
    return f"{us:.1f}" if ours is None or us == ours else f"{us:.1f} ({us / ours:.2f}x)"


def run_finalize(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench finalize``; contenders that fail are named and do not change the code."""
    check_files(args)
    require_gpu()
    job = FinalizeJob(tuple(args.tokens), args.replays, args.schemes, args.transport)
    rows = measure_finalize(job, args.ranks)
    if not rows:
        return 0  # a rank other than the first
    console.print(finalize_table(rows))
    for line in switch_lines(rows):
        console.print(line, markup=False)
    failures: dict[str, Any] = {}
    for row in rows:
        failures.update(row.failures)
    for name, reason in failures.items():
        console.print(f"{name}: {reason}", markup=False)
    write_figures(args, console, {"rows": [row.as_dict() for row in rows]})
    return 0
