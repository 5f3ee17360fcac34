"""CUDA graphs of several calls, and their times by events, contenders alternating.

A GPU at its power limit lowers its clocks within some hundredths of a second. So runs are timed
after a rest, as in a server between its steps, or back to back, as in a long prefill, once the
clocks have settled. The first 0.3 ms after a rest are slow: one run, which is not timed, leads in.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = [
    "REST_S",
    "SETTLE_S",
    "WARMUPS",
    "CapturedCalls",
    "capture",
    "free_memory",
    "gpu_works",
    "interleaved_us",
    "median_us",
    "sustained_us",
    "synchronize",
]

WARMUPS = 3
REST_S = 0.02  # before a run
SETTLE_S = 0.3  # of work: the clocks under a load that lasts


@dataclass(frozen=True, eq=False)
class CapturedCalls:
    """A CUDA graph of calls, and everything whose address it holds.

    Attributes
    ----------
    graph : torch.cuda.CUDAGraph
    calls : sequence of callable
        They own the inputs that the graph reads: memory that was allocated before the capture is
        not the graph's, and goes to whoever allocates next once the calls are gone.
    results : list
        What each call returned, in the graph's memory.
    """

    graph: Any
    calls: Sequence[Callable[[], Any]]
    results: list[Any]

    def replay(self) -> None:
        """Enqueue all calls on torch's current stream."""
        self.graph.replay()


def capture(calls: Sequence[Callable[[], Any]]) -> CapturedCalls:
    """Record the calls back to back.

    They run once outside of the graph first, which compiles whatever is compiled.
    """
    import torch

    for call in calls:
        call()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails does not leave its stream; the outer block does.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        results = [call() for call in calls]
    return CapturedCalls(graph, calls, results)


def interleaved_us(
    works: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    warmups: int = WARMUPS,
    rest_s: float = REST_S,
) -> dict[str, list[float]]:
    """Microseconds of every run; the works take turns, so that all see the same clocks.

    Runs are enqueued on torch's current stream, each after the GPU rested for so long and did the
    same once; without a rest the host does not wait, so that the GPU does not idle between them.
    """
    import torch

    def run(work: Callable[[], Any]) -> tuple[Any, Any]:
        if rest_s:
            synchronize()
            time.sleep(rest_s)
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        return start, end

    events = [{name: run(work) for name, work in works.items()} for _ in range(warmups + rounds)]
    torch.cuda.synchronize()
    return {
        name: [1e3 * turn[name][0].elapsed_time(turn[name][1]) for turn in events[warmups:]]
        for name in works
    }


def median_us(work: Callable[[], Any], rounds: int = 15, *, rest_s: float = REST_S) -> float:
    """Median time of one work alone."""
    return median(interleaved_us({"": work}, rounds, rest_s=rest_s)[""])


def sustained_us(work: Callable[[], Any], rounds: int = 15) -> float:
    """Median time of one work alone, back to back, once the clocks have settled.

    The runs that are timed follow others that keep the GPU busy for ``SETTLE_S``; how many that
    takes is estimated from one timed run.
    """
    one_us = median_us(work, rounds=1, rest_s=0.0)
    untimed = math.ceil(1e6 * SETTLE_S / one_us)
    return median(interleaved_us({"": work}, rounds, warmups=untimed, rest_s=0.0)[""])


def synchronize() -> None:
    """Wait for the GPU; raises what went wrong on it."""
    import torch

    torch.cuda.synchronize()


def gpu_works() -> bool:
    """Whether this process can still use the GPU: after a failed kernel it cannot."""
    try:
        synchronize()
    except RuntimeError:
        return False
    return True


def free_memory() -> None:
    """Hand the memory that nobody refers to back to the device, for the other library to use."""
    import cupy
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
