"""Memory that the FP8 operations write: no overlap with what they read, never read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.fused_moe import RoutingMethodType
from tests.array_kinds import ArrayKind
from tests.fp8_calls import (
    BF16,
    E4M3,
    HIDDEN,
    NUM_TOKENS,
    NUMPY,
    OPERATIONS,
    TOP_K,
    WRITTEN,
    aligned_bytes,
    assert_refused,
    both_operations,
    call,
    each_array,
    every_argument,
    host_kinds,
    numpy_arguments,
    view_as,
    zeros,
)


def memory_shared_by(kind: ArrayKind, written: str, name: str, operation: str) -> dict[str, Any]:
    """``written`` and the array ``name`` over the first bytes of one buffer."""
    source = numpy_arguments(operation)
    sizes = {"workspace_buffer": 4096} | {
        n: source[n].nbytes for n in (written, name) if n != "workspace_buffer"
    }
    buffer = aligned_bytes(kind, max(sizes[written], sizes[name]))

    def view(n: str) -> Any:
        raw = buffer[: sizes[n]]
        is_workspace = n == "workspace_buffer"
        return raw if is_workspace else view_as(kind, raw, source[n].dtype, source[n].shape)

    return {written: view(written), name: view(name)}


READ = {
    name: None  # in order, each once
    for operation in OPERATIONS
    for name, value in numpy_arguments(operation).items()
    if isinstance(value, np.ndarray) and name not in WRITTEN
}


@pytest.mark.parametrize("written", ["output", "workspace_buffer"])
@each_array(READ)
@host_kinds
def test_written_memory_overlaps_an_input(
    kind: ArrayKind, operation: str, name: str, written: str
) -> None:
    arguments = every_argument(operation, kind)
    arguments |= memory_shared_by(kind, written, name, operation)
    if name == "routing_bias":
        if operation == "routed":
            call(operation, arguments)  # not read
            return
        arguments["routing_method_type"] = int(RoutingMethodType.MiniMax2)
    pattern = rf"{written} must not overlap {name}, got \[0x.*Pass a copy"
    assert_refused(operation, arguments, ValueError, pattern)


@both_operations
@host_kinds
def test_workspace_overlaps_output(kind: ArrayKind, operation: str) -> None:
    arguments = every_argument(operation, kind)
    arguments |= memory_shared_by(kind, "workspace_buffer", "output", operation)
    pattern = "workspace_buffer must not overlap output"
    assert_refused(operation, arguments, ValueError, pattern)


@host_kinds
def test_output_overlaps_weights_of_a_tuple(kind: ArrayKind) -> None:
    arguments = every_argument("routed", kind)
    buffer = aligned_bytes(kind, NUM_TOKENS * HIDDEN * 2)
    arguments["output"] = view_as(kind, buffer, BF16, (NUM_TOKENS, HIDDEN))
    slots = (NUM_TOKENS, TOP_K)
    weights = view_as(kind, buffer[: NUM_TOKENS * TOP_K * 4], np.float32, slots)
    arguments["topk_ids"] = (zeros(kind, slots, np.int32), weights)
    assert_refused("routed", arguments, ValueError, r"output must not overlap topk_ids\[1\]")


@host_kinds
def test_replay_buffer_overlaps_logits(kind: ArrayKind) -> None:
    arguments = every_argument("logits", kind)
    arguments |= memory_shared_by(kind, "routing_replay_out", "routing_logits", "logits")
    pattern = "routing_replay_out must not overlap routing_logits"
    assert_refused("logits", arguments, ValueError, pattern)


@host_kinds
def test_adjacent_memory_is_no_overlap(kind: ArrayKind) -> None:
    arguments = every_argument("routed", kind)
    buffer = aligned_bytes(kind, 4096)
    arguments["output"] = kind.make(np.zeros((NUM_TOKENS, HIDDEN), BF16))
    size = NUM_TOKENS * HIDDEN
    tokens = buffer[256 : 256 + size]
    arguments["hidden_states"] = view_as(kind, tokens, E4M3, (NUM_TOKENS, HIDDEN))
    for neighbor in (buffer[:256], buffer[256 + size :]):
        call("routed", {**arguments, "workspace_buffer": neighbor})


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("routed", "output"),
        ("routed", "workspace_buffer"),
        ("logits", "routing_replay_out"),
    ],
)
def test_read_only_memory_is_not_written(operation: str, name: str) -> None:
    arguments = every_argument(operation, NUMPY)
    arguments[name].flags.writeable = False
    pattern = rf"{name} must be writable, got a read-only array"
    assert_refused(operation, arguments, ValueError, pattern)


def test_read_only_inputs_are_accepted() -> None:
    arguments = every_argument("routed", NUMPY)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and name not in WRITTEN:
            value.flags.writeable = False
    call("routed", arguments)


@host_kinds
@pytest.mark.parametrize("value", [(1, 1), (0,)])
def test_output_is_ignored_without_finalization(kind: ArrayKind, value: tuple[int, ...]) -> None:
    arguments = every_argument("routed", kind)
    arguments |= {"do_finalize": False, "workspace_buffer": None}
    arguments["output"] = zeros(kind, value, np.float32)
    assert call("routed", arguments).output is None
