"""Memory shared between ranks, with a runtime that only records what is asked of it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest

from cupy_moe.runtime import peer_memory
from cupy_moe.runtime.peer_memory import DeviceMemory, MemoryOffer, PeerMapping


class CudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Runtime:
    CUDARuntimeError = CudaError

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refused: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name in self.refused:
                raise CudaError(self.refused[name])
            return {"malloc": 0x1000, "ipcOpenMemHandle": 0x2000, "ipcGetMemHandle": b"h"}.get(name)

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(peer_memory, "_runtime", lambda: made)
    monkeypatch.setattr(peer_memory, "device_guard", lambda device: contextlib.nullcontext())
    return made


@pytest.fixture
def offer(runtime: Runtime) -> MemoryOffer:
    offer = DeviceMemory(0, 256).offer()
    runtime.calls.clear()
    return offer


def test_memory_is_freed_once(runtime: Runtime) -> None:
    memory = DeviceMemory(1, 256)
    memory.free()
    memory.free()
    assert runtime.calls == [("malloc", 256), ("free", 0x1000)]


def test_no_memory(runtime: Runtime) -> None:
    runtime.refused["malloc"] = 2
    with pytest.raises(RuntimeError, match="256 B of memory on cuda:1: status 2"):
        DeviceMemory(1, 256)


def test_a_thread_takes_the_address(runtime: Runtime, offer: MemoryOffer) -> None:
    mapping = PeerMapping(0, offer)
    mapping.close()
    assert mapping.address == offer.address
    assert runtime.calls == []


@pytest.mark.parametrize("enabled", [False, True])
def test_a_thread_on_another_gpu_gets_access(
    runtime: Runtime, offer: MemoryOffer, enabled: bool
) -> None:
    if enabled:
        runtime.refused["deviceEnablePeerAccess"] = 704
    assert PeerMapping(1, offer).address == offer.address
    assert runtime.calls == [("deviceEnablePeerAccess", 0)]


def test_gpus_without_peer_access(runtime: Runtime, offer: MemoryOffer) -> None:
    runtime.refused["deviceEnablePeerAccess"] = 217
    with pytest.raises(RuntimeError, match="mapping memory of the GPU"):
        PeerMapping(1, offer)


def test_another_process_opens_the_handle(runtime: Runtime, offer: MemoryOffer) -> None:
    mapping = PeerMapping(0, replace(offer, process="another"))
    assert mapping.address == 0x2000
    mapping.close()
    mapping.close()
    assert runtime.calls == [("ipcOpenMemHandle", b"h", 1), ("ipcCloseMemHandle", 0x2000)]


def test_memory_that_the_driver_cannot_share(runtime: Runtime) -> None:
    runtime.refused["ipcGetMemHandle"] = 801
    offer = DeviceMemory(0, 256).offer()
    assert PeerMapping(0, offer).address == offer.address
    with pytest.raises(RuntimeError, match="cannot share memory"):
        PeerMapping(0, replace(offer, process="another"))


def test_ranks_on_different_hosts(offer: MemoryOffer) -> None:
    with pytest.raises(RuntimeError, match="different hosts"):
        PeerMapping(0, replace(offer, host="another"))


def test_a_forked_process_is_another_one(offer: MemoryOffer) -> None:
    read, write = os.pipe()
    if not os.fork():
        os.write(write, peer_memory._process_token().encode())
        os._exit(0)
    assert os.read(read, 200).decode() != offer.process
    os.wait()
