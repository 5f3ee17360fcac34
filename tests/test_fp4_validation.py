"""Rules on every array of the FP4 operations: refused by name, in words, before any work."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime.arrays import NumpyFramework
from tests.array_kinds import ArrayKind
from tests.fp4_calls import (
    BF16,
    EXPERTS,
    FORMS,
    HIDDEN,
    MODES,
    accepted,
    assert_refused,
    case_of,
    every_argument,
    fp4_arguments,
)
from tests.fp8_calls import aligned, host_kinds, shifted, strided

WEIGHTS = ("gemm1_weights", "gemm2_weights")
WEIGHT_SCALES = ("gemm1_weights_scale", "gemm2_weights_scale")
SCALARS = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
ACTIVATION = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
ROUTING = ("topk_ids", "routing_bias", "routing_replay_out")
ARRAYS = (
    *("hidden_states", "hidden_states_scale", *WEIGHTS, *WEIGHT_SCALES),
    *(*SCALARS, *ACTIVATION, *ROUTING, "output"),
)
OPTIONAL = (*ACTIVATION, "routing_bias", "routing_replay_out", "output")

each_form = pytest.mark.parametrize("form", FORMS)
each_mode = pytest.mark.parametrize("mode", MODES)
each_array = pytest.mark.parametrize("name", ARRAYS)
each_array_of_each_mode = pytest.mark.parametrize(
    ("mode", "form", "name"),
    [
        (mode, form, name)
        for mode, form, name in product(MODES, FORMS, ARRAYS)
        if mode != "bf16" or name != "hidden_states_scale"
    ],
)


def one_of(form: str, arguments: dict[str, Any], name: str) -> tuple[str, Any]:
    """Name (as a pattern) and value of an argument, of the second partition where there are two."""
    value = arguments[name]
    return (rf"{name}\[1\]", value[1]) if isinstance(value, list) else (name, value)


def with_one(arguments: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Replace what `one_of` returns."""
    old = arguments[name]
    return arguments | {name: [old[0], value] if isinstance(old, list) else value}


# --- rules on every array -------------------------------------------------------------------------


@host_kinds
@each_form
@each_mode
def test_every_argument_is_accepted(mode: str, form: str, kind: ArrayKind) -> None:
    arguments = every_argument(mode, form, kind)
    operands = accepted(form, arguments)
    assert operands.moe_format.value == mode
    assert operands.strategy == (None if form == "whole" else form)
    assert operands.output.owner is arguments["output"]
    assert operands.clamp_limit.owner is arguments["gemm1_clamp_limit"]
    assert (
        len(operands.gemm1_weights) == len(operands.gemm2_scales) == (1 if form == "whole" else 2)
    )


@each_array_of_each_mode
def test_missing(mode: str, form: str, name: str) -> None:
    arguments = every_argument(mode, form)
    label, _ = one_of(form, arguments, name)
    arguments = with_one(arguments, name, None)
    if name in OPTIONAL:
        accepted(form, arguments)
    else:
        assert_refused(form, arguments, ValueError, rf"{label}.*(be given|expected an array)")


@each_array
@each_form
def test_no_array(form: str, name: str) -> None:
    arguments = every_argument("mxfp8", form)
    arguments = with_one(arguments, name, "array")
    assert_refused(form, arguments, TypeError, r"expected an array .*got str")
    assert_refused(form, arguments, ValueError, "expected an array")


@host_kinds
@each_array_of_each_mode
def test_other_dtype(mode: str, form: str, name: str, kind: ArrayKind) -> None:
    arguments = every_argument(mode, form, kind)
    label, value = one_of(form, arguments, name)
    other = kind.make(np.zeros(tuple(value.shape), np.float16))
    arguments = with_one(arguments, name, other)
    for error in (TypeError, ValueError):
        assert_refused(form, arguments, error, rf"{label} must be .*, got float16|FP4 MoE")


@each_array_of_each_mode
def test_other_shape(mode: str, form: str, name: str) -> None:
    arguments = every_argument(mode, form)
    _, value = one_of(form, arguments, name)
    shapes = [(*value.shape[:-1], value.shape[-1] + 1), (value.shape[0] - 2, *value.shape[1:])]
    if not name.endswith("scale"):
        shapes.append((*value.shape, 1))
    for shape in shapes:
        changed = with_one(arguments, name, np.zeros(shape, value.dtype))
        if name in (*SCALARS, *ACTIVATION) and shape[-1] > EXPERTS:
            accepted(form, changed)
        else:
            assert_refused(form, changed, ValueError, "must .*, got")


@host_kinds
@each_array_of_each_mode
def test_gaps(mode: str, form: str, name: str, kind: ArrayKind) -> None:
    label, value = one_of(form, every_argument(mode, form), name)
    arguments = with_one(every_argument(mode, form, kind), name, strided(kind, value))
    assert_refused(form, arguments, ValueError, f"{label} must be contiguous")


ALIGNED = ("hidden_states", *WEIGHTS, *WEIGHT_SCALES, "output")


@host_kinds
@each_array_of_each_mode
def test_alignment(mode: str, form: str, name: str, kind: ArrayKind) -> None:
    label, value = one_of(form, every_argument(mode, form), name)
    arguments = with_one(every_argument(mode, form, kind), name, shifted(kind, value))
    if name in ALIGNED:
        pattern = f"{label} must start at a multiple of 16 bytes, got address"
        assert_refused(form, arguments, ValueError, pattern)
    else:
        accepted(form, arguments)


@each_array
@each_form
def test_array_on_another_device(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = every_argument("mxfp8", form)
    _, away = one_of(form, arguments, name)
    describe = NumpyFramework.describe

    def describe_elsewhere(self: NumpyFramework, x: Any, what: str) -> Any:
        return replace(describe(self, x, what), device=0 if x is away else -1)

    monkeypatch.setattr(NumpyFramework, "describe", describe_elsewhere)
    pattern = r"must be on (cpu|cuda:0), the device of hidden_states, got (cpu|cuda:0)\."
    assert_refused(form, arguments, ValueError, pattern)


@each_array_of_each_mode
def test_written_arrays_may_not_overlap(mode: str, form: str, name: str) -> None:
    """Output and replay buffer, with every argument that is read."""
    is_routing = name in ("routing_bias", "routing_replay_out")
    case = case_of(mode, "logits_minimax2" if is_routing else "swiglu_alpha_beta_clamp")
    arguments = fp4_arguments(mode, case, form)
    num_tokens, top_k = case.arrays["ids_i32"].shape
    if name == "routing_replay_out":
        arguments[name] = np.zeros((num_tokens, top_k), np.int16)
    written = "routing_replay_out" if name == "output" else "output"
    if name == "output":
        arguments |= fp4_arguments(mode, case_of(mode, "logits_minimax2"), form)
        num_tokens, top_k = case_of(mode, "logits_minimax2").arrays["ids_i32"].shape
        arguments[name] = np.zeros((num_tokens, HIDDEN), BF16)
    label, value = one_of(form, arguments, name)
    shape, dtype = {
        "output": ((num_tokens, HIDDEN), np.dtype(BF16)),
        "routing_replay_out": ((num_tokens, top_k), np.dtype(np.int16)),
    }[written]
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(max(value.nbytes, size) + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    inside = memory[: value.nbytes].view(value.dtype).reshape(value.shape)
    inside[...] = value
    arguments = with_one(arguments, name, inside)
    arguments[written] = memory[:size].view(dtype).reshape(shape)
    pattern = f"output must not overlap {'routing_replay_out' if name == 'output' else label}"
    assert_refused(form, arguments, ValueError, pattern)


@each_form
def test_written_arrays_must_be_writable(form: str) -> None:
    arguments = fp4_arguments("mxfp8", case_of("mxfp8", "logits_topk_raw"), form)
    num_tokens = len(arguments["routing_logits"])
    for name, array in (
        ("output", np.zeros((num_tokens, HIDDEN), BF16)),
        ("routing_replay_out", np.zeros((num_tokens, 4), np.int16)),
    ):
        array.flags.writeable = False
        assert_refused(form, arguments | {name: array}, ValueError, f"{name} must be writable")


@each_form
def test_cuda_arrays_are_checked_like_others(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = every_argument("mxfp8", form)
    describe = NumpyFramework.describe

    def describe_on_gpu(self: NumpyFramework, x: Any, what: str) -> Any:
        return replace(describe(self, x, what), device=0)

    monkeypatch.setattr(NumpyFramework, "describe", describe_on_gpu)
    for name in WEIGHT_SCALES:  # 32 bytes there
        arguments[name] = aligned(arguments[name])
        moved_by_16 = arguments | {name: aligned(arguments[name], 16)}
        assert_refused(form, moved_by_16, ValueError, "start at a multiple of 32 bytes")
    if form != "whole":
        pattern = "partition_resources must have streams for cuda:0, .*got streams for host memory"
        assert_refused(form, arguments, ValueError, pattern)
        resources = arguments["partition_resources"] = MoePartitionResources((None, None))
        resources.device = 0
    assert_refused(form, arguments | {"output": arguments["output"][1:]}, ValueError, "output")
