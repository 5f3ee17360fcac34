"""Times of the tensor-parallel finalize on one rank, against all-reduces of the same rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cupy_moe.bench.finalize_contenders import (
    HIDDEN_SIZE,
    TOP_K,
    FinalizeProblem,
    captured_on_all,
    median_replay,
    num_calls,
    push_bandwidth,
    two_shot,
)
from cupy_moe.bench.finalize_schemes import time_schemes
from cupy_moe.comm import (
    check_tp_moe_finalize_rmsnorm,
    close_tp_moe_finalize_rmsnorm,
    init_tp_moe_finalize_rmsnorm,
)
from cupy_moe.comm.layout import choose_scheme, default_limits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme

__all__ = ["FinalizeJob", "FinalizeRow", "busiest_bytes", "floor_us", "measure_rank"]

# One way of a store that another GPU polls for, half of a measured round trip between two H200.
ONE_WAY_US = 0.6


@dataclass(frozen=True)
class FinalizeJob:
    """What is measured on every rank.

    Attributes
    ----------
    tokens : tuple of int
    replays : int
        Of every graph; the median counts.
    schemes : bool
        Whether to time every scheme besides.
    transport : str
        "ipc" or "nccl", see `init_tp_moe_finalize_rmsnorm`.
    """

    tokens: tuple[int, ...]
    replays: int
    schemes: bool = False
    transport: str = "ipc"


@dataclass
class FinalizeRow:
    """Medians of one number of tokens on rank 0, us a call; failures by contender."""

    num_ranks: int
    num_tokens: int
    scheme: str
    floor_us: float
    us: dict[str, float] = field(default_factory=dict)
    host_us: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    by_scheme: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self)


def busiest_bytes(scheme: FinalizeScheme, num_ranks: int, num_tokens: int) -> int:
    """Bytes that the busiest rank sends or receives for a call, rows and results."""
    row, peers = 2 * HIDDEN_SIZE, num_ranks - 1
    if scheme is FinalizeScheme.EveryRank:
        return num_tokens * row * TOP_K * peers
    if scheme is FinalizeScheme.ExpertOwner:
        return num_tokens * row * TOP_K * peers // num_ranks + 2 * num_tokens * row * peers

    def sent_and_received(owned: int) -> tuple[int, int]:
        others = num_tokens - owned
        return row * (TOP_K * others + owned * peers), row * (TOP_K * owned * peers + others)

    least, most = num_tokens // num_ranks, -(-num_tokens // num_ranks)
    return max(*sent_and_received(least), *sent_and_received(most))


def floor_us(scheme: FinalizeScheme, num_ranks: int, num_tokens: int, bandwidth: float) -> float:
    """Time of the bytes at a bandwidth in bytes/s, and one way for every hop of the scheme."""
    hops = 1 if scheme is FinalizeScheme.EveryRank else 2
    return 1e6 * busiest_bytes(scheme, num_ranks, num_tokens) / bandwidth + hops * ONE_WAY_US


def measure_rank(job: FinalizeJob) -> list[FinalizeRow]:
    """Measure on the world of ``torch.distributed``, which must be initialized with NCCL.

    Parameters
    ----------
    job : FinalizeJob
        The same one on every rank.

    Returns
    -------
    list of FinalizeRow
        The same contenders on every rank, so that the ranks stay together.

    Raises
    ------
    RuntimeError
        The operation is not supported, or a call gave up waiting for another rank.
    """
    import torch.distributed as dist

    by_scheme = time_schemes(job.tokens, job.replays, job.transport) if job.schemes else {}
    most = max(1024, *job.tokens)
    if not init_tp_moe_finalize_rmsnorm(max_tokens=most, transport=job.transport):
        raise RuntimeError(
            "bench finalize: the operation is not supported by these ranks or their GPUs; a "
            "warning of the logger cupy_moe says why."
        )
    try:
        bandwidth = push_bandwidth()
    except Exception:  # symmetric memory of torch is needed for it: no floor then
        bandwidth = math.nan
    num_ranks = dist.get_world_size()
    rows = []
    for num_tokens in job.tokens:
        scheme = choose_scheme(num_tokens, num_ranks, default_limits(num_ranks))
        floor = floor_us(scheme, num_ranks, num_tokens, bandwidth)
        row = FinalizeRow(num_ranks, num_tokens, scheme.name, floor)
        row.by_scheme = by_scheme.get(num_tokens, {})
        rows.append(_measure(row, job.replays))
    close_tp_moe_finalize_rmsnorm()
    return rows


def _measure(row: FinalizeRow, replays: int) -> FinalizeRow:
    import torch

    problem = FinalizeProblem(row.num_tokens)
    count = num_calls(row.num_tokens)
    contenders: dict[str, Callable[[], Callable[[], None]]] = {
        "cupy_moe": lambda: problem.ours,
        "two-shot": lambda: two_shot(row.num_tokens),
        "NCCL": lambda: problem.nccl_all_reduce,
        "NCCL + torch": lambda: problem.all_reduce_and_torch,
    }
    for name, make in contenders.items():
        try:
            _kept, graph = captured_on_all(make, count)
        except Exception as error:  # another package's refusal is its result
            row.failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        row.us[name] = median_replay(graph, replays) / count
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        problem.ours()
    row.host_us = 1e6 * (time.perf_counter() - start) / 50
    torch.cuda.synchronize()
    check_tp_moe_finalize_rmsnorm()
    return row
