"""CUDA graphs of several calls, and their times by events, contenders alternating."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["WARMUPS", "capture", "free_memory", "interleaved_us", "median_us"]

WARMUPS = 3


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
    """CUDA graph of the calls back to back, and the result of each in the graph's memory.

    The calls run once outside of the graph first, which compiles whatever is compiled.
    """
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def interleaved_us(
    works: Mapping[str, Callable[[], Any]], rounds: int, warmups: int = WARMUPS
) -> dict[str, list[float]]:
    """Microseconds of every run; the works take turns, so that all see the same clocks.

    Runs are enqueued without waiting on torch's current stream, so that the GPU does not idle
    between them.
    """
    import torch

    def run(work: Callable[[], Any]) -> tuple[Any, Any]:
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


def median_us(work: Callable[[], Any], rounds: int = 15) -> float:
    """Median time of one work alone."""
    return median(interleaved_us({"": work}, rounds)[""])


def free_memory() -> None:
    """Hand the memory that nobody refers to back to the device, for the other library to use."""
    import cupy
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
