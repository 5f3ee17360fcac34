"""Device memory that other ranks write into, and host memory that the device writes into."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import uuid4

import numpy as np

from cupy_moe.runtime.array_ref import HostArray, Library
from cupy_moe.runtime.devices import check, device_guard
from cupy_moe.runtime.requirements import import_cupy, import_driver

__all__ = ["DeviceMemory", "HostPage", "MemoryOffer", "PeerMapping"]

_PEER_ACCESS_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
_LAZY_ENABLE_PEER_ACCESS = 1


@cache
def _token() -> str:
    return uuid4().hex  # from the operating system's generator, whatever the random seeds


def _process_token() -> str:
    """Differs between all processes of all hosts, forked ones included."""
    return f"{os.getpid()}-{_token()}"


@cache
def _host_token() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """What a rank tells the others about its memory.

    Attributes
    ----------
    host, process : str
        Equal for ranks on one host, in one process.
    device : int
        CUDA ordinal in that process.
    bus_id : str
        Of the device on the host.
    address : int
    handle : bytes
        For other processes; empty if the driver cannot share the memory.
    """

    host: str
    process: str
    device: int
    bus_id: str
    address: int
    handle: bytes


class DeviceMemory:
    """A ``cudaMalloc`` allocation of its own: what a pool hands out has no handle of its own.

    Parameters
    ----------
    device : int
        CUDA ordinal.
    num_bytes : int

    Raises
    ------
    RuntimeError
        There is not enough memory.
    """

    def __init__(self, device: int, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self._runtime = _runtime()
        with device_guard(device):
            try:
                self.address = int(self._runtime.malloc(num_bytes))
            except self._runtime.CUDARuntimeError as error:
                raise RuntimeError(f"{num_bytes} B of memory on cuda:{device}: {error}") from error

    def fill(self, fills: Iterable[tuple[int, int, int]]) -> None:
        """Set words: (offset in bytes, number of words, word). Returns when it is done.

        Waits for nothing else: another thread may be capturing a stream of the device.
        """
        driver = import_driver()
        with device_guard(self.device):
            stream = import_cupy().cuda.Stream(non_blocking=True)
            for offset, count, word in fills:
                done = driver.cuMemsetD32Async(self.address + offset, word, count, stream.ptr)
                check(done, "filling a workspace")
            stream.synchronize()

    def offer(self) -> MemoryOffer:
        """Describe the memory to other ranks."""
        with device_guard(self.device):
            try:
                handle = bytes(self._runtime.ipcGetMemHandle(self.address))
            except self._runtime.CUDARuntimeError:  # not on every system; threads need none
                handle = b""
            bus_id = str(self._runtime.deviceGetPCIBusId(self.device))
        return MemoryOffer(
            _host_token(), _process_token(), self.device, bus_id, self.address, handle
        )

    def free(self) -> None:
        """Give the memory back; nobody may use it any more."""
        if self.address:
            address, self.address = self.address, 0
            with device_guard(self.device):
                self._runtime.free(address)


class PeerMapping:
    """Another rank's memory, addressable from a device of this process.

    Parameters
    ----------
    device : int
        CUDA ordinal that will access it.
    offer : MemoryOffer
        From the other rank.

    Attributes
    ----------
    address : int

    Raises
    ------
    RuntimeError
        The devices cannot map each other's memory, or are on different hosts.
    """

    def __init__(self, device: int, offer: MemoryOffer) -> None:
        self._device, self._runtime, self._is_opened = device, _runtime(), False
        if offer.host != _host_token():
            raise RuntimeError("the ranks are on different hosts")
        try:
            with device_guard(device):
                self.address = self._map(offer)
        except self._runtime.CUDARuntimeError as error:
            raise RuntimeError(
                f"mapping memory of the GPU at {offer.bus_id} on cuda:{device}: {error}"
            ) from error

    def _map(self, offer: MemoryOffer) -> int:
        if offer.process != _process_token():
            if not offer.handle:
                raise RuntimeError(f"the driver cannot share memory of the GPU at {offer.bus_id}")
            address = int(self._runtime.ipcOpenMemHandle(offer.handle, _LAZY_ENABLE_PEER_ACCESS))
            self._is_opened = True
            return address
        if offer.device != self._device:
            self._enable_access(offer.device)
        return offer.address

    def _enable_access(self, peer: int) -> None:
        try:
            self._runtime.deviceEnablePeerAccess(peer)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                raise

    def close(self) -> None:
        """Unmap; nothing that uses it may be running."""
        if self._is_opened:
            self._is_opened = False
            with device_guard(self._device):
                self._runtime.ipcCloseMemHandle(self.address)


class HostPage:
    """Host memory that kernels of any device write into while they run.

    Parameters
    ----------
    num_words : int
        int32, zeros at first.

    Attributes
    ----------
    words : numpy.ndarray, shape (num_words,), dtype int32
        The memory itself.
    address : int
        On host and devices.
    """

    def __init__(self, device: int, num_words: int) -> None:
        self._device, self._runtime = device, _runtime()
        flags = self._runtime.hostAllocMapped | self._runtime.hostAllocPortable
        with device_guard(device):
            self.address = int(self._runtime.hostAlloc(4 * num_words, flags))
        memory = (ctypes.c_int32 * num_words).from_address(self.address)
        self.words: HostArray = np.ctypeslib.as_array(memory)
        self.words[:] = 0

    def free(self) -> None:
        """Give the memory back; `words` becomes zeros of its own."""
        if self.address:
            address, self.address = self.address, 0
            self.words = np.zeros_like(self.words)
            with device_guard(self._device):
                self._runtime.freeHost(address)


def _runtime() -> Library:
    return import_cupy().cuda.runtime
