"""What a layer on CUDA arrays enqueues, with arrays in host memory that pose as CUDA arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cupy_moe import pipeline
from cupy_moe.bound_layer import BoundLayer
from cupy_moe.fused_moe import fp8_layers, plan_fp8_per_tensor_scale_routed_moe
from cupy_moe.problem import MoeOperands
from cupy_moe.runtime import scratch
from tests.fp8_calls import NUMPY as HOST_KIND
from tests.fp8_calls import aligned_bytes
from tests.posing import Gpu, PosingFramework, posing_arguments, posing_gpu

GEMMS = ["grouped_gemm", "grouped_gemm"]
STAGES = [*GEMMS, "finalize"]
GRAPH = f"graph of {' '.join(STAGES)}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with posing_gpu(monkeypatch) as gpu:
        yield gpu


def bound_on(layer: Any, stream: int) -> pipeline.Stages:
    return pipeline.bind_stages(layer.binding, stream)


def make_layer(operation: str = "routed", **options: Any) -> BoundLayer:
    make = {"routed": fp8_layers.routed_layer, "logits": fp8_layers.logits_layer}[operation]
    layer = make(**posing_arguments(operation, **options))
    assert isinstance(layer, BoundLayer)
    return layer


@pytest.mark.parametrize(
    ("operation", "options", "stages"),
    [
        ("routed", {}, STAGES),
        ("routed", {"num_tokens": 16}, STAGES),
        ("routed", {"num_tokens": 17}, ["permute", *STAGES]),
        ("routed", {"do_finalize": False}, GEMMS),
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
    layer.enqueue()
    bound = bound_on(layer, 7)
    gpu.launched.clear()
    assert gpu.framework.recorded == []
    gpu.framework.stream = 8
    layer.enqueue()
    assert gpu.launched == [(stage, 8) for stage in STAGES]
    assert layer.result.output is not None
    assert set(gpu.framework.recorded) == {layer._scratch.ptr, layer.result.output.ptr}
    gpu.framework.stream = 7
    assert bound_on(layer, 7) is bound, "still remembered"


def test_equal_addresses_bind_once(gpu: Gpu) -> None:
    size = make_layer().scratch_bytes
    workspace = aligned_bytes(HOST_KIND, size)
    output = make_layer().result.output
    assert output is not None
    arguments = posing_arguments(workspace_buffer=workspace, output=output.owner)
    first, second = (fp8_layers.routed_layer(**arguments) for _ in range(2))
    assert (first.scratch_bytes, second.scratch_bytes) == (0, 0)
    assert bound_on(first, 7) is bound_on(second, 7)
    arguments["topk_ids"] = arguments["topk_ids"].copy()
    assert bound_on(fp8_layers.routed_layer(**arguments), 7) is not bound_on(first, 7)


def test_every_address_and_choice_changes_the_launches(gpu: Gpu) -> None:
    layer = make_layer("logits", do_finalize=False)
    binding, bound = layer.binding, bound_on(layer, 7)
    for name, address in binding.at._asdict().items():
        moved = tuple(a + 256 for a in address) if isinstance(address, tuple) else address + 256
        changed = binding._replace(at=binding.at._replace(**{name: moved}))
        assert pipeline.bind_stages(changed, 7) is not bound
    factor = binding.routed_scaling_factor + 1
    assert pipeline.bind_stages(binding._replace(routed_scaling_factor=factor), 7) is not bound


def test_kernels_are_loaded_by_the_first_binding(gpu: Gpu) -> None:
    make_layer().enqueue()
    assert gpu.loaded == [(stage, False) for stage in STAGES]
    make_layer().enqueue()
    gpu.framework.capturing = True
    make_layer().enqueue()
    assert len(gpu.loaded) == len(STAGES)
    gpu.framework.stream = 9  # not seen before: the loader is asked, and told of the capture
    make_layer().enqueue()
    assert gpu.loaded[len(STAGES) :] == [(stage, True) for stage in STAGES]


def test_planning_loads_and_launches_nothing(gpu: Gpu) -> None:
    plan = plan_fp8_per_tensor_scale_routed_moe(**posing_arguments())
    assert [name for name, _ in gpu.loaded] == STAGES
    assert gpu.launched == []
    assert plan.scratch_bytes > 0
    plan.run()
    assert gpu.launched == [(GRAPH, 7)]


def test_a_plan_launches_kernels_where_its_graph_does_not_fit(gpu: Gpu) -> None:
    """It would be nested in the graph of a capture, and leave the SMs of a green context."""
    plan = plan_fp8_per_tensor_scale_routed_moe(**posing_arguments())
    gpu.framework.capturing = True
    plan.run()
    gpu.framework.capturing = False
    gpu.framework.stream, gpu.framework.green = 8, True
    plan.run()
    assert gpu.launched == [(stage, stream) for stream in (7, 8) for stage in STAGES]
    gpu.launched.clear()
    gpu.framework.green = False
    plan.run()
    assert gpu.launched == [(GRAPH, 8)]
    assert len(gpu.framework.recorded) == 2, "scratch and output, on the second stream"


def test_a_plan_made_during_a_capture(gpu: Gpu) -> None:
    gpu.framework.capturing = True
    plan = plan_fp8_per_tensor_scale_routed_moe(**posing_arguments())
    plan.run()
    gpu.framework.capturing = False
    plan.run()
    assert gpu.launched == [*((stage, 7) for stage in STAGES), (GRAPH, 7)]


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
    assert operands.gemm1_weights[0].owner is arguments["gemm1_weights"]
