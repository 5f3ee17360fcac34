"""Operations called again: what skips the rules, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupy_moe import bound_layer, pipeline
from cupy_moe.fused_moe import fp8_layers
from cupy_moe.runtime.arrays import CupyFramework, describe
from cupy_moe.validate import Checker
from tests.fp8_calls import (
    BF16,
    NUMPY,
    OPERATIONS,
    aligned,
    aligned_bytes,
    both_operations,
    every_argument,
    layer_arguments,
    shifted,
    strided,
)
from tests.posing import Gpu, posing, posing_arguments, posing_gpu

MATRICES = ("hidden_states", "gemm1_weights", "gemm2_weights", "output", "workspace_buffer")
VECTORS = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
SHAPE = (5, 256)  # of the output


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with posing_gpu(monkeypatch) as gpu:
        yield gpu


def full_arguments(operation: str) -> dict[str, Any]:
    """A call with an output and a sufficient workspace."""
    output = np.zeros(SHAPE, BF16)
    workspace = aligned_bytes(NUMPY, 1 << 20)
    return posing_arguments(operation, output=posing(output), workspace_buffer=posing(workspace))


def passes_the_rules(call: Callable[[], object]) -> bool:
    """Whether a call is taken without a look at the rules for arrays."""
    with mock.patch.object(Checker, "array", autospec=True, side_effect=Checker.array) as rule:
        call()
    return rule.call_count == 0


@both_operations
@pytest.mark.parametrize("given", [True, False], ids=["all given", "allocated"])
def test_a_repeated_call_needs_no_rules(gpu: Gpu, operation: str, given: bool) -> None:
    arguments = full_arguments(operation) if given else posing_arguments(operation)
    run = OPERATIONS[operation]
    assert not passes_the_rules(lambda: run(**arguments))
    launched = list(gpu.launched)
    assert len(launched) >= 3
    results: list[Any] = []
    assert passes_the_rules(lambda: results.append(run(**arguments)))
    assert gpu.launched == 2 * launched
    assert (results[0] is arguments.get("output")) is given
    assert results[0].shape == SHAPE
    assert results[0].dtype == BF16


def test_new_outputs_are_distinct(gpu: Gpu) -> None:
    arguments = posing_arguments()
    outputs = [OPERATIONS["routed"](**arguments) for _ in range(4)]
    assert len({describe(output).ptr for output in outputs}) == 4


def test_launches_are_those_of_the_first_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same addresses, on the stream that is current; a graph of them in the end."""
    bound = mock.Mock(side_effect=pipeline.bind_stages)
    monkeypatch.setattr("cupy_moe.bound_layer.bind_stages", bound)
    arguments = full_arguments("routed")
    for stream in (7, 7, 7, 8):
        gpu.framework.stream = stream
        OPERATIONS["routed"](**arguments)
    calls = bound.call_args_list
    assert [call.args[1] for call in calls] == [7, 7, 8], "bound by two objects, and again"
    assert len({call.args[0] for call in calls}) == 1
    stages = [stage for stage, _ in gpu.launched[:3]]
    assert gpu.launched == [(stage, stream) for stream in (7, 7, 7, 8) for stage in stages]
    for _ in range(8):
        OPERATIONS["routed"](**arguments)
    assert gpu.launched[-1] == (f"graph of {' '.join(stages)}", 8)
    gpu.framework.capturing = True
    OPERATIONS["routed"](**arguments)
    assert gpu.launched[-3:] == [(stage, 8) for stage in stages]


def every_posing_argument(operation: str, dtype: str) -> dict[str, Any]:
    """A call that gives every argument, in arrays of its own."""
    arguments = {**every_argument(operation, NUMPY), "workspace_buffer": None}
    if operation == "routed":
        arguments["topk_ids"] = layer_arguments(dtype=dtype)["topk_ids"]
    arguments["workspace_buffer"] = aligned_bytes(NUMPY, 1 << 20)
    return {name: posing(aligned(value)) for name, value in arguments.items()}


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("routed", "packed"), ("routed", "bfloat16"), ("routed", "float32"), ("logits", "")],
)
@pytest.mark.parametrize("absent", [(), ("gemm1_clamp_limit",), ("routing_bias",), ("output",)])
@pytest.mark.parametrize("method", [0, 2])
@pytest.mark.parametrize("do_finalize", [True, False])
def test_other_arrays_of_the_same_forms_need_no_rules(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    dtype: str,
    absent: tuple[str, ...],
    method: int,
    do_finalize: bool,
) -> None:
    """They are bound to the addresses that a layer of theirs would be bound to."""
    if not do_finalize:
        absent = (*absent, "workspace_buffer")
    calls = [every_posing_argument(operation, dtype) for _ in range(2)]
    for arguments in calls:
        arguments.update(dict.fromkeys(absent), routing_method_type=method, do_finalize=do_finalize)
    first, second = calls
    OPERATIONS[operation](**first)
    bound = mock.Mock(side_effect=pipeline.bind_stages)
    monkeypatch.setattr("cupy_moe.bound_layer.bind_stages", bound)
    results: list[Any] = []
    assert passes_the_rules(lambda: results.append(OPERATIONS[operation](**second)))
    (call,) = bound.call_args_list
    make = {"routed": fp8_layers.routed_layer, "logits": fp8_layers.logits_layer}[operation]
    assert_bound_like(make(**second), call.args[0], results[0])


def assert_bound_like(layer: Any, binding: pipeline.Binding, results: Any) -> None:
    """Bound to the same arrays as a layer, and to results of its own of the same forms."""
    arrays = results if isinstance(results, list) else [results]
    made = {"scratch": binding.at.scratch}
    for (name, expected), array in zip(layer.result.arrays(), arrays, strict=True):
        found = describe(array)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        field = "expanded_to_permuted" if name.startswith("expanded") else name
        assert getattr(binding.at, field) == found.ptr
        if any(expected is operand for _, operand in layer.operands.arrays()):
            assert array is expected.owner
        else:
            made[field] = found.ptr
    assert binding == layer.binding._replace(at=layer.binding.at._replace(**made))


@pytest.mark.parametrize("shared", ["hidden_states", "routing_logits", "routing_replay_out"])
@pytest.mark.parametrize("written", ["output", "workspace_buffer"])
def test_overlaps_of_other_arrays_are_refused(gpu: Gpu, written: str, shared: str) -> None:
    calls = [every_posing_argument("logits", "") for _ in range(2)]
    OPERATIONS["logits"](**calls[0])
    arguments = calls[1]
    size = arguments[shared].nbytes
    memory = arguments[written].reshape(-1).view(np.uint8)[256 : 256 + size]
    arguments[shared] = memory.view(arguments[shared].dtype).reshape(arguments[shared].shape)
    gpu.launched.clear()
    with pytest.raises(ValueError, match="not overlap"):
        OPERATIONS["logits"](**arguments)
    assert gpu.launched == []


def test_overlaps_are_found_among_many_spans() -> None:
    """Compared with every pair."""
    rng = np.random.default_rng(0)
    names = ("hidden_states", "output", "topk_ids", "workspace_buffer", "gemm1_weights")
    written = (1, 3)
    found = 0
    for _ in range(500):
        begins, sizes = rng.integers(0, 150, 5).tolist(), rng.integers(0, 25, 5).tolist()
        layer = object.__new__(bound_layer.RepeatableLayer)
        layer._names, layer._sizes = names, tuple(sizes)
        pairs = ((i, j) for i in written for j in range(5) if i != j)
        expected = any(
            max(begins[i], begins[j]) < min(begins[i] + sizes[i], begins[j] + sizes[j])
            for i, j in pairs
        )
        assert layer._overwrites(begins) is expected
        found += expected
    assert 100 < found < 400


def test_each_place_has_launches_of_its_own(gpu: Gpu) -> None:
    """Scratch and output come from an allocator: what is bound elsewhere must not be used."""
    arguments = full_arguments("routed")
    for name in ("output", "workspace_buffer"):
        arguments[name] = None
    outputs = [OPERATIONS["routed"](**arguments) for _ in range(20)]
    ran = {place[2] for place in bound_layer._places._entries}  # address of the new output
    assert {describe(output).ptr for output in outputs[1:]} == ran
    assert not any(name.startswith("graph") for name, _ in gpu.launched), "no place came back"


def spoilt(how: str, array: np.ndarray) -> np.ndarray:
    """Array that breaks a rule: of another shape or dtype, with gaps, misaligned or elsewhere."""
    if how == "shape":
        return posing(np.zeros((*array.shape, 1), array.dtype))
    if how == "dtype":
        return array.view({1: np.bool_, 2: np.float16, 4: np.uint32}[array.dtype.itemsize])
    if how == "gaps":
        return posing(strided(NUMPY, np.asarray(array)))
    if how == "address":
        return posing(shifted(NUMPY, np.asarray(array)))
    moved = array.view()
    moved.ordinal = 1
    return moved


@both_operations
@pytest.mark.parametrize("how", ["shape", "dtype", "gaps", "address", "device"])
@pytest.mark.parametrize("name", MATRICES)
def test_rules_hold_after_an_accepted_call(gpu: Gpu, operation: str, name: str, how: str) -> None:
    arguments = full_arguments(operation)
    for _ in range(2):
        OPERATIONS[operation](**arguments)
    gpu.launched.clear()
    with pytest.raises((TypeError, ValueError)):
        OPERATIONS[operation](**{**arguments, name: spoilt(how, arguments[name])})
    assert gpu.launched == []


@pytest.mark.parametrize("how", ["shape", "dtype", "gaps", "device"])
@pytest.mark.parametrize("name", ["topk_ids", *VECTORS])
def test_rules_for_small_arrays_hold_too(gpu: Gpu, name: str, how: str) -> None:
    arguments = posing_arguments()
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
    gpu.launched.clear()
    with pytest.raises((TypeError, ValueError)):
        OPERATIONS["routed"](**{**arguments, name: spoilt(how, arguments[name])})
    assert gpu.launched == []


def test_an_output_over_an_input_is_refused(gpu: Gpu) -> None:
    arguments = full_arguments("routed")
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
    half = arguments["output"].reshape(-1).view(arguments["hidden_states"].dtype)[: 5 * 256]
    arguments["hidden_states"] = half.reshape(5, 256)
    gpu.launched.clear()
    with pytest.raises(ValueError, match="not overlap hidden_states"):
        OPERATIONS["routed"](**arguments)
    assert gpu.launched == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 2.0), ("do_finalize", 1), ("n_group", False), ("activation_type", True)],
)
def test_equal_values_of_another_type_are_refused(gpu: Gpu, name: str, value: object) -> None:
    options = {"do_finalize": True, "n_group": 0, "activation_type": 3, "top_k": 2}
    arguments = {**posing_arguments(), **options}
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
    gpu.launched.clear()
    with pytest.raises(TypeError, match=name):
        OPERATIONS["routed"](**{**arguments, name: value})
    assert gpu.launched == []


def test_packed_words_are_no_tuple(gpu: Gpu) -> None:
    arguments = posing_arguments()
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
    arguments["topk_ids"] = (arguments["topk_ids"],)
    with pytest.raises(ValueError, match="tuple of 1"):
        OPERATIONS["routed"](**arguments)
    unpacked = posing_arguments(dtype="float32")
    OPERATIONS["routed"](**unpacked)
    assert passes_the_rules(lambda: OPERATIONS["routed"](**unpacked))


# --- signatures -----------------------------------------------------------------------------------


def test_changes_in_place_change_the_signature_of_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    base = torch.zeros(4, 4)
    read = describe(base).framework.signature

    def changed(change: Callable[[Any], object]) -> bool:
        tensor = base.clone()
        before = read(tensor)
        assert before == read(tensor)
        assert hash(before) == hash(read(tensor))
        change(tensor)
        return read(tensor) != before

    assert changed(lambda t: t.resize_(2, 4))
    assert changed(lambda t: t.t_())
    assert changed(lambda t: t.unsqueeze_(0))
    assert changed(lambda t: t.set_(torch.zeros(4, 4)))
    assert changed(lambda t: setattr(t, "data", torch.zeros(4, 4)))
    assert changed(lambda t: setattr(t, "data", t.data.view(torch.int32)))
    assert changed(lambda t: t.untyped_storage().resize_(0))
    assert not changed(lambda t: t.fill_(3))


def test_signatures_of_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    memory = np.zeros(256, np.uint8)

    def array(shape: tuple[int, ...], dtype: Any, device: int = 0, offset: int = 0) -> Any:
        block = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(block, offset))

    read = CupyFramework().signature
    base = read(array((4, 4), np.float32))
    assert base == read(array((4, 4), np.float32))
    others = [
        array((2, 8), np.float32),
        array((4, 4), np.int32),
        array((4, 4), np.float32, device=1),
        array((4, 4), np.float32, offset=16),
        array((4, 4), np.float32).T,
    ]
    assert len({base, *map(read, others)}) == 6
