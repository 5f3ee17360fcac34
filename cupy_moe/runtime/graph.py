"""Kernels that are launched together many times, as one executable CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from threading import Lock

from cupy_moe.runtime.devices import DriverValue, check, device_guard
from cupy_moe.runtime.launch import BoundLaunch, enqueue
from cupy_moe.runtime.requirements import import_driver

__all__ = ["LaunchGraph", "capture_stream"]

_capture_lock = Lock()


@cache
def capture_stream(device: int) -> int:
    """Stream that launches are bound to for a `LaunchGraph`; nothing ever runs on it."""
    driver = import_driver()
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    with device_guard(device):
        return int(check(driver.cuStreamCreate(flag), f"making a stream on cuda:{device}"))


class LaunchGraph:
    """Kernels in order that one call of the driver enqueues.

    Parameters
    ----------
    device : int
        CUDA ordinal.
    launches : iterable of BoundLaunch
        Bound to `capture_stream`. Programmatic dependent launches stay such between them.

    Notes
    -----
    The kernels run in the device's primary context, whatever the context of the stream. Nothing may
    be captured by the calling thread while the graph is made. It may be dropped while it runs.
    """

    __slots__ = ("__weakref__", "_executable")

    def __init__(self, device: int, launches: Iterable[BoundLaunch]) -> None:
        driver, what = import_driver(), f"making a graph on cuda:{device}"
        with device_guard(device):
            graph = _capture(driver.CUstream(capture_stream(device)), launches, what)
            try:
                self._executable = check(driver.cuGraphInstantiate(graph, 0), what)
            finally:
                driver.cuGraphDestroy(graph)
        # The driver waits for a running graph by itself; at exit it may be gone already.
        weakref.finalize(self, driver.cuGraphExecDestroy, self._executable).atexit = False

    def enqueue(self, stream: int) -> None:
        """Enqueue the kernels on a stream that is not captured; one thread at a time.

        Raises
        ------
        RuntimeError
            If the driver refuses the graph.
        """
        check(_driver_launch()(self._executable, stream), "launching a graph")


def _capture(stream: DriverValue, launches: Iterable[BoundLaunch], what: str) -> DriverValue:
    driver = import_driver()
    # Other threads may go on with whatever a capture of another kind would forbid.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with _capture_lock:
        check(driver.cuStreamBeginCapture(stream, mode), what)
        try:
            enqueue(launches)
        finally:
            ended = driver.cuStreamEndCapture(stream)
    return check(ended, what)


@cache
def _driver_launch() -> DriverValue:
    return import_driver().cuGraphLaunch
