"""Rows and reports of made-up times."""

from __future__ import annotations

from cupy_moe.bench.ceilings import Ceilings, DenseRate
from cupy_moe.bench.fp4 import FP4_WORKLOADS
from cupy_moe.bench.rows import Report, Row, Timing
from cupy_moe.bench.workloads import WORKLOADS, Work

CEILINGS = Ceilings(
    read_bytes_per_s=4e12,
    dense=DenseRate("FP8", "torch._scaled_mm with fast accumulation", 1e15, 8e14),
)


def fake_row(
    workload: str = "W-A",
    num_tokens: int = 16,
    peers: dict[str, float] | None = None,
    failures: dict[str, str] | None = None,
    *,
    mode: str = "fp8",
    form: str = "whole",
    sustained_us: float | None = 30.0,
) -> Row:
    """80 MB and 1 GFLOP in 25 us; ``peers`` are times."""
    work = Work(experts_hit=4.0, assignments=128.0, num_bytes=80e6, flops=1e9)
    times = {"cupy_moe": 25.0, **(peers or {})}
    return Row(
        workload=(WORKLOADS | FP4_WORKLOADS)[workload],
        mode=mode,
        form=form,
        num_tokens=num_tokens,
        num_calls=4,
        work=work,
        read_us=CEILINGS.read_us(work),
        floor_us=CEILINGS.floor_us(work),
        timings={name: Timing(us, us - 1, us + 1) for name, us in times.items()},
        sustained_us=sustained_us,
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
