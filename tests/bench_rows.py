"""Rows and reports of made-up times."""

from __future__ import annotations

from cupy_moe.bench.ceilings import Ceilings
from cupy_moe.bench.rows import Report, Row, Timing
from cupy_moe.bench.workloads import WORKLOADS, Work

CEILINGS = Ceilings(
    read_bytes_per_s=4e12,
    fp8_flops_per_s=1e15,
    sustained_fp8_flops_per_s=8e14,
    fp8_fast_accumulation=True,
)


def fake_row(
    workload: str = "W-A",
    num_tokens: int = 16,
    peers: dict[str, float] | None = None,
    failures: dict[str, str] | None = None,
) -> Row:
    """80 MB and 1 GFLOP in 25 us; ``peers`` are times."""
    work = Work(experts_hit=4.0, assignments=128.0, num_bytes=80e6, flops=1e9)
    times = {"cupy_moe": 25.0, **(peers or {})}
    return Row(
        workload=WORKLOADS[workload],
        num_tokens=num_tokens,
        num_calls=4,
        work=work,
        floor_us=CEILINGS.floor_us(work.num_bytes, work.flops),
        timings={name: Timing(us, us - 1, us + 1) for name, us in times.items()},
        sustained_us=30.0,
        errors=dict.fromkeys(peers or {}, 0.01),
        failures=failures or {},
    )


def fake_report(*rows: Row) -> Report:
    """Report of a run in which one peer was missing."""
    return Report(
        environment={"gpu": "a GPU", "torch": "2.11"},
        ceilings=CEILINGS,
        scopes={"cupy_moe": "whole layer", "Fast": "whole layer, tuned"},
        missing={"Absent": "absent is not installed: pip install absent"},
        rows=rows,
    )
