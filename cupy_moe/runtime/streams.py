"""CUDA streams of any library, events, and green contexts that split a GPU's multiprocessors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from cupy_moe.runtime.array_ref import Library
from cupy_moe.runtime.closing import Closing
from cupy_moe.runtime.devices import DriverValue, check, device_guard, sm_count
from cupy_moe.runtime.requirements import import_core, import_cupy, import_driver

__all__ = [
    "Event",
    "GreenPartitions",
    "StreamInfo",
    "cupy_stream",
    "inspect_stream",
    "stream_handle",
]

Stream: TypeAlias = Any  # torch.cuda.Stream, cupy.cuda.Stream, cuda.core.Stream, ...


def stream_handle(stream: Stream, what: str = "stream") -> int:
    """Address of the ``cudaStream_t`` behind any library's stream object.

    Parameters
    ----------
    stream : int, torch.cuda.Stream, cupy.cuda.Stream or any object with ``__cuda_stream__``
        0 is the legacy default stream.
    what : str
        Names the argument in errors.

    Raises
    ------
    TypeError
        If it is none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
        return int(handle)
    for attribute in ("cuda_stream", "ptr"):  # torch; cupy
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(
        f"{what}: expected a CUDA stream (torch, CuPy, cuda.core, any with __cuda_stream__, or its "
        f"address), got {type(stream).__name__}"
    )


@dataclass(frozen=True, slots=True)
class _ForeignStream:
    """A stream that somebody else owns, as the CUDA stream protocol wants it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and address of the stream."""
        return 0, self.handle


@cache  # kept for good: some releases of CuPy destroy the wrapped stream with the wrapper
def cupy_stream(handle: int) -> Stream:
    """CuPy's view of another library's stream, to be entered with ``with``.

    Parameters
    ----------
    handle : int
        Address of the stream, which stays its owner's; see `stream_handle`.

    Returns
    -------
    cupy.cuda.Stream
    """
    cuda = import_cupy().cuda
    if handle == 0:
        return cuda.Stream.null
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_ForeignStream(handle))
    return cuda.ExternalStream(handle)  # CuPy 13


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """Where the work of a stream runs.

    Attributes
    ----------
    handle : int
        Address of the stream.
    device : int
        CUDA ordinal.
    context : int
        Address of its context; each green context has its own.
    is_green : bool
        Whether that is a green context.
    sm_count : int
        Multiprocessors its kernels may use.
    priority : int
        Lower is served first.
    """

    handle: int
    device: int
    context: int
    is_green: bool
    sm_count: int
    priority: int


def inspect_stream(handle: int) -> StreamInfo:
    """Query a stream's device, context and share of the GPU.

    Raises
    ------
    RuntimeError
        If the driver refuses the query, or cuda-bindings is older than 12.5 and cannot ask.
    """
    driver = import_driver()
    stream, what = driver.CUstream(handle), f"inspecting stream {handle:#x}"
    if not hasattr(driver, "cuStreamGetGreenCtx"):
        raise RuntimeError(f"{what}: needs cuda-bindings 12.5 or newer (cuStreamGetGreenCtx)")
    context = check(driver.cuStreamGetCtx(stream), what)
    green = check(driver.cuStreamGetGreenCtx(stream), what)
    device = _device_of(context)
    return StreamInfo(
        handle=handle,
        device=device,
        context=int(context),
        is_green=bool(int(green)),
        sm_count=_green_sm_count(green) if int(green) else sm_count(device),
        priority=int(check(driver.cuStreamGetPriority(stream), what)),
    )


def _device_of(context: DriverValue) -> int:
    driver, what = import_driver(), "querying the device of a context"
    check(driver.cuCtxPushCurrent(context), what)
    try:
        return int(check(driver.cuCtxGetDevice(), what))
    finally:
        check(driver.cuCtxPopCurrent(), what)


def _green_sm_count(green: DriverValue) -> int:
    driver = import_driver()
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource = check(driver.cuGreenCtxGetDevResource(green, kind), "querying a green context")
    return int(resource.sm.smCount)


class Event:
    """Reusable point of order between streams, without timing.

    Parameters
    ----------
    device : int
        CUDA ordinal of the streams that record it.

    Notes
    -----
    Recording and waiting are legal during a stream capture and become graph edges; creating an
    event is not needed then.
    """

    __slots__ = ("_handle", "_runtime")

    def __init__(self, device: int) -> None:
        self._handle = 0
        self._runtime = import_cupy().cuda.runtime
        with device_guard(device):
            self._handle = self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming)

    def record(self, stream: int) -> None:
        """Mark what is enqueued on the stream so far."""
        self._runtime.eventRecord(self._handle, stream)

    def block(self, stream: int) -> None:
        """Let later work of the stream wait for what the last `record` marked."""
        self._runtime.streamWaitEvent(stream, self._handle)

    def close(self) -> None:
        """Destroy the event; work that already waits for it is not affected."""
        if self._handle:
            handle, self._handle = self._handle, 0
            self._runtime.eventDestroy(handle)


class GreenPartitions(Closing):
    """Disjoint sets of a GPU's multiprocessors, with one stream on each.

    All sets come from one split: sets of separate splits would overlap. Keep the object alive
    while work of its streams, or a captured graph with such work, can run.

    Parameters
    ----------
    device : int
        CUDA ordinal.
    sm_counts : sequence of int, optional
        Multiprocessors of each set, multiples of the device's granularity (8 at compute
        capability 9.0 and newer, 2 before). Default: two equal halves, as large as they can be.
        The driver takes groups from whole clusters of multiprocessors, so a GPU of 132 may have
        fewer than 16 groups of 8. Where the groups do not suffice, the largest set gets all that
        the other sets leave: at least what was asked for, without the guarantee that its
        multiprocessors can be scheduled together as large thread block clusters.

    Attributes
    ----------
    device : int
    sm_counts : tuple of int
        What each set has; only the largest can have more than was asked for.
    streams : tuple of cuda.core.Stream
        Non-blocking streams. torch wraps them with ``torch.cuda.ExternalStream``, CuPy with
        ``cupy.cuda.Stream.from_external``.

    Raises
    ------
    ValueError
        If the counts cannot be had on this device.
    RuntimeError
        If the driver (older than CUDA 12.4) or an optional package cannot split a GPU.
    """

    def __init__(self, device: int, sm_counts: Sequence[int] | None = None) -> None:
        core = import_core()
        self.device = device
        with device_guard(device):
            handle = core.Device(device)
            handle.set_current()  # the context is current already; cuda.core asks to be told
            whole = handle.resources.sm
            step = max(whole.min_partition_size, whole.coscheduled_alignment)
            counts = _halves(whole.sm_count, step) if sm_counts is None else tuple(sm_counts)
            _check_counts(counts, whole.sm_count, step)
            self._contexts = [
                handle.create_context(core.ContextOptions(resources=group))
                for group in _split(core, whole, counts)
            ]
            self.streams = tuple(context.create_stream() for context in self._contexts)
        self.sm_counts = tuple(inspect_stream(stream_handle(s)).sm_count for s in self.streams)

    def close(self) -> None:
        """Destroy streams and contexts; wait for their work first."""
        with device_guard(self.device):
            for stream in self.streams:
                stream.sync()
                stream.close()
            for context in self._contexts:
                context.close()
        self.streams, self._contexts = (), []


def _halves(total: int, step: int) -> tuple[int, int]:
    half = total // 2 // step * step
    return half, half


def _check_counts(counts: tuple[int, ...], total: int, step: int) -> None:
    legal = all(count >= step and count % step == 0 for count in counts)
    if not counts or not legal or sum(counts) > total:
        raise ValueError(
            f"GreenPartitions: sm_counts must be multiples of {step} and at most {total} together, "
            f"got {counts}"
        )


def _split(core: Library, whole: Library, counts: tuple[int, ...]) -> list[list[Library]]:
    """Resources of each set, all from one split of the whole GPU."""
    sets, _ = _split_into_groups(core, whole, counts)
    if sets:
        return sets
    largest = counts.index(max(counts))
    others = counts[:largest] + counts[largest + 1 :]
    sets, rest = _split_into_groups(core, whole, others) if others else ([], whole)
    if rest is None or rest.sm_count < counts[largest]:
        raise ValueError(
            f"GreenPartitions: this GPU of {whole.sm_count} multiprocessors has not enough groups "
            f"of {math.gcd(*others or counts)} for sm_counts {counts}; choose counts with a larger "
            "common divisor or a smaller sum"
        )
    return [*sets[:largest], [rest], *sets[largest:]]


def _split_into_groups(
    core: Library, whole: Library, counts: tuple[int, ...]
) -> tuple[list[list[Library]], Library | None]:
    """Make sets of equal groups; with what is left, or ([], None) if there are too few groups.

    Drivers before CUDA 13.1 split into equal groups only. Unequal sets are then put together from
    groups of the greatest common divisor.
    """
    size = math.gcd(*counts)
    wanted = (size,) * (sum(counts) // size)
    try:
        groups, rest = whole.split(core.SMResourceOptions(count=wanted))
    except Exception as error:  # cuda.core raises a private type when the driver refuses
        if "INVALID_RESOURCE_CONFIGURATION" not in str(error):
            raise
        return [], None  # CUDA 13.1 and newer; older drivers make fewer groups instead
    if len(groups) < len(wanted):
        return [], None
    pieces = iter(groups)
    return [[next(pieces) for _ in range(count // size)] for count in counts], rest
