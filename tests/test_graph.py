"""Graphs of launches, with a driver that writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe.runtime import devices, graph
from cupy_moe.runtime.graph import LaunchGraph, RepeatedLaunches


class Driver:
    """Answers every call with success, except for the names in ``failing``."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: set[str] = set()
        self.mode = 0
        self.captured: set[int] = set()
        self.version = 13000

    def __getattr__(self, name: str) -> Any:
        values = {
            "cuStreamCreate": 99,
            "cuStreamEndCapture": "graph",
            "cuGraphInstantiate": "executable",
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            assert (self.mode == 2) is (name != "cuGraphLaunch"), "relaxed but for launches"
            status = 999 if name in self.failing else 0
            return (status, values[name]) if name in values else (status,)

        return call

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:  # noqa: N802
        before, self.mode = self.mode, mode
        return 0, before

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.version

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(graph, "import_driver", lambda: driver)
    monkeypatch.setattr(graph, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(graph, "context_is_current", lambda device: True)
    monkeypatch.setattr(graph, "stream_is_primary", lambda stream, device: True)
    monkeypatch.setattr(graph, "stream_is_capturing", lambda stream: stream in driver.captured)
    monkeypatch.setattr(graph, "enqueue", driver.calls.extend)
    monkeypatch.setattr(devices, "describe_error", lambda status: f"error {status}")
    caches = (
        graph._capture_stream,
        graph._driver_launch,
        graph._driver_has_dependent_graphs,
    )
    for cached in caches:
        cached.cache_clear()
    yield driver
    for cached in caches:
        cached.cache_clear()


def bind(stream: int) -> list[Any]:
    return [(name, stream) for name in ("first", "second")]


def test_launches_are_captured_once_and_enqueued_at_once(driver: Driver) -> None:
    made = LaunchGraph(0, bind)
    assert driver.calls == [
        ("cuStreamCreate", 1),
        ("cuStreamBeginCapture", 99, 2),
        *bind(99),
        ("cuStreamEndCapture", 99),
        ("cuGraphInstantiate", "graph", 0),
        ("cuGraphDestroy", "graph"),
    ]
    driver.calls.clear()
    for stream in (7, 8):
        made.enqueue(stream)
    assert driver.calls == [("cuGraphLaunch", "executable", stream) for stream in (7, 8)]
    driver.calls.clear()
    LaunchGraph(0, bind)
    assert driver.mode == 0
    assert "cuStreamCreate" not in driver.names, "one stream for all graphs of a device"


def test_a_dropped_graph_is_destroyed(driver: Driver) -> None:
    made = LaunchGraph(0, bind)
    driver.calls.clear()
    del made
    assert driver.calls == [("cuGraphExecDestroy", "executable")]


def test_a_refused_launch_ends_the_capture(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(launches: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(graph, "enqueue", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        LaunchGraph(0, bind)
    assert driver.names == ["cuStreamCreate", "cuStreamBeginCapture", "cuStreamEndCapture"]
    assert not graph._capture_lock.locked()
    assert driver.mode == 0


@pytest.mark.parametrize(
    ("failing", "last"),
    [
        ("cuStreamBeginCapture", "cuStreamBeginCapture"),
        ("cuStreamEndCapture", "cuStreamEndCapture"),
        ("cuGraphInstantiate", "cuGraphDestroy"),
    ],
)
def test_what_the_driver_refuses_is_said(driver: Driver, failing: str, last: str) -> None:
    driver.failing.add(failing)
    with pytest.raises(RuntimeError, match="making a graph on cuda:0: error 999"):
        LaunchGraph(0, bind)
    assert driver.names[-1] == last


def test_a_refused_graph_is_said(driver: Driver) -> None:
    made = LaunchGraph(0, bind)
    driver.failing.add("cuGraphLaunch")
    with pytest.raises(RuntimeError, match="launching a graph: error 999"):
        made.enqueue(7)


GRAPH_LAUNCH = ("cuGraphLaunch", "executable")


def test_launches_that_come_back_become_a_graph(driver: Driver) -> None:
    launches = RepeatedLaunches(0, bind)
    for run in range(graph._RUNS_BEFORE_GRAPH):
        launches.enqueue(7)
        assert driver.calls == (run + 1) * bind(7)
    driver.calls.clear()
    launches.enqueue(7)
    assert driver.names[-2:] == ["cuGraphDestroy", "cuGraphLaunch"]
    driver.calls.clear()
    for stream in (7, 8):
        launches.enqueue(stream)
    assert driver.calls == [(*GRAPH_LAUNCH, 7), (*GRAPH_LAUNCH, 8)]
    driver.calls.clear()
    driver.captured.add(8)
    launches.enqueue(8)
    assert driver.calls == bind(8)


@pytest.mark.parametrize("captured", [False, True])
def test_prepared_launches_are_a_graph_at_once(driver: Driver, captured: bool) -> None:
    driver.captured = {7} if captured else set()
    launches = RepeatedLaunches(0, bind)
    launches.prepare(7)
    assert ("cuGraphInstantiate" in driver.names) is not captured
    assert "cuGraphLaunch" not in driver.names
    driver.calls.clear()
    launches.enqueue(7)
    assert driver.calls == (bind(7) if captured else [(*GRAPH_LAUNCH, 7)])
    driver.captured.clear()
    launches.enqueue(7)
    assert driver.calls[-1] == (*GRAPH_LAUNCH, 7)


@pytest.mark.parametrize("prepared", [False, True])
def test_old_drivers_launch_kernels(driver: Driver, prepared: bool) -> None:
    """Their graphs would refuse programmatic dependent launches."""
    driver.version = 12020
    launches = RepeatedLaunches(0, bind)
    if prepared:
        launches.prepare(7)
    for _ in range(20):
        launches.enqueue(7)
    assert driver.calls == 20 * bind(7)
