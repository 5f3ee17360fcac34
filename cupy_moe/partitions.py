"""The two streams that the partitions of a layer run on, and their order against a caller's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, TypeAlias

from cupy_moe.runtime.arrays import HOST, CupyFramework
from cupy_moe.runtime.streams import Event, StreamInfo, inspect_stream, stream_handle

__all__ = ["MoePartitionResources"]

Topology: TypeAlias = tuple[tuple[str, int, int, int, int], ...]

_NAME = "MoePartitionResources"


class MoePartitionResources:
    """Two streams for the partitions of FP4 layers, and the events that order them.

    Compared by identity. Weights and the partition strategy are no part of it.

    Parameters
    ----------
    streams : sequence of two
        For arrays in host memory: anything that is no CUDA stream, for example ``(None, None)``.
        Nothing is checked, no event exists, `fork` and `join` do nothing and the partitions are
        computed one after the other.

        For CUDA: streams of torch, CuPy or cuda.core, or their addresses, on green contexts of one
        device (`cupy_moe.runtime.streams.GreenPartitions`). The two may share a context, or be the
        same stream.

    Attributes
    ----------
    streams : tuple of two
        As they were given.
    device : int
        CUDA ordinal, or -1 for host memory.
    handles : tuple of int
        Handles of the CUDA streams; empty for host memory.
    topology : tuple
        One entry per CUDA stream: ("green", number of multiprocessors, context class, stream class,
        priority). Equal contexts and equal streams share a class, counted from 0 in order of
        appearance. Empty for host memory.

    Raises
    ------
    ValueError
        Not two streams; a CUDA stream beside something else; a CUDA stream that does not belong to
        a green context; streams of two devices.
    RuntimeError
        The driver bindings cannot say whether a context is green.

    Notes
    -----
    Make it before a CUDA graph is captured and keep it while any launch or graph that uses it can
    run: its events are created here, so that none is created during a capture. The
    `GreenPartitions` that its streams come from must live as long.
    """

    def __init__(self, streams: Sequence[Any]) -> None:
        self.streams: tuple[Any, ...] = tuple(streams)
        if len(self.streams) != 2:
            raise ValueError(
                f"{_NAME}: streams must be exactly two, one per partition, got "
                f"{len(self.streams)}. Pass (None, None) for arrays in host memory."
            )
        handles = tuple(map(_cuda_handle, self.streams))
        self._mutex = RLock()
        self.handles: tuple[int, ...] = tuple(h for h in handles if h is not None)
        self.device = HOST
        self.topology: Topology = ()
        if not self.handles:
            return
        if len(self.handles) == 1:
            other = handles.index(None)
            raise ValueError(
                f"{_NAME}: streams must be two CUDA streams or none, got "
                f"{type(self.streams[other]).__name__} as streams[{other}]."
            )
        infos = [inspect_stream(handle) for handle in self.handles]
        _check_green(infos)
        self.device, self.topology = infos[0].device, _topology(infos)
        self._forked = Event(self.device)
        self._done = Event(self.device), Event(self.device)

    @property
    def sm_counts(self) -> tuple[int, ...]:
        """Multiprocessors of each CUDA stream's context; empty for host memory."""
        return tuple(count for _, count, *_ in self.topology)

    def fork(self, caller: Any = None) -> None:
        """Let both streams wait for what the caller's stream has been given so far.

        Parameters
        ----------
        caller : stream, optional
            Default: CuPy's current stream on the device.

        Raises
        ------
        ValueError
            The stream is on another device.
        """
        if self.device != HOST:
            self.fork_from(self._caller_handle(caller))

    def join(self, caller: Any = None) -> None:
        """Let the caller's stream wait for what both streams have been given so far.

        Parameters and errors are those of `fork`.
        """
        if self.device != HOST:
            self.join_into(self._caller_handle(caller))

    def fork_from(self, stream: int) -> None:
        """Fork from the handle of a stream on the device."""
        self._forked.record(stream)
        for handle in self.handles:
            self._forked.block(handle)

    def exchange(self) -> None:
        """Let each stream wait for what the other has been given so far."""
        for handle, done in zip(self.handles, self._done, strict=True):
            done.record(handle)
        for handle, done in zip(self.handles, reversed(self._done), strict=True):
            done.block(handle)

    def join_into(self, stream: int) -> None:
        """Join into the handle of a stream on the device."""
        for handle, done in zip(self.handles, self._done, strict=True):
            done.record(handle)
            done.block(stream)

    def launch_guard(self) -> AbstractContextManager[Any]:
        """Host mutex for everything from before a fork to after the last enqueued launch.

        It keeps two host threads from mixing their records of the shared events. It orders only
        what is enqueued: graphs that replay at the same time need resources of their own. Layers
        take it themselves; a thread that holds it may run them.
        """
        return self._mutex

    def _caller_handle(self, caller: Any) -> int:
        if caller is None:
            return CupyFramework().current_stream(self.device)
        handle = stream_handle(caller, f"{_NAME}: caller")
        device = inspect_stream(handle).device
        if device != self.device:
            raise ValueError(
                f"{_NAME}: caller must be a stream on cuda:{self.device}, the device of streams, "
                f"got one on cuda:{device}."
            )
        return handle


def _cuda_handle(stream: Any) -> int | None:
    try:
        return stream_handle(stream)
    except TypeError:
        return None


def _check_green(infos: list[StreamInfo]) -> None:
    for index, info in enumerate(infos):
        if not info.is_green:
            raise ValueError(
                f"{_NAME}: streams[{index}] must belong to a green context, got a stream that may "
                f"use all of cuda:{info.device}. Split the device with "
                "cupy_moe.runtime.streams.GreenPartitions."
            )
    first, second = (info.device for info in infos)
    if first != second:
        raise ValueError(
            f"{_NAME}: streams must be on one device, got cuda:{first} and cuda:{second}."
        )


def _topology(infos: list[StreamInfo]) -> Topology:
    contexts = list(dict.fromkeys(info.context for info in infos))
    handles = list(dict.fromkeys(info.handle for info in infos))
    return tuple(
        (
            "green",
            info.sm_count,
            contexts.index(info.context),
            handles.index(info.handle),
            info.priority,
        )
        for info in infos
    )
