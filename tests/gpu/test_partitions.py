"""Green contexts: disjoint multiprocessors, eager and in graph replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.runtime.devices import sm_count
from cupy_moe.runtime.streams import (
    Event,
    GreenPartitions,
    cupy_stream,
    inspect_stream,
    stream_handle,
)
from tests.gpu.probe_launch import launch_probe, probe_function

pytestmark = pytest.mark.gpu

BLOCKS_PER_SM = 16
SPIN_CYCLES = 2_000_000  # long enough for blocks to spread over every multiprocessor
EXACT_SPLITS = [(64, 64), (32, 96), (8, 112), (16, 16, 32)]
SPLITS = [*EXACT_SPLITS, (8, 120), (120, 8), (16, 80, 32)]


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def require_sms(counts: tuple[int, ...]) -> None:
    if sum(counts) > sm_count(0):
        pytest.skip(f"needs {sum(counts)} multiprocessors, the GPU has {sm_count(0)}")


def launch_on_all(ids: list[Any], handles: list[int]) -> None:
    for array, handle in zip(ids, handles, strict=True):
        launch_probe(
            probe_function(),
            sm_ids=array,
            spin_cycles=SPIN_CYCLES,
            num_blocks=array.size,
            stream=handle,
        )


def assert_disjoint(ids: list[Any], counts: tuple[int, ...]) -> None:
    used = [set(array.get().tolist()) for array in ids]
    assert [len(sms) for sms in used] == list(counts)
    assert len(set().union(*used)) == sum(counts)


@pytest.mark.parametrize("counts", SPLITS, ids=lambda c: "+".join(map(str, c)))
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_partitions_are_disjoint(counts: tuple[int, ...], in_graph: bool, cupy: Any) -> None:
    require_sms(counts)
    with GreenPartitions(0, counts) as partitions:
        granted = partitions.sm_counts
        assert_granted(granted, counts)
        handles = [stream_handle(stream) for stream in partitions.streams]
        ids = [cupy.full(BLOCKS_PER_SM * n, 0xFFFFFFFF, np.uint32) for n in granted]
        probe_function()
        cupy.cuda.Device().synchronize()
        if in_graph:
            replay_captured(cupy, ids, handles)
        else:
            launch_on_all(ids, handles)
        cupy.cuda.Device().synchronize()
        for stream in partitions.streams:
            stream.sync()
        assert_disjoint(ids, granted)


def assert_granted(granted: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Each set has what was asked for; where groups do not suffice, the largest takes the rest."""
    assert sum(granted) <= sm_count(0)
    largest = counts.index(max(counts))
    for index, (have, asked) in enumerate(zip(granted, counts, strict=True)):
        if index != largest or counts in EXACT_SPLITS:
            assert have == asked
        else:
            assert have == asked or sum(granted) == sm_count(0)
            assert have >= asked


def replay_captured(cupy: Any, ids: list[Any], handles: list[int]) -> None:
    """Fork from an ordinary stream to the partitions and join, captured from that stream."""
    caller = cupy.cuda.Stream(non_blocking=True)
    fork, joins = Event(0), [Event(0) for _ in handles]
    with caller:
        caller.begin_capture()
        fork.record(caller.ptr)
        for handle in handles:
            fork.block(handle)
        launch_on_all(ids, handles)
        for handle, join in zip(handles, joins, strict=True):
            join.record(handle)
            join.block(caller.ptr)
        graph = caller.end_capture()
    for _ in range(2):
        for array in ids:
            array.fill(0xFFFFFFFF)
        cupy.cuda.Device().synchronize()
        graph.launch(caller)
        caller.synchronize()


def test_two_halves_by_default(cupy: Any) -> None:
    with GreenPartitions(0) as partitions:
        first, second = partitions.sm_counts
        assert first == second
        assert first % 8 == 0 or sm_count(0) < 16
        assert 2 * first <= sm_count(0) < 2 * first + 16
        handles = [stream_handle(stream) for stream in partitions.streams]
        infos = [inspect_stream(handle) for handle in handles]
        assert all(info.is_green and info.device == 0 for info in infos)
        assert infos[0].context != infos[1].context
        assert [info.sm_count for info in infos] == [first, second]
        assert infos[0] == inspect_stream(handles[0])
    assert partitions.streams == ()
    plain = cupy.cuda.Stream(non_blocking=True)
    info = inspect_stream(plain.ptr)
    assert not info.is_green
    assert (info.handle, info.device, info.sm_count) == (plain.ptr, 0, sm_count(0))


def test_other_libraries_wrap_partition_streams(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    with GreenPartitions(0) as partitions:
        handle = stream_handle(partitions.streams[0])
        with cupy_stream(handle):
            assert (cupy.arange(10) * 2).sum() == 90
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            assert (torch.arange(10, device="cuda") * 2).sum().item() == 90


@pytest.mark.parametrize("counts", [(), (0, 64), (1, 64), (-8, 64), (11, 64), (8, 100_000)])
def test_impossible_splits_are_refused(counts: tuple[int, ...]) -> None:
    message = r"GreenPartitions: sm_counts must be multiples of \d+ and at most \d+ together"
    with pytest.raises(ValueError, match=message):
        GreenPartitions(0, counts)


def test_created_and_closed_many_times() -> None:
    for _ in range(50):
        GreenPartitions(0).close()
    with GreenPartitions(0) as partitions:
        assert all(inspect_stream(stream_handle(s)).is_green for s in partitions.streams)
