"""Arrays in host memory that pose as CUDA arrays, and a stand-in for the driver they run on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_moe import bound_layer, partitioned_launches, pipeline
from cupy_moe.fused_moe import MoePartitionResources, execution, repeated
from cupy_moe.runtime import graph
from cupy_moe.runtime import launch as launch_module
from cupy_moe.runtime.arrays import DTYPES, FRAMEWORKS, ArrayRef, NumpyFramework
from cupy_moe.runtime.jit import Function
from cupy_moe.runtime.launch import BoundLaunch
from tests.fp8_calls import aligned, layer_arguments

__all__ = [
    "Gpu",
    "Posing",
    "PosingFramework",
    "PosingResources",
    "posing",
    "posing_arguments",
    "posing_fp4",
    "posing_gpu",
]


class Posing(np.ndarray):
    """An array in host memory that says it is on ``cuda:0``, or another device."""

    ordinal = 0


def posing_arguments(operation: str = "routed", **options: Any) -> dict[str, Any]:
    """Valid arguments of either operation whose arrays all pose as CUDA arrays."""
    return {name: posing(value) for name, value in layer_arguments(operation, **options).items()}


def posing(value: Any) -> Any:
    """View NumPy arrays, also those in a tuple or list, as posing ones."""
    if isinstance(value, list):
        return [posing(v) for v in value]
    if isinstance(value, tuple):
        return tuple(posing(v) for v in value)
    return value.view(Posing) if isinstance(value, np.ndarray) else value


class PosingFramework(NumpyFramework):
    """Library of posing arrays; the test says which stream is current, and what it is like."""

    has_signature = True

    def __init__(self) -> None:
        self.stream = 7
        self.capturing = False
        self.green = False
        self.recorded: list[int] = []

    def describe(self, x: Any, what: str) -> ArrayRef:
        return replace(super().describe(x, what), device=x.ordinal)

    def signature(self, x: Any) -> tuple[int, Hashable]:
        address = x.ctypes.data
        return address, (address & 255, x.ordinal, x.shape, x.strides, x.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        assert device == 0
        return self.describe(np.empty(shape, DTYPES[dtype]).view(Posing), "empty")

    def current_stream(self, device: int) -> int:
        return self.stream

    def is_capturing(self, device: int) -> bool:
        return self.capturing

    def record_stream(self, ref: ArrayRef) -> None:
        self.recorded.append(ref.ptr)


class PosingGraph:
    """Graph of kernels, launched as ``graph of ...``."""

    def __init__(self, gpu: Gpu, names: list[str]) -> None:
        self.gpu = gpu
        self.name = f"graph of {' '.join(names)}"

    def enqueue(self, stream: int) -> None:
        self.gpu.launched.append((self.name, stream))


class Gpu:
    """Stands in for the driver: kernels loaded and launches made, by name and stream."""

    def __init__(self, framework: PosingFramework) -> None:
        self.framework = framework
        self.loaded: list[tuple[str, bool]] = []
        self.launched: list[tuple[str, int]] = []

    def load(self, spec: Any, device: int, *, capturing: bool, arch: str | None) -> Function:
        self.loaded.append((spec.source, capturing))
        return Function(spec.source, device, spec.source)

    def make_graph(self, device: int, launches: Iterable[BoundLaunch]) -> PosingGraph:
        return PosingGraph(self, [launch.function.name for launch in launches])

    def launch(self, config: Any, handle: str, params: int, extra: int) -> tuple[str]:
        self.launched.append((handle, int(config.hStream)))
        return ("success",)


class PosingResources(MoePartitionResources):
    """Partitions on two streams of the stand-in for the driver, which takes down their order."""

    def __init__(self, gpu: Gpu, handles: tuple[int, int] = (11, 12)) -> None:
        super().__init__((None, None))
        self.handles, self.device = handles, 0
        self.topology = tuple(("green", 2, i, i, 0) for i in range(2))
        self.log = gpu.launched

    def fork_from(self, stream: int) -> None:
        self.log.append(("fork", stream))

    def exchange(self) -> None:
        self.log.append(("exchange", self.handles[0]))

    def join_into(self, stream: int) -> None:
        self.log.append(("join", stream))


def posing_fp4(gpu: Gpu, arguments: dict[str, Any]) -> dict[str, Any]:
    """Copies of a call's arrays that pose as CUDA arrays; a partitioned one gets resources."""
    moved = {name: posing(aligned(value)) for name, value in arguments.items()}
    if "partition_resources" in moved:
        moved["partition_resources"] = PosingResources(gpu)
    return moved


@contextmanager
def posing_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Let posing arrays run on a stand-in for the driver."""
    pytest.importorskip("cuda.bindings.driver")
    framework = PosingFramework()
    gpu = Gpu(framework)
    success = "success"
    monkeypatch.setitem(FRAMEWORKS, Posing, framework)
    monkeypatch.setattr(pipeline, "load", gpu.load)
    monkeypatch.setattr(pipeline, "compute_capability", lambda device: (8, 0))
    monkeypatch.setattr(pipeline, "sm_count", lambda device: 4)
    for module in (pipeline, graph, partitioned_launches):
        monkeypatch.setattr(module, "device_guard", lambda device: nullcontext())
    for module in (pipeline, graph):
        monkeypatch.setattr(module, "stream_is_capturing", lambda stream: framework.capturing)
    monkeypatch.setattr(graph, "stream_is_primary", lambda *_: not framework.green)
    monkeypatch.setattr(graph, "_driver_has_dependent_graphs", lambda: True)
    monkeypatch.setattr(graph, "LaunchGraph", gpu.make_graph)
    monkeypatch.setattr(graph, "context_is_current", lambda device: device == 0)
    monkeypatch.setattr(launch_module, "_driver_launch", lambda: (gpu.launch, success))
    monkeypatch.setattr(execution, "require_supported_device", lambda *_: None)
    caches = (
        *(pipeline.bind_stages, pipeline._load, pipeline.plan_for),
        *(repeated.accepted, repeated._reader, bound_layer._places),
    )
    for cached in caches:
        cached.cache_clear()
    yield gpu
    for cached in caches:
        cached.cache_clear()
