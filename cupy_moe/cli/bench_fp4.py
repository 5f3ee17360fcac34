"""``bench fp4``: FP4 layers, whole and in two partitions of the GPU, against their floor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cupy_moe.bench.ceilings import read_bandwidth
from cupy_moe.bench.fp4 import (
    FORMS,
    FP4_WORKLOADS,
    MODES,
    Fp4Ceilings,
    Fp4Row,
    make_fp4_bench_layer,
    measure_fp4,
    measure_fp4_ceilings,
)
from cupy_moe.bench.report import write_json
from cupy_moe.bench.timing import free_memory
from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime import require_gpu
from cupy_moe.runtime.streams import GreenPartitions

__all__ = ["FORMS", "FP4_WORKLOADS", "MODES", "fp4_table", "run_fp4"]


def fp4_table(rows: Sequence[Fp4Row]) -> Table:
    """Show one line a row."""
    table = Table(title="FP4 layers", title_justify="left", header_style="bold")
    titles = ("workload", "mode", "form", "tokens", "experts hit", "us", "TB/s", "TFLOP/s")
    for title in (*titles, "floor us", "of floor"):
        table.add_column(title, justify="right")
    for row in rows:
        d = row.as_dict()
        name = f"{row.workload.key} {row.workload.title}"
        figures = (f"{d['us']:.1f}", f"{d['tb_per_s']:.2f}", f"{d['tflops']:.0f}")
        floor = (f"{row.floor_us:.1f}", f"{d['share_of_floor']:.0%}")
        count = (str(row.num_tokens), f"{row.work.experts_hit:.1f}")
        table.add_row(name, row.mode, row.form, *count, *figures, *floor)
    return table


def _rows(
    args: argparse.Namespace, ceilings: Fp4Ceilings, resources: MoePartitionResources | None
) -> Iterator[Fp4Row]:
    for key in args.workload:
        for mode in args.mode:
            for form in args.form:
                free_memory()
                layer = make_fp4_bench_layer(FP4_WORKLOADS[key], mode, form, resources)
                for num_tokens in args.tokens:
                    yield measure_fp4(layer, num_tokens, ceilings, replays=args.replays)
                del layer


def _partitioned_rows(args: argparse.Namespace, ceilings: Fp4Ceilings) -> Iterator[Fp4Row]:
    with GreenPartitions(0) as partitions:
        yield from _rows(args, ceilings, MoePartitionResources(partitions.streams))


def run_fp4(args: argparse.Namespace, console: Console) -> int:
    """Run ``bench fp4``; rows that were measured before an error are reported."""
    require_gpu()
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"bench: the folder of {args.json} does not exist.")
    with console.status("ceilings"):
        ceilings = measure_fp4_ceilings(read_bandwidth())
        free_memory()
    console.print(
        f"read {ceilings.read_bytes_per_s / 1e12:.3f} TB/s, dense BF16 "
        f"{ceilings.bf16_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    rows: list[Fp4Row] = []
    try:
        is_whole = args.form == ["whole"]
        measured = _rows(args, ceilings, None) if is_whole else _partitioned_rows(args, ceilings)
        for row in measured:
            rows.append(row)
    finally:
        if rows:
            _deliver(args, console, ceilings, rows)
    return 0


def _deliver(
    args: argparse.Namespace, console: Console, ceilings: Fp4Ceilings, rows: Sequence[Fp4Row]
) -> None:
    console.print(fp4_table(rows))
    if args.json:
        content: dict[str, Any] = {
            "read_tb_per_s": ceilings.read_bytes_per_s / 1e12,
            "bf16_tflops": ceilings.bf16_flops_per_s / 1e12,
            "rows": [row.as_dict() for row in rows],
        }
        write_json(args.json, content)
        console.print(f"figures written to {args.json}", markup=False)
