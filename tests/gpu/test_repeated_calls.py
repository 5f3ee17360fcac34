"""Layers that run again at the same addresses: as one CUDA graph, with the results of launches."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupy_moe.runtime.devices import check, compute_capability
from cupy_moe.runtime.streams import GreenPartitions, stream_handle
from cupy_moe.testing.compare import assert_bit_equal, to_host
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    capture,
    full,
    host_copies,
    overwrite,
    overwrite_arguments,
    plan_routed_moe,
    routed_moe,
    run_in_threads,
    side_stream,
    small_arguments,
    synchronize,
)
from tests.gpu.test_fp8_handle import assert_same

pytestmark = pytest.mark.gpu

CALLS = 20  # the graph comes after eight
SHAPE = (33, 256)  # of the output

each_library = pytest.mark.parametrize("library", LIBRARIES)


def eager(arguments: dict[str, Any], library: str) -> np.ndarray:
    """Output of an eager call on fresh arrays."""
    return to_host(routed_moe(**move_arguments(arguments, library)))


def static_arguments(library: str, **options: Any) -> dict[str, Any]:
    """A call that allocates nothing, so that it always runs at the same addresses."""
    arguments = move_arguments(small_arguments(SHAPE[0], **options), library)
    workspace = full((plan_routed_moe(**arguments).scratch_bytes,), 0xFF, np.uint8, library)
    output = full(SHAPE, np.nan, BF16, library)
    return {**arguments, "workspace_buffer": workspace, "output": output}


@pytest.mark.parametrize("dtype", ["packed", "float32"])
@pytest.mark.parametrize("enable_pdl", [None, False])
@each_library
def test_calls_follow_new_inputs(
    library: str, enable_pdl: bool | None, dtype: str, graphs: mock.Mock
) -> None:
    static = static_arguments(library, dtype=dtype)
    variants = [{"pattern": "one_expert"}, {"invalid": "all_rows"}, {"pattern": "uniform"}]
    fresh = [small_arguments(SHAPE[0], dtype=dtype, seed=9, **v) for v in variants]
    expected = [eager(call, library) for call in fresh]
    graphs.reset_mock()
    for n in range(CALLS):
        overwrite_arguments(static, move_arguments(fresh[n % 3], library))
        overwrite(static["output"], full(SHAPE, np.nan, BF16, library))
        routed_moe(**static, enable_pdl=enable_pdl)
        assert_bit_equal(static["output"], expected[n % 3], f"call {n}")
    assert graphs.call_count == CALLS - 9, "launches by the first layer and of eight more calls"


@each_library
def test_allocated_results_are_never_mixed_up(library: str) -> None:
    """Allocators hand the same few blocks out in turns; every result is held for a while."""
    calls = [small_arguments(SHAPE[0], seed=seed) for seed in range(3)]
    arguments = [move_arguments(call, library) for call in calls]
    expected = [eager(call, library) for call in calls]
    held: list[tuple[int, Any]] = []
    for step in np.random.default_rng(0).integers(0, 3, 150):
        held.append((step, routed_moe(**arguments[step])))
        if len(held) > 3:
            index, output = held.pop(0)
            assert_bit_equal(output, expected[index], f"call {index}")


@pytest.mark.parametrize("dtype", ["packed", "float32"])
@each_library
def test_rows_that_are_handed_out(library: str, dtype: str) -> None:
    calls = [small_arguments(SHAPE[0], seed=seed, dtype=dtype) for seed in range(3)]
    arguments = [move_arguments(call, library) | {"do_finalize": False} for call in calls]
    expected = [host_copies(routed_moe(**call)) for call in arguments]
    held: list[tuple[int, Any]] = []
    for step in np.random.default_rng(0).integers(0, 3, 90):
        held.append((step, routed_moe(**arguments[step])))
        if len(held) > 3:
            index, results = held.pop(0)
            assert_same(results, expected[index], f"call {index}")


@each_library
def test_streams_and_captures_after_a_graph(library: str, graphs: mock.Mock) -> None:
    static = static_arguments(library)
    expected = eager(small_arguments(SHAPE[0]), library)
    for _ in range(CALLS):
        routed_moe(**static)
    for _ in range(3):
        graphs.reset_mock()
        with side_stream(library):
            overwrite(static["output"], full(SHAPE, np.nan, BF16, library))
            routed_moe(**static)
        assert_bit_equal(static["output"], expected, "side stream")
        assert graphs.call_count == 1
    replay = capture(library, lambda: routed_moe(**static))
    fresh = small_arguments(SHAPE[0], seed=5)
    overwrite_arguments(static, move_arguments(fresh, library))
    replay()
    assert_bit_equal(static["output"], eager(fresh, library), "replay")


def test_green_contexts_keep_their_multiprocessors(graphs: mock.Mock) -> None:
    """The graph belongs to the primary context, so there kernels are launched one by one."""
    import torch

    static = static_arguments("torch")
    expected = eager(small_arguments(SHAPE[0]), "torch")
    for _ in range(CALLS):
        routed_moe(**static)
    synchronize()
    with GreenPartitions(0) as partitions:
        for stream in partitions.streams:
            graphs.reset_mock()
            with torch.cuda.stream(torch.cuda.ExternalStream(stream_handle(stream))):
                plan = plan_routed_moe(**static)
                for run in (plan.run, lambda: routed_moe(**static)):
                    overwrite(static["output"], full(SHAPE, np.nan, BF16, "torch"))
                    run()
                    assert_bit_equal(static["output"], expected, "green context")
            assert graphs.call_count == 0
    routed_moe(**static)
    assert graphs.call_count == 1


def test_a_graph_is_made_while_another_stream_is_captured() -> None:
    """A capture forbids other threads and streams much of what making a graph takes."""
    import torch

    static = static_arguments("torch")
    expected = eager(small_arguments(SHAPE[0]), "torch")
    for _ in range(5):
        routed_moe(**static)
    counter, other = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    overwrite(static["output"], full(SHAPE, np.nan, BF16, "torch"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        with torch.cuda.stream(other):
            for _ in range(CALLS):
                routed_moe(**static)
        counter.add_(1)
    torch.cuda.synchronize()
    assert_bit_equal(static["output"], expected)
    graph.replay()
    assert counter.item() == 2


FULL, PROGRAMMATIC = (0, 0, 0), (1, 1, 0)  # port and kind of an edge, port of the successor


def edges_of(graph: Any) -> list[tuple[int, int, int]]:
    """Edges of a graph of fewer than 64."""
    from cuda.bindings import driver

    get = getattr(driver, "cuGraphGetEdges_v2", None) or driver.cuGraphGetEdges
    *_, edges, count = check(get(graph, 64), "reading the edges of a graph")
    return [(edge.from_port, edge.type, edge.to_port) for edge in edges[:count]]


@pytest.mark.parametrize("tokens", [5, 33, 1000])  # no permute, one block, a cluster
@pytest.mark.parametrize("enable_pdl", [None, False])
def test_kernels_of_a_graph_start_early_where_launches_do(
    enable_pdl: bool | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    found = []
    instantiate = driver.cuGraphInstantiate

    def look_first(graph: Any, flags: int) -> Any:
        found.append(edges_of(graph))
        return instantiate(graph, flags)

    monkeypatch.setattr(driver, "cuGraphInstantiate", look_first)
    call = small_arguments(tokens, seed=3)
    plan = plan_routed_moe(**move_arguments(call, "torch"), enable_pdl=enable_pdl)
    (edges,) = found
    early = enable_pdl is None and compute_capability(0) >= (9, 0)
    assert len(edges) >= 2
    assert set(edges) == {PROGRAMMATIC if early else FULL}
    expected = eager(call, "torch")
    for _ in range(CALLS):
        overwrite(plan.output, full(expected.shape, np.nan, BF16, "torch"))
        assert_bit_equal(plan.run(), expected)


@each_library
def test_another_thread_waits_for_the_device_while_graphs_are_made(
    library: str, graphs: mock.Mock
) -> None:
    calls = [small_arguments(SHAPE[0], seed=seed) for seed in range(3)]
    arguments = [move_arguments(call, library) for call in calls]
    expected = [eager(call, library) for call in calls]
    is_done = threading.Event()

    def wait_for_the_device() -> None:
        while not is_done.is_set():
            synchronize()

    def make_graphs() -> None:
        try:
            for step in range(300):
                plan = plan_routed_moe(**arguments[step % 3])
                for _ in range(2):
                    assert_bit_equal(plan.run(), expected[step % 3], f"graph {step}")
        finally:
            is_done.set()

    graphs.reset_mock()
    run_in_threads(make_graphs, wait_for_the_device)
    assert graphs.call_count == 600, "no graph was refused"


@each_library
def test_plans_dropped_while_they_run(library: str) -> None:
    calls = [small_arguments(SHAPE[0], seed=seed) for seed in range(4)]
    expected = [eager(call, library) for call in calls]
    for _ in range(10):
        outputs = [plan_routed_moe(**move_arguments(call, library)).run() for call in calls]
        for output, want in zip(host_copies(outputs), expected, strict=True):
            assert_bit_equal(output, want)
