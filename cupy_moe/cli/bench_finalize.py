"""``bench finalize``: the tensor-parallel finalize against all-reduces of the same rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cupy_moe.bench.finalize import measure_finalize
from cupy_moe.bench.finalize_ranks import FinalizeRow
from cupy_moe.cli.output import check_files, write_figures
from cupy_moe.runtime import require_gpu

__all__ = ["TOKENS", "finalize_table", "run_finalize"]

TOKENS = (1, 4, 16, 64, 256, 2048)
CONTENDERS = {
    "cupy_moe": "cupy_moe",
    "two-shot": "two-shot all-reduce alone",
    "NCCL": "NCCL all-reduce alone",
    "NCCL + torch": "gather + NCCL all-reduce + torch",
}


def finalize_table(rows: Sequence[FinalizeRow]) -> Table:
    """Show times in us, and how often ours goes into them."""
    headers = ["tokens", "scheme", "floor", *CONTENDERS.values(), "host time"]
    table = Table(*headers, title="finalize, us a call", title_justify="left", header_style="bold")
    for row in rows:
        ours = row.us.get("cupy_moe")
        cells = [_cell(row.us.get(name), ours) for name in CONTENDERS]
        floor = f"{row.floor_us:.1f}"
        table.add_row(str(row.num_tokens), row.scheme, floor, *cells, f"{row.host_us:.1f}")
    return table


def _cell(us: float | None, ours: float | None) -> str:
    if us is None:
        return "failed"
    return f"{us:.1f}" if ours is None or us == ours else f"{us:.1f} ({us / ours:.2f}x)"


def run_finalize(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench finalize``; contenders that fail are named and do not change the code."""
    check_files(args)
    require_gpu()
    rows = measure_finalize(args.tokens, args.replays)
    if not rows:
        return 0  # a rank other than the first
    console.print(finalize_table(rows))
    failures: dict[str, Any] = {}
    for row in rows:
        failures.update(row.failures)
    for name, reason in failures.items():
        console.print(f"{name}: {reason}", markup=False)
    write_figures(args, console, {"rows": [row.as_dict() for row in rows]})
    return 0
