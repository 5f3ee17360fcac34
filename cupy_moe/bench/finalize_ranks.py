"""Times of the tensor-parallel finalize on one rank, against all-reduces of the same rows."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from cupy_moe.comm import (
    close_tp_moe_finalize_rmsnorm,
    init_tp_moe_finalize_rmsnorm,
    tp_moe_finalize_rmsnorm,
)
from cupy_moe.comm.layout import choose_scheme, default_limits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme

__all__ = ["HIDDEN_SIZE", "TOP_K", "FinalizeRow", "floor_us", "measure_rank", "sent_bytes"]

HIDDEN_SIZE, TOP_K = 4096, 8
# One way of a store that another GPU polls for, half of a measured round trip between two H200.
ONE_WAY_US = 0.6
EPS = 1e-6


@dataclass
class FinalizeRow:
    """Medians of one number of tokens on rank 0, us a call; failures by contender."""

    num_tokens: int
    scheme: str
    floor_us: float
    us: dict[str, float] = field(default_factory=dict)
    host_us: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self)


def sent_bytes(scheme: FinalizeScheme, num_ranks: int, num_tokens: int) -> float:
    """Bytes that a rank sends for a call, rows and results."""
    row, peers = 2 * HIDDEN_SIZE, num_ranks - 1
    if scheme is FinalizeScheme.EveryRank:
        return num_tokens * row * TOP_K * peers
    rows = num_tokens * row * TOP_K * peers / num_ranks
    if scheme is FinalizeScheme.ExpertOwner:
        return rows + 2 * num_tokens * row * peers
    return rows + num_tokens * row * peers / num_ranks


def floor_us(scheme: FinalizeScheme, num_ranks: int, num_tokens: int, bandwidth: float) -> float:
    """Time of the bytes at a bandwidth in bytes/s, and one way for every hop of the scheme."""
    hops = 1 if scheme is FinalizeScheme.EveryRank else 2
    return 1e6 * sent_bytes(scheme, num_ranks, num_tokens) / bandwidth + hops * ONE_WAY_US


def measure_rank(tokens: Sequence[int], replays: int) -> list[FinalizeRow]:
    """Measure on the world of ``torch.distributed``, which must be initialized with NCCL.

    Parameters
    ----------
    tokens : sequence of int
    replays : int
        Of every graph.

    Returns
    -------
    list of FinalizeRow
        The same contenders on every rank, so that the ranks stay together.
    """
    import torch.distributed as dist

    assert init_tp_moe_finalize_rmsnorm(max_tokens=max(1024, *tokens))
    try:
        bandwidth = _push_bandwidth()
    except Exception:  # symmetric memory of torch is needed for it: no floor then
        bandwidth = math.nan
    num_ranks = dist.get_world_size()
    rows = []
    for num_tokens in tokens:
        scheme = choose_scheme(num_tokens, num_ranks, default_limits(num_ranks))
        floor = floor_us(scheme, num_ranks, num_tokens, bandwidth)
        rows.append(_measure(FinalizeRow(num_tokens, scheme.name, floor), replays))
    close_tp_moe_finalize_rmsnorm()
    return rows


class _Problem:
    """Arrays of one call."""

    def __init__(self, num_tokens: int) -> None:
        import torch

        generator = torch.Generator("cuda").manual_seed(num_tokens)
        bf16, num_rows = torch.bfloat16, num_tokens * TOP_K
        options = {"device": "cuda", "generator": generator}
        self.rows = torch.randn(num_rows, HIDDEN_SIZE, dtype=bf16, **options)
        self.weights = torch.rand(num_tokens, TOP_K, **options)
        order = torch.randperm(num_rows, **options)
        self.index = order.reshape(num_tokens, TOP_K).int()
        self.norm = torch.ones(HIDDEN_SIZE, dtype=bf16, device="cuda")
        self.output = torch.empty(num_tokens, HIDDEN_SIZE, dtype=bf16, device="cuda")

    def ours(self) -> None:
        tp_moe_finalize_rmsnorm(
            self.rows,
            self.weights,
            self.index,
            self.norm,
            self.output,
            eps=EPS,
            gain_center=0.0,
            weight_before_norm=False,
        )

    def all_reduce_and_torch(self) -> None:
        import torch
        import torch.distributed as dist

        rows = self.rows[self.index.long()]
        dist.all_reduce(rows)
        x = rows.float()
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        total = (x * rstd * self.norm.float() * self.weights[..., None]).sum(1)
        self.output.copy_(total.to(torch.bfloat16))

    def nccl_all_reduce(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.rows)


def _two_shot(num_tokens: int) -> Callable[[], None]:
    """Bare all-reduce of the same rows through torch's symmetric memory, without multicast."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    shape = (num_tokens * TOP_K, HIDDEN_SIZE)
    rows = symmetric.empty(shape, dtype=torch.bfloat16, device="cuda").zero_()
    name = dist.group.WORLD.group_name
    symmetric.rendezvous(rows, name)
    return lambda: torch.ops.symm_mem.two_shot_all_reduce_(rows, "sum", name)


def _measure(row: FinalizeRow, replays: int) -> FinalizeRow:
    import torch

    problem = _Problem(row.num_tokens)
    num_calls = 20 if row.num_tokens <= 256 else 5
    contenders: dict[str, Callable[[], Callable[[], None]]] = {
        "cupy_moe": lambda: problem.ours,
        "two-shot": lambda: _two_shot(row.num_tokens),
        "NCCL": lambda: problem.nccl_all_reduce,
        "NCCL + torch": lambda: problem.all_reduce_and_torch,
    }
    for name, make in contenders.items():
        try:
            work = make()  # kept: the graph refers to memory that it owns
            graph = _captured(work, num_calls)
        except Exception as error:  # another package's refusal is its result
            row.failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        row.us[name] = _replay(graph, replays) / num_calls
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        problem.ours()
    row.host_us = 1e6 * (time.perf_counter() - start) / 50
    torch.cuda.synchronize()
    return row


def _captured(work: Callable[[], None], num_calls: int) -> Any:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(num_calls):
            work()
    return graph


def _replay(graph: Any, replays: int) -> float:
    """Median microseconds of a replay; the ranks start together."""
    import torch
    import torch.distributed as dist

    times = []
    together = torch.zeros(1, device="cuda")
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        dist.all_reduce(together)  # the hosts are some us apart, the GPUs are not behind this
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)))
    return median(times[2:])


def _push_bandwidth(num_bytes: int = 1 << 28) -> float:
    """Bytes/s of copies into the next rank's memory while it does the same."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    target = symmetric.empty((num_bytes // 4,), dtype=torch.float32, device="cuda")
    handle = symmetric.rendezvous(target, dist.group.WORLD.group_name)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    remote = handle.get_buffer(peer, target.shape, torch.float32)
    source = torch.zeros_like(target)
    graph = _captured(lambda: remote.copy_(source), 4)
    return num_bytes * 4 / (_replay(graph, 5) * 1e-6)


def no_multicast() -> None:
    """Keep symmetric memory off NVLink multicast, which not every machine grants."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
