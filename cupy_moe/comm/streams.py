"""Order of calls on several streams: they share one workspace and must not overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from cupy_moe.runtime.devices import DriverValue, check, sm_count, stream_is_capturing
from cupy_moe.runtime.requirements import import_driver
from cupy_moe.runtime.streams import Event, inspect_stream

__all__ = ["StreamOrder", "multiprocessors_of"]


def multiprocessors_of(stream: int, device: int) -> int:
    """Multiprocessors that the kernels of a stream may use."""
    driver = import_driver()
    if not hasattr(driver, "cuStreamGetGreenCtx"):
        return sm_count(device)
    green = check(driver.cuStreamGetGreenCtx(driver.CUstream(stream)), "inspecting a stream")
    return inspect_stream(stream).sm_count if int(green) else sm_count(device)


class StreamOrder:
    """Lets every call wait for the one before, whatever their streams.

    What is captured into graphs is ordered within one capture only: the order of replays is the
    caller's.

    Parameters
    ----------
    operation : str
        Names the operation in errors.
    device : int
    """

    def __init__(self, operation: str, device: int) -> None:
        self._operation = operation
        self._done = Event(device)
        self._stream: int | None = None  # id of the last eager call's
        self._capture: tuple[int, int] = (0, 0)  # the last captured call's capture and stream

    def before(self, stream: int) -> int | None:
        """Call it before the launches of a call, once or more often.

        Returns
        -------
        int or None
            Id of the stream; None if it is captured, and `after` is not to be called.

        Raises
        ------
        RuntimeError
            An earlier call of the same capture is on another stream.
        """
        if stream_is_capturing(stream):
            self._before_captured(stream)
            return None
        identity = _identity_of(stream)
        if identity != self._stream:
            if self._stream is not None:
                self._done.block(stream)
            self._stream = identity
        return identity

    def _before_captured(self, stream: int) -> None:
        capture = _capture_of(stream)
        last, last_stream = self._capture
        if last == capture and last_stream != stream:
            raise RuntimeError(
                f"{self._operation}: calls of one CUDA graph must be on one stream, as they share "
                f"one workspace; got stream {stream:#x} after stream {last_stream:#x}. Capture "
                "them on the same stream."
            )
        self._capture = (capture, stream)

    def after(self, stream: int) -> None:
        """Call it after the launches of a call that is not captured."""
        self._done.record(stream)

    def close(self) -> None:
        """Destroy the event."""
        self._done.close()


def _identity_of(stream: int) -> int:
    """Id of a stream: a new one may have the address of one that was destroyed."""
    get_id, handle = _id_query(stream)
    status, identity = get_id(handle)
    if status:
        check((status,), "inspecting a stream")
    return int(identity)


@lru_cache(maxsize=256)
def _id_query(stream: int) -> tuple[Callable[[DriverValue], Any], DriverValue]:
    driver = import_driver()
    return driver.cuStreamGetId, driver.CUstream(stream)


def _capture_of(stream: int) -> int:
    """Id of the capture that a stream takes part in."""
    driver = import_driver()
    info = check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)), "inspecting a stream")
    _, capture, *_ = info
    return int(capture)
