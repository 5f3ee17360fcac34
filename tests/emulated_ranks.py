"""Ranks of the tensor-parallel finalize in this process, with kernels that a C++ compiler built.

The translation unit of each specialization is compiled for the host, with ``tests/emulator`` in
place of the PTX headers; workspace, layout, launches and transports are the package's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_moe.comm import launches, residents, transport, workspace
from cupy_moe.comm.groups import Group, ThreadGroup
from cupy_moe.kernels import finalize_rmsnorm
from cupy_moe.kernels.finalize_rmsnorm import PARAMS, FinalizeRmsnormConfig
from cupy_moe.runtime.jit import KernelSpec, render_unit, source_dir
from cupy_moe.runtime.peer_memory import MemoryOffer

EMULATOR = Path(__file__).parent / "emulator"
MULTIPROCESSORS = 4
COMPILER = shutil.which("g++") or shutil.which("clang++")


_building = threading.Lock()


def _library(config: FinalizeRmsnormConfig, folder: Path) -> ctypes.CDLL:
    with _building:
        return _build(config, folder)


@cache
def _build(config: FinalizeRmsnormConfig, folder: Path) -> ctypes.CDLL:
    sources = folder / "src"
    if not sources.exists():
        shutil.copytree(source_dir(), sources)
        shutil.copytree(EMULATOR / "ptx", sources / "ptx", dirs_exist_ok=True)
        kernel = sources / "finalize_rmsnorm.cu"
        body, _, _ = kernel.read_text().partition('namespace cupy_moe {\n\nextern "C"')
        kernel.write_text(body)
    name = f"{config.scheme.name}{config.num_ranks}x{config.num_groups}"
    unit = render_unit(config.spec())
    source, binary = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(f'#include "device.h"\n{unit}\n#include "finalize_rmsnorm.h"\n')
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    paths = [f"-I{EMULATOR}", f"-I{sources}"]
    assert COMPILER is not None
    subprocess.run([COMPILER, *options, *paths, source, "-o", binary], check=True)
    return ctypes.CDLL(str(binary))


def early_successors(config: FinalizeRmsnormConfig, folder: Path) -> int:
    """Threads that have let the next grid start since the last time."""
    return int(_library(config, folder).num_early_successors())


class _Memory:
    _kept: dict[int, np.ndarray] = {}  # noqa: RUF012 (until it is freed, as on a device)

    def __init__(self, device: int, num_bytes: int) -> None:
        self.device = device
        self.bytes = np.full(num_bytes, 0xAB, np.uint8)
        self.address = self.bytes.ctypes.data
        self._kept[self.address] = self.bytes

    def fill(self, fills: Sequence[tuple[int, int, int]]) -> None:
        for offset, count, word in fills:
            self.bytes[offset : offset + 4 * count].view(np.uint32)[:] = word

    def offer(self) -> MemoryOffer:
        return MemoryOffer("host", "process", self.device, f"bus{self.device}", self.address, b"")

    def free(self) -> None:
        self._kept.pop(self.address, None)
        self.address = 0


class _Page:
    def __init__(self, device: int, num_words: int) -> None:
        self.words = np.zeros(num_words, np.int32)
        self.address = self.words.ctypes.data

    def free(self) -> None:
        pass


class _Mapping:
    def __init__(self, device: int, offer: MemoryOffer) -> None:
        self.address = offer.address

    def close(self) -> None:
        pass


class _OneStream:
    def __init__(self, operation: str, device: int) -> None:
        pass

    def before(self, stream: int) -> int | None:
        return stream

    def after(self, stream: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Messages:
    """NCCL between threads."""

    NCCL_UINT8 = 1
    _queues: dict[Any, queue.Queue[bytes]] = {}  # noqa: RUF012 (one world)
    _lock = threading.Lock()
    _pending = threading.local()

    @classmethod
    def queue_of(cls, key: Any) -> queue.Queue[bytes]:
        with cls._lock:
            return cls._queues.setdefault(key, queue.Queue())

    @staticmethod
    def get_unique_id() -> object:
        return np.random.default_rng().integers(2**62)

    @classmethod
    def groupStart(cls) -> None:  # noqa: N802
        cls._pending.receives = []

    @classmethod
    def groupEnd(cls) -> None:  # noqa: N802
        for address, size, key in cls._pending.receives:
            data = cls.queue_of(key).get(timeout=60)
            assert len(data) == size
            ctypes.memmove(address, data, size)

    class NcclCommunicator:
        def __init__(self, size: int, name: object, rank: int) -> None:
            self.name, self.rank = name, rank

        def send(self, address: int, size: int, dtype: int, peer: int, stream: int) -> None:
            key = (self.name, self.rank, peer)
            _Messages.queue_of(key).put(ctypes.string_at(address, size))

        def recv(self, address: int, size: int, dtype: int, peer: int, stream: int) -> None:
            _Messages._pending.receives.append((address, size, (self.name, peer, self.rank)))

        def abort(self) -> None:
            pass


class _Cuda:
    class cuda:  # noqa: N801
        class runtime:  # noqa: N801
            deviceSynchronize = staticmethod(lambda: None)  # noqa: N815


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let workspaces of this process run on the emulator; built in ``folder``."""

    def bind(spec: KernelSpec, params: Any, **launch: Any) -> Any:
        library = _library(FinalizeRmsnormConfig(**dict(spec.config)), folder)
        return library, params, launch

    def enqueue(bound: Sequence[Any]) -> None:
        for library, params, launch in bound:
            shape = launch["grid"][0], launch["block"], launch["cluster"], launch["smem"]
            struct = ctypes.c_uint64.from_address(params.address).value
            library.launch(ctypes.string_at(struct, PARAMS.size), *shape)

    def load(spec: KernelSpec, device: int) -> KernelSpec:
        return spec

    for module in (workspace, transport):
        monkeypatch.setattr(module, "DeviceMemory", _Memory)
        monkeypatch.setattr(module, "device_guard", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(residents, "_counts", Counter())
    monkeypatch.setattr(transport, "PeerMapping", _Mapping)
    monkeypatch.setattr(transport, "_import_nccl", lambda: _Messages)
    monkeypatch.setattr(workspace, "HostPage", _Page)
    monkeypatch.setattr(workspace, "StreamOrder", _OneStream)
    monkeypatch.setattr(workspace, "import_cupy", lambda: _Cuda)
    monkeypatch.setattr(launches, "enqueue", enqueue)
    monkeypatch.setattr(finalize_rmsnorm, "MAX_THREADS", 128)  # a thread of the host each
    monkeypatch.setattr(launches, "bind", bind)
    monkeypatch.setattr(launches, "load", load)
    monkeypatch.setattr(launches, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(launches, "max_shared_memory", lambda device: 232448)
    monkeypatch.setattr(launches, "sm_count", lambda device: 8 * MULTIPROCESSORS)
    monkeypatch.setattr(launches, "multiprocessors_of", lambda stream, device: 8 * MULTIPROCESSORS)
    monkeypatch.setattr(
        launches,
        "resident_clusters",
        lambda function, blocks, threads, smem: 8 * MULTIPROCESSORS // blocks,
    )


def run_ranks(size: int, work: Callable[[Group], Any], timeout_s: float = 120.0) -> list[Any]:
    """Results of ``work`` on a thread for every rank; raises what a rank has raised.

    All ranks together have ``timeout_s``.
    """
    group = ThreadGroup(size, timeout_s=timeout_s)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(group.ranks[rank])
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors:
        raise errors[0]
    assert not hanging, f"ranks {hanging} hang"
    return results
