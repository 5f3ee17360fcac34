"""Kernels that are launched together many times, as an executable CUDA graph once it pays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TypeAlias

from cupy_moe.runtime.devices import (
    DriverValue,
    check,
    context_is_current,
    device_guard,
    stream_is_capturing,
    stream_is_primary,
)
from cupy_moe.runtime.launch import BoundLaunch, enqueue
from cupy_moe.runtime.requirements import import_driver

__all__ = ["LaunchGraph", "RepeatedLaunches"]

Bind: TypeAlias = Callable[[int], Sequence[BoundLaunch]]

_RUNS_BEFORE_GRAPH = 8  # a graph takes about as long to make as it saves in so many runs

_FIRST_DEPENDENT_GRAPHS = 12030  # driver whose captures keep programmatic dependent launches

_capture_lock = Lock()


@cache
def _driver_has_dependent_graphs() -> bool:
    version = check(import_driver().cuDriverGetVersion(), "asking for the driver's CUDA version")
    return int(version) >= _FIRST_DEPENDENT_GRAPHS


@cache
def _capture_stream(device: int) -> int:
    """Stream of the current context that graphs are captured on; nothing ever runs on it."""
    driver = import_driver()
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return int(check(driver.cuStreamCreate(flag), f"making a stream on cuda:{device}"))


@contextmanager
def _despite_captures() -> Iterator[None]:
    """Allow this thread what a capture on another stream of whatever thread may forbid."""
    driver, what = import_driver(), "changing the capture mode of a thread"
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), what)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before), what)


class LaunchGraph:
    """Kernels in order that one call of the driver enqueues.

    Parameters
    ----------
    device : int
        CUDA ordinal; its primary context must be current.
    bind : callable
        Binds the launches to a stream. Programmatic dependent launches stay such between them.

    Notes
    -----
    The kernels run in the primary context, whatever the context of the stream. The graph may be
    dropped while it runs.
    """

    __slots__ = ("__weakref__", "_executable")

    def __init__(self, device: int, bind: Bind) -> None:
        driver, what = import_driver(), f"making a graph on cuda:{device}"
        with _despite_captures():
            stream = _capture_stream(device)
            graph = _capture(stream, bind(stream), what)
            try:
                self._executable = check(driver.cuGraphInstantiate(graph, 0), what)
            finally:
                driver.cuGraphDestroy(graph)
        # At exit the driver may be gone already.
        weakref.finalize(self, _destroy, self._executable).atexit = False

    def enqueue(self, stream: int) -> None:
        """Enqueue the kernels on a stream that is not captured; one thread at a time.

        Raises
        ------
        RuntimeError
            If the driver refuses the graph.
        """
        check(_driver_launch()(self._executable, stream), "launching a graph")


def _capture(stream: int, launches: Sequence[BoundLaunch], what: str) -> DriverValue:
    driver = import_driver()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with _capture_lock:
        check(driver.cuStreamBeginCapture(stream, mode), what)
        try:
            enqueue(launches)
        finally:
            ended = driver.cuStreamEndCapture(stream)
    return check(ended, what)


def _destroy(executable: DriverValue) -> None:
    """Destroy a graph; one that runs ends first, which the driver does not wait for."""
    with _despite_captures():
        import_driver().cuGraphExecDestroy(executable)


class RepeatedLaunches:
    """Kernels on fixed addresses that come back: launched one by one at first, then as a graph.

    Threads may share it: the kernels of two runs never mix.

    Parameters
    ----------
    device : int
        CUDA ordinal.
    bind : callable
        Binds the launches to a stream. They hold addresses: whoever enqueues keeps the arrays.
    """

    __slots__ = ("_bind", "_bound", "_device", "_graph", "_lock", "_runs")

    def __init__(self, device: int, bind: Bind) -> None:
        self._device, self._bind = device, bind
        self._lock = Lock()
        self._runs = 0
        self._graph: LaunchGraph | None = None
        self._bound: tuple[int, Sequence[BoundLaunch]] = (-1, ())

    def prepare(self, stream: int) -> None:
        """Expect many runs: bind to a stream, and make the graph unless the stream is captured.

        Raises
        ------
        Exception
            What ``bind`` raises.
        """
        with self._lock, device_guard(self._device):
            self._launches(stream)
            self._runs = _RUNS_BEFORE_GRAPH
            if _driver_has_dependent_graphs() and not stream_is_capturing(stream):
                self._graph = LaunchGraph(self._device, self._bind)

    def enqueue(self, stream: int) -> None:
        """Enqueue the kernels on a stream.

        Raises
        ------
        RuntimeError
            If the driver refuses a launch.
        Exception
            What ``bind`` raises.
        """
        with self._lock:
            if context_is_current(self._device):  # the usual case, without the cost of a guard
                self._enqueue(stream)
                return
            with device_guard(self._device):
                self._enqueue(stream)

    def _enqueue(self, stream: int) -> None:
        if self._runs < _RUNS_BEFORE_GRAPH:
            self._runs += 1
        elif self._graph_fits(stream):
            if self._graph is None:
                self._graph = LaunchGraph(self._device, self._bind)
            self._graph.enqueue(stream)
            return
        enqueue(self._launches(stream))

    def _graph_fits(self, stream: int) -> bool:
        """Whether a graph does what launches on the stream do.

        It would leave the multiprocessors of a green context, and be a graph inside of a graph
        during a capture.
        """
        return (
            _driver_has_dependent_graphs()
            and stream_is_primary(stream, self._device)
            and not stream_is_capturing(stream)
        )

    def _launches(self, stream: int) -> Sequence[BoundLaunch]:
        bound_stream, launches = self._bound
        if stream != bound_stream:
            launches = self._bind(stream)
            self._bound = (stream, launches)
        return launches


@cache
def _driver_launch() -> DriverValue:
    return import_driver().cuGraphLaunch
