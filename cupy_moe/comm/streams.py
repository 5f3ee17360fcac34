"""Order of calls on several streams: they share one workspace and must not overlap."""

from __future__ import annotations

from cupy_moe.runtime.devices import check, sm_count, stream_is_capturing
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

    def before(self, stream: int) -> bool:
        """Call it before the launches of a call; tells whether they are captured.

        Raises
        ------
        RuntimeError
            An earlier call of the same capture is on another stream.
        """
        capture = _capture_of(stream)
        if capture is None:
            identity = _identity_of(stream)
            if self._stream is not None and self._stream != identity:
                self._done.block(stream)
            self._stream = identity
            return False
        last, last_stream = self._capture
        if last == capture and last_stream != stream:
            raise RuntimeError(
                f"{self._operation}: calls of one CUDA graph must be on one stream, as they share "
                f"one workspace; got stream {stream:#x} after stream {last_stream:#x}. Capture "
                "them on the same stream."
            )
        self._capture = (capture, stream)
        return True

    def after(self, stream: int) -> None:
        """Call it after the launches of a call that is not captured."""
        self._done.record(stream)

    def close(self) -> None:
        """Destroy the event."""
        self._done.close()


def _identity_of(stream: int) -> int:
    """Id of a stream: a new one may have the address of one that was destroyed."""
    driver = import_driver()
    return int(check(driver.cuStreamGetId(driver.CUstream(stream)), "inspecting a stream"))


def _capture_of(stream: int) -> int | None:
    """Id of the capture that a stream takes part in."""
    if not stream_is_capturing(stream):  # the cheaper question
        return None
    driver = import_driver()
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    info = check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)), "inspecting a stream")
    status, capture, *_ = info
    return int(capture) if status == active else None
