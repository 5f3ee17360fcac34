"""What is timed on a rank of the tensor-parallel finalize, and how: graphs of all ranks at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

from cupy_moe.comm import (
    FinalizeWorkspace,
    NormOptions,
    check_arrays,
    tp_moe_finalize_rmsnorm,
)

__all__ = [
    "HIDDEN_SIZE",
    "TOP_K",
    "FinalizeProblem",
    "captured_on_all",
    "median_replay",
    "no_multicast",
    "num_calls",
    "push_bandwidth",
    "two_shot",
]

HIDDEN_SIZE, TOP_K = 4096, 8
EPS = 1e-6
_ENQUEUE_CYCLES = 400_000  # of the GPU, some 200 us


class FinalizeProblem:
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
        """Call the public operation."""
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

    def on_workspace(self, workspace: FinalizeWorkspace) -> Callable[[], None]:
        """Make the same call on a workspace of its own."""
        import torch

        arrays = check_arrays(
            self.rows,
            self.weights,
            self.index,
            self.norm,
            self.output,
            device=workspace.device,
            hidden_size=HIDDEN_SIZE,
            top_k=TOP_K,
        )
        options = NormOptions(EPS, 0.0, False)
        return lambda: workspace.run(arrays, options, torch.cuda.current_stream().cuda_stream)

    def all_reduce_and_torch(self) -> None:
        """Gather, all-reduce by NCCL, and finalize by torch."""
        import torch
        import torch.distributed as dist

        rows = self.rows[self.index.long()]
        dist.all_reduce(rows)
        x = rows.float()
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        total = (x * rstd * self.norm.float() * self.weights[..., None]).sum(1)
        self.output.copy_(total.to(torch.bfloat16))

    def nccl_all_reduce(self) -> None:
        """All-reduce as many rows, and nothing else."""
        import torch.distributed as dist

        dist.all_reduce(self.rows)


def two_shot(num_tokens: int) -> Callable[[], None]:
    """Bare all-reduce of the same rows through torch's symmetric memory, without multicast."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    shape = (num_tokens * TOP_K, HIDDEN_SIZE)
    rows = symmetric.empty(shape, dtype=torch.bfloat16, device="cuda").zero_()
    name = dist.group.WORLD.group_name
    symmetric.rendezvous(rows, name)
    return lambda: torch.ops.symm_mem.two_shot_all_reduce_(rows, "sum", name)


def num_calls(num_tokens: int) -> int:
    """Choose how many calls a graph has: enough to hide how it starts."""
    return 20 if num_tokens <= 256 else 5


def _captured(work: Callable[[], None], count: int) -> Any:
    """Graph of calls."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            work()
    return graph


def captured_on_all(
    make: Callable[[], Callable[[], None]], count: int
) -> tuple[Callable[[], None], Any]:
    """Make work and capture ``count`` calls of it; what one rank fails at fails on all.

    The ranks agree between the steps. A rank that fails within the work's own collective calls
    still leaves the others waiting.

    Parameters
    ----------
    make : callable
        Returns the work.
    count : int

    Returns
    -------
    tuple
        The work, which owns memory that the graph refers to, and the graph.

    Raises
    ------
    RuntimeError
        Another rank failed: to go on without it would wait for it.
    """
    work = _on_all(make)
    return work, _on_all(lambda: _captured(work, count))


def _on_all(step: Callable[[], Any]) -> Any:
    import torch
    import torch.distributed as dist

    result, failure = None, None
    try:
        result = step()
    except Exception as error:
        failure = error
    failures = torch.tensor([failure is not None], dtype=torch.int32, device="cuda")
    dist.all_reduce(failures)
    if failure is not None:
        raise failure
    if failures.item():
        raise RuntimeError(f"it failed on {failures.item()} other rank(s)")
    return result


def median_replay(graph: Any, replays: int) -> float:
    """Median microseconds of a replay; the ranks start together."""
    import torch
    import torch.distributed as dist

    times = []
    together = torch.zeros(1, device="cuda")
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda._sleep(_ENQUEUE_CYCLES)  # meanwhile all hosts enqueue what follows
        dist.all_reduce(together)  # the hosts are some us apart, the GPUs are not behind this
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)))
    return median(times[2:])


def push_bandwidth(num_bytes: int = 1 << 28) -> float:
    """Bytes/s of copies into the next rank's memory while all ranks do the same.

    Every rank has one sender: what several senders to one lose is not in it.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    target = symmetric.empty((num_bytes // 4,), dtype=torch.float32, device="cuda")
    handle = symmetric.rendezvous(target, dist.group.WORLD.group_name)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    remote = handle.get_buffer(peer, target.shape, torch.float32)
    source = torch.randn_like(target)
    _, graph = captured_on_all(lambda: lambda: remote.copy_(source), 4)
    return num_bytes * 4 / (median_replay(graph, 5) * 1e-6)


def no_multicast() -> None:
    """Keep all contenders off NVLink multicast, which not every machine grants."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
