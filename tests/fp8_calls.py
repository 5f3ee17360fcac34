"""Calls of the FP8 operations on host arrays, shared by the tests of rules and of results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.fused_moe import (
    RoutingMethodType,
    fp8_layers,
    repeated,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.problem import MoeOperands
from cupy_moe.runtime.arrays import describe
from cupy_moe.testing.inputs import make_fp8_layer, make_hidden_states, make_topk
from cupy_moe.types import ActivationType
from tests.array_kinds import ARRAY_KINDS, ArrayKind

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
NUMPY = ArrayKind("numpy")
HOST_KINDS = [kind for kind in ARRAY_KINDS if not kind.marks]
OPERATIONS = {
    "routed": trtllm_fp8_per_tensor_scale_routed_moe,
    "logits": trtllm_fp8_per_tensor_scale_moe,
}
NUM_TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 5, 256, 128, 8, 2
WRITTEN = ("routing_replay_out", "output", "workspace_buffer")
GROUPED = {"routing_method_type": int(RoutingMethodType.DeepSeekV3), "n_group": 4, "topk_group": 2}
"""DeepSeekV3 with groups of two of the eight experts."""

host_kinds = pytest.mark.parametrize("kind", HOST_KINDS)
both_operations = pytest.mark.parametrize("operation", list(OPERATIONS))


def each_array(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize by operation and every array among ``names`` that it takes."""
    absent = {"routed": "routing_logits", "logits": "topk_ids"}
    names = list(names)
    return pytest.mark.parametrize(
        ("operation", "name"),
        [(o, name) for o in OPERATIONS for name in names if name != absent[o]],
    )


# --- arguments ------------------------------------------------------------------------------------


def zeros(kind: ArrayKind, shape: tuple[int, ...], dtype: Any) -> Any:
    return kind.make(np.zeros(shape, dtype))


def view_as(kind: ArrayKind, raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Reinterpret a flat array of bytes."""
    dtype = np.dtype(dtype)
    if kind.library == "torch":
        dtype = getattr(pytest.importorskip("torch"), dtype.name)
    return raw.view(dtype).reshape(shape)


def on(kind: ArrayKind, value: Any) -> Any:
    """Move NumPy arrays, also those in dictionaries and tuples, to a library."""
    if isinstance(value, dict):
        return {name: on(kind, item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(on(kind, item) for item in value)
    return kind.make(value) if isinstance(value, np.ndarray) else value


def layer_arguments(
    operation: str = "routed",
    activation: ActivationType = ActivationType.Swiglu,
    num_tokens: int = NUM_TOKENS,
    top_k: int = TOP_K,
    dtype: str = "packed",
    **options: Any,
) -> dict[str, Any]:
    """Valid keyword arguments (NumPy) of either operation for a small layer."""
    layer = make_fp8_layer(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        activation=activation,
    )
    hidden = make_hidden_states(num_tokens, HIDDEN)
    if operation == "logits":
        logits = np.random.default_rng(7).standard_normal((num_tokens, EXPERTS), np.float32)
        return layer.logits_arguments(hidden, logits, top_k, **options)
    return layer.arguments(hidden, make_topk(num_tokens, top_k, EXPERTS, dtype=dtype), **options)


@lru_cache(maxsize=2)
def numpy_arguments(operation: str) -> dict[str, Any]:
    """A valid call with every argument but the workspace, in NumPy; not to be changed."""
    arguments = layer_arguments(operation, ActivationType.SwigluStep)
    arguments["gemm1_clamp_limit"] = np.full(EXPERTS, 7.0, np.float32)
    arguments["routing_bias"] = np.zeros(EXPERTS, np.float32)
    arguments["routing_replay_out"] = np.zeros((NUM_TOKENS + 1, TOP_K), np.int16)
    arguments["output"] = np.zeros((NUM_TOKENS, HIDDEN), BF16)
    return arguments


def every_argument(operation: str, kind: ArrayKind) -> dict[str, Any]:
    """A valid call that gives every argument."""
    arguments = on(kind, numpy_arguments(operation))
    return {**arguments, "workspace_buffer": aligned_bytes(kind, 1024)}


def aligned_bytes(kind: ArrayKind, size: int, dtype: Any = np.uint8, offset: int = 0) -> Any:
    buffer = kind.make(np.zeros(size + 512, dtype))
    begin = -describe(buffer).ptr % 256 + offset
    return buffer[begin : begin + size]


def aligned(value: Any, offset: int = 0) -> Any:
    """Copy NumPy arrays, also those in a list or tuple, to where CUDA allocators put arrays."""
    if isinstance(value, list | tuple):
        return type(value)(aligned(v, offset) for v in value)
    if not isinstance(value, np.ndarray):
        return value
    memory = aligned_bytes(NUMPY, value.nbytes, offset=offset)
    copy = memory.view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def strided(kind: ArrayKind, array: np.ndarray) -> Any:
    """Array of the same shape with a gap after every element."""
    return kind.make(np.repeat(array, 2, axis=-1))[..., ::2]


def shifted(kind: ArrayKind, array: np.ndarray) -> Any:
    """Contiguous array of the same shape that starts one element after an aligned address."""
    flat = kind.make(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)]))
    return flat[1:].reshape(array.shape)


# --- calls ----------------------------------------------------------------------------------------


class AcceptedError(Exception):
    """All rules passed; carries what would have been run."""

    def __init__(self, operands: MoeOperands) -> None:
        super().__init__()
        self.operands = operands


def call(operation: str, arguments: dict[str, Any]) -> MoeOperands:
    """Operands of an accepted call, which is not run; the exception of a refused one."""
    repeated.accepted.cache_clear()

    def bind(_operation: str, _settings: object, operands: MoeOperands) -> None:
        raise AcceptedError(operands)

    with mock.patch.object(fp8_layers, "bind", bind):
        try:
            OPERATIONS[operation](**arguments)
        except AcceptedError as accepted:
            return accepted.operands
    raise AssertionError("the operation returned without running")


def assert_refused(
    operation: str, arguments: dict[str, Any], error: type[Exception], pattern: str
) -> None:
    """The call raises exactly ``error``; the message has the form of all messages."""
    name = OPERATIONS[operation].__name__
    with pytest.raises(error) as caught:
        call(operation, arguments)
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith(f"{name}: "), message
    assert re.search(pattern, message), message
