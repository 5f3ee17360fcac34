"""Partition resources: host streams, and CUDA streams of a simulated driver."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe import partitions
from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime.arrays import HOST
from cupy_moe.runtime.streams import StreamInfo


def stream(handle: int, context: int | None = None, **options: Any) -> SimpleNamespace:
    """CUDA stream of any library, on its own green context unless another one is given."""
    info = {"device": 0, "is_green": True, "sm_count": 64, "priority": 0} | options
    green = handle + 1000 if context is None else context
    return SimpleNamespace(
        __cuda_stream__=lambda: (0, handle),
        info=StreamInfo(handle=handle, context=green, **info),
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Knows the streams that were passed to ``add``; logs what happens to events."""
    infos: dict[int, StreamInfo] = {}
    log: list[tuple[Any, ...]] = []

    class Event:
        count = 0

        def __init__(self, device: int) -> None:
            self.name = f"event{Event.count} of cuda:{device}"
            Event.count += 1

        def record(self, handle: int) -> None:
            log.append(("record", self.name, handle))

        def block(self, handle: int) -> None:
            log.append(("wait", self.name, handle))

    def add(*streams: SimpleNamespace) -> tuple[SimpleNamespace, ...]:
        infos.update({s.info.handle: s.info for s in streams})
        return streams

    monkeypatch.setattr(partitions, "inspect_stream", infos.__getitem__)
    monkeypatch.setattr(partitions, "Event", Event)
    return SimpleNamespace(add=add, log=log, event=Event)


# --- host memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [[None, None], ("a", "b"), [object(), object()]], ids=str)
def test_host_streams_are_kept_and_ignored(streams: Any) -> None:
    resources = MoePartitionResources(streams)
    assert type(resources.streams) is tuple
    assert resources.streams == tuple(streams)
    assert (resources.device, resources.topology) == (HOST, ())
    resources.fork()
    resources.join()


def test_identity() -> None:
    first, second = (MoePartitionResources((None, None)) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_other_than_two_streams(count: int) -> None:
    with pytest.raises(ValueError, match=f"streams must be exactly two, .* got {count}"):
        MoePartitionResources([None] * count)


def test_launches_of_two_threads_do_not_mix() -> None:
    resources = MoePartitionResources((None, None))
    entered = threading.Event()

    def launch() -> None:
        with resources.launch_guard():
            entered.set()

    thread = threading.Thread(target=launch)
    with resources.launch_guard():
        thread.start()
        assert not entered.wait(0.05)
    thread.join()
    assert entered.is_set()


# --- CUDA -----------------------------------------------------------------------------------------


def test_events_exist_before_the_first_fork(driver: SimpleNamespace) -> None:
    MoePartitionResources(driver.add(stream(1), stream(2)))
    assert driver.event.count == 3
    assert driver.log == []


def test_fork_and_join_of_a_caller(driver: SimpleNamespace) -> None:
    first, second, caller = driver.add(stream(1), stream(2), stream(3, is_green=False))
    resources = MoePartitionResources((first, second))
    assert resources.device == 0
    resources.fork(caller)
    (_, forked, _), *waits = driver.log
    assert driver.log[0] == ("record", forked, 3)
    assert waits == [("wait", forked, 1), ("wait", forked, 2)]
    driver.log.clear()
    resources.join(caller)
    (_, done0, _), _, (_, done1, _), _ = driver.log
    assert len({forked, done0, done1}) == 3
    assert driver.log == [
        ("record", done0, 1),
        ("wait", done0, 3),
        ("record", done1, 2),
        ("wait", done1, 3),
    ]
    assert driver.event.count == 3


@pytest.mark.parametrize("method", ["fork", "join"])
def test_caller_on_another_device(driver: SimpleNamespace, method: str) -> None:
    first, second, caller = driver.add(stream(1), stream(2), stream(3, device=1))
    resources = MoePartitionResources((first, second))
    pattern = "caller must be a stream on cuda:0, .* got one on cuda:1"
    with pytest.raises(ValueError, match=pattern):
        getattr(resources, method)(caller)
    assert driver.log == []


@pytest.mark.parametrize("index", [0, 1])
def test_stream_on_no_green_context(driver: SimpleNamespace, index: int) -> None:
    streams = driver.add(*(stream(i + 1, is_green=i != index) for i in (0, 1)))
    with pytest.raises(ValueError, match=rf"streams\[{index}\] must belong to a green context"):
        MoePartitionResources(streams)


def test_streams_of_two_devices(driver: SimpleNamespace) -> None:
    streams = driver.add(stream(1), stream(2, device=1))
    with pytest.raises(ValueError, match="streams must be on one device, got cuda:0 and cuda:1"):
        MoePartitionResources(streams)


def test_cuda_stream_beside_a_host_stream(driver: SimpleNamespace) -> None:
    (first,) = driver.add(stream(1))
    with pytest.raises(ValueError, match=r"two CUDA streams or none, got NoneType as streams\[1\]"):
        MoePartitionResources((first, None))


def test_bindings_that_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def inspect(handle: int) -> StreamInfo:
        raise RuntimeError("needs newer bindings")

    monkeypatch.setattr(partitions, "inspect_stream", inspect)
    with pytest.raises(RuntimeError, match="newer bindings"):
        MoePartitionResources((stream(1), stream(2)))


def test_topology(driver: SimpleNamespace) -> None:
    first, second = driver.add(stream(1), stream(2, sm_count=56, priority=-1))
    assert MoePartitionResources((first, second)).topology == (
        ("green", 64, 0, 0, 0),
        ("green", 56, 1, 1, -1),
    )
    (sibling,) = driver.add(stream(3, context=1001))
    shared = MoePartitionResources((first, sibling)).topology
    assert shared == (("green", 64, 0, 0, 0), ("green", 64, 0, 1, 0))
    twice = MoePartitionResources((first, first)).topology
    assert twice == (("green", 64, 0, 0, 0), ("green", 64, 0, 0, 0))


def test_exchange(driver: SimpleNamespace) -> None:
    """Both records come first: a wait for the other's would order the streams one-sidedly."""
    resources = MoePartitionResources(driver.add(stream(1), stream(2)))
    resources.exchange()
    (_, done0, _), (_, done1, _), *_ = driver.log
    assert driver.log == [
        ("record", done0, 1),
        ("record", done1, 2),
        ("wait", done1, 1),
        ("wait", done0, 2),
    ]
    assert driver.event.count == 3
