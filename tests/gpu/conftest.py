"""What GPU tests share: memory given back, enough GPUs, a count of graph launches."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from cupy_moe import bound_layer
from cupy_moe.fused_moe import repeated
from cupy_moe.runtime.graph import LaunchGraph
from tests.gpu.finalize_ranks import need_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the benchmarks, most of the time, to the end: a suite that is stopped has tested."""
    items.sort(key=lambda item: "benchmarks" in item.path.stem)


@pytest.fixture(autouse=True, scope="module")
def _free_gpu_memory() -> Iterator[None]:
    """Give back what a module of tests allocated before the next one starts."""
    yield
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


@pytest.fixture(scope="module")
def two_gpus() -> None:
    """Skip a module where there are fewer, before its fixtures run anything."""
    need_gpus(2)


@pytest.fixture
def graphs() -> Iterator[mock.Mock]:
    """Counts launches of graphs, from now on and of calls not seen before."""
    for memory in (repeated.accepted, bound_layer._places):
        memory.cache_clear()
    with mock.patch.object(
        LaunchGraph, "enqueue", autospec=True, side_effect=LaunchGraph.enqueue
    ) as enqueue:
        yield enqueue
