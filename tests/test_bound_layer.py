"""What a layer on CUDA arrays enqueues, with arrays in host memory that pose as CUDA arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_moe import bound_layer, pipeline
from cupy_moe.bound_layer import BoundLayer
from cupy_moe.fused_moe import execution, fp8_layers, plan_fp8_per_tensor_scale_routed_moe
from cupy_moe.plan import MoeOperands
from cupy_moe.runtime import launch as launch_module
from cupy_moe.runtime import scratch
from cupy_moe.runtime.arrays import FRAMEWORKS, HOST, ArrayRef, NumpyFramework
from cupy_moe.runtime.jit import Function
from tests.fp8_calls import NUMPY as HOST_KIND
from tests.fp8_calls import aligned_bytes, layer_arguments

GEMMS = ["grouped_gemm", "grouped_gemm"]
STAGES = ["permute", *GEMMS, "finalize"]


class Posing(np.ndarray):
    """An array in host memory that says it is on ``cuda:0``."""


def posing_arguments(operation: str = "routed", **options: Any) -> dict[str, Any]:
    arguments = layer_arguments(operation, **options)
    return {
        name: value.view(Posing) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


class PosingFramework(NumpyFramework):
    """Library of posing arrays; the test says which stream is current and being captured."""

    def __init__(self) -> None:
        self.stream = 7
        self.capturing = False
        self.recorded: list[int] = []

    def describe(self, x: Any, what: str) -> ArrayRef:
        return replace(super().describe(x, what), device=0)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        assert device == 0
        return self.describe(super().empty(shape, dtype, HOST).owner.view(Posing), "empty")

    def current_stream(self, device: int) -> int:
        return self.stream

    def is_capturing(self, device: int) -> bool:
        return self.capturing

    def record_stream(self, ref: ArrayRef) -> None:
        self.recorded.append(ref.ptr)


class Gpu:
    """Stands in for the driver: kernels loaded and launches made, by name and stream."""

    def __init__(self, framework: PosingFramework) -> None:
        self.framework = framework
        self.loaded: list[tuple[str, bool]] = []
        self.launched: list[tuple[str, int]] = []

    def load(self, spec: Any, device: int, *, capturing: bool, arch: str | None) -> Function:
        self.loaded.append((spec.source, capturing))
        return Function(spec.source, device, spec.source)

    def launch(self, config: Any, handle: str, params: int, extra: int) -> tuple[str]:
        self.launched.append((handle, int(config.hStream)))
        return ("success",)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    pytest.importorskip("cuda.bindings.driver")
    framework = PosingFramework()
    gpu = Gpu(framework)
    success = "success"
    monkeypatch.setitem(FRAMEWORKS, Posing, framework)
    monkeypatch.setattr(pipeline, "load", gpu.load)
    monkeypatch.setattr(pipeline, "compute_capability", lambda device: (8, 0))
    monkeypatch.setattr(pipeline, "sm_count", lambda device: 4)
    monkeypatch.setattr(pipeline, "stream_is_capturing", lambda stream: framework.capturing)
    for module in (pipeline, bound_layer):
        monkeypatch.setattr(module, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(bound_layer, "context_is_current", lambda device: device == 0)
    monkeypatch.setattr(launch_module, "_driver_launch", lambda: (gpu.launch, success))
    monkeypatch.setattr(execution, "require_supported_device", lambda *_: None)
    caches = (pipeline.bind_stages, pipeline._load, pipeline.plan_for, execution._backend)
    for cached in caches:
        cached.cache_clear()
    yield gpu
    for cached in caches:
        cached.cache_clear()


def make_layer(operation: str = "routed", **options: Any) -> BoundLayer:
    make = {"routed": fp8_layers.routed_layer, "logits": fp8_layers.logits_layer}[operation]
    layer = make(**posing_arguments(operation, **options))
    assert isinstance(layer, BoundLayer)
    return layer


@pytest.mark.parametrize(
    ("operation", "options", "stages"),
    [
        ("routed", {}, STAGES),
        ("routed", {"do_finalize": False}, STAGES[:3]),
        ("logits", {}, ["route", *STAGES]),
    ],
)
def test_stages_in_order(gpu: Gpu, operation: str, options: Any, stages: list[str]) -> None:
    layer = make_layer(operation, **options)
    assert gpu.launched == []
    layer.enqueue()
    assert gpu.launched == [(stage, 7) for stage in stages]
    layer.enqueue()
    assert gpu.launched == 2 * [(stage, 7) for stage in stages]


def test_a_layer_follows_the_current_stream(gpu: Gpu) -> None:
    layer = make_layer()
    bound = layer.bind()
    assert layer.bind() is bound
    assert gpu.framework.recorded == []
    gpu.framework.stream = 8
    layer.enqueue()
    assert gpu.launched == [(stage, 8) for stage in STAGES]
    assert layer.result.output is not None
    assert gpu.framework.recorded == [layer._scratch.ptr, layer.result.output.ptr]
    gpu.framework.stream = 7
    assert layer.bind() is bound, "still remembered"


def test_equal_addresses_bind_once(gpu: Gpu) -> None:
    size = make_layer().scratch_bytes
    workspace = aligned_bytes(HOST_KIND, size)
    output = make_layer().result.output
    assert output is not None
    arguments = posing_arguments(workspace_buffer=workspace, output=output.owner)
    first, second = (fp8_layers.routed_layer(**arguments) for _ in range(2))
    assert (first.scratch_bytes, second.scratch_bytes) == (0, 0)
    assert first.bind() is second.bind()
    arguments["topk_ids"] = arguments["topk_ids"].copy()
    assert fp8_layers.routed_layer(**arguments).bind() is not first.bind()


def test_every_address_and_choice_changes_the_launches(gpu: Gpu) -> None:
    layer = make_layer("logits", do_finalize=False)
    problem, device, arch, tiling, pdl, factor, addresses = layer._binding
    bound = pipeline.bind_stages(*layer._binding, 7)
    for index in range(len(addresses)):
        moved = (*addresses[:index], addresses[index] + 256, *addresses[index + 1 :])
        binding = (problem, device, arch, tiling, pdl, factor, moved)
        assert pipeline.bind_stages(*binding, 7) is not bound
    assert pipeline.bind_stages(*layer._binding[:5], factor + 1, addresses, 7) is not bound


def test_kernels_are_loaded_by_the_first_binding(gpu: Gpu) -> None:
    make_layer().bind()
    assert gpu.loaded == [(stage, False) for stage in STAGES]
    make_layer().bind()
    gpu.framework.capturing = True
    make_layer().bind()
    assert len(gpu.loaded) == len(STAGES)
    gpu.framework.stream = 9  # not seen before: the loader is asked, and told of the capture
    make_layer().bind()
    assert gpu.loaded[len(STAGES) :] == [(stage, True) for stage in STAGES]


def test_planning_loads_and_launches_nothing(gpu: Gpu) -> None:
    plan = plan_fp8_per_tensor_scale_routed_moe(**posing_arguments())
    assert [name for name, _ in gpu.loaded] == STAGES
    assert gpu.launched == []
    assert plan.scratch_bytes > 0
    plan.run()
    assert gpu.launched == [(stage, 7) for stage in STAGES]


def test_scratch_of_a_capture_is_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_captured", kept := [])
    make_layer()
    assert not kept
    gpu.framework.capturing = True
    layer = make_layer()
    assert [ref.ptr for ref in kept] == [layer._scratch.ptr]
    monkeypatch.setattr(PosingFramework, "has_graph_pool", True)
    make_layer()
    assert len(kept) == 1


def test_a_workspace_that_is_too_small_is_left_alone(gpu: Gpu) -> None:
    workspace = aligned_bytes(HOST_KIND, 256)
    layer = make_layer(workspace_buffer=workspace)
    assert layer.scratch_bytes > 256
    assert layer._scratch.owner is not workspace


def test_a_layer_keeps_its_arrays(gpu: Gpu) -> None:
    arguments = posing_arguments()
    operands: MoeOperands = fp8_layers.routed_layer(**arguments).operands
    assert operands.hidden_states.owner is arguments["hidden_states"]
    assert operands.gemm1_weights.owner is arguments["gemm1_weights"]
