"""Calls of the FP4 operations on host arrays, shared by the tests of rules and of results."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.fused_moe import (
    MoePartitionResources,
    RoutingInputMode,
    fp4_layers,
    prims_ts_fp4_block_scale_moe,
    prims_ts_fp4_block_scale_moe_partitioned,
)
from cupy_moe.problem import MoeOperands
from cupy_moe.testing.golden import GoldenCase
from tests.array_kinds import ArrayKind
from tests.fp8_calls import AcceptedError
from tests.moe_cases import STRATEGIES, cases_of, fp4_call

__all__ = [
    "FORMS",
    "MODES",
    "NUM_TOKENS",
    "OPERATIONS",
    "accepted",
    "assert_refused",
    "case_of",
    "every_argument",
    "fp4_arguments",
    "moved",
    "run",
]

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
MODES = ("nvfp4", "mxfp8", "bf16")
FORMS = ("whole", *STRATEGIES)
"""Not partitioned, and the two strategies."""

OPERATIONS = {
    "whole": prims_ts_fp4_block_scale_moe,
    **dict.fromkeys(STRATEGIES, prims_ts_fp4_block_scale_moe_partitioned),
}
NUM_TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 9, 2, 4, 256, 256  # of the case below
_HIDDEN_DTYPE = {"nvfp4": np.uint8, "mxfp8": E4M3, "bf16": BF16}
_SCALARS = {
    "output1_scale_scalar": "s1",
    "output1_scale_gate_scalar": "sgate",
    "output2_scale_scalar": "s2",
}
_ACTIVATION = {"gemm1_alpha": "alpha", "gemm1_beta": "beta", "gemm1_clamp_limit": "clamp_limit"}
_SIZES = ("num_experts", "top_k", "n_group", "topk_group", "intermediate_size")
_LOCAL = ("local_expert_offset", "local_num_experts")


def case_of(mode: str, name: str = "swiglu_packed") -> GoldenCase:
    return cases_of(f"fp4_moe_{mode}.npz")[name]


def fp4_arguments(
    mode: str, case: GoldenCase, form: str, *, scale_dtype: Any = E4M3, **options: Any
) -> dict[str, Any]:
    """Keyword arguments (NumPy) of the operation of a form for a golden case."""
    call = fp4_call(mode, case, None if form == "whole" else form)
    p = case.parameters
    arguments: dict[str, Any] = {
        "hidden_states": call["hidden"].view(_HIDDEN_DTYPE[mode]),
        "hidden_states_scale": _typed(call["hidden_scales"], scale_dtype),
        "routing_bias": None,
        "routing_logits": None,
        "routed_scaling_factor": p["routed_scaling_factor"],
        "routing_method_type": p["routing_method_type"],
        "activation_type": p["activation_type"],
        "norm_topk_prob": p["norm_topk_prob"],
        **{name: call[key] for name, key in (_SCALARS | _ACTIVATION).items()},
        **{name: p[name] for name in (*_SIZES, *_LOCAL)},
        **_routing(case),
    }
    for name in ("gemm1", "gemm2"):
        shards = call[name], [_typed(s, scale_dtype) for s in call[f"{name}_scales"]]
        weights, scales = (s[0] for s in shards) if form == "whole" else shards
        arguments |= {f"{name}_weights": weights, f"{name}_weights_scale": scales}
    if form == "whole":
        arguments |= {"gemm1_bias": None, "gemm2_bias": None}
        arguments["routing_input_mode"] = int(_input_mode(case))
    else:
        arguments |= {"topk_ids": None, "topk_weights": None} | _routing(case)
        arguments["partition_resources"] = MoePartitionResources((None, None))
        arguments["partition_strategy"] = form
    return arguments | options


def _typed(scales: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    return None if scales is None else scales.view(dtype)


def _input_mode(case: GoldenCase) -> RoutingInputMode:
    kind = case.parameters["routing"].partition("_")[0]
    return {
        "logits": RoutingInputMode.FromLogits,
        "packed": RoutingInputMode.PackedPrecomputed,
        "unpacked": RoutingInputMode.UnpackedPrecomputed,
    }[kind]


def _routing(case: GoldenCase) -> dict[str, Any]:
    a, mode = case.arrays, _input_mode(case)
    if mode is RoutingInputMode.FromLogits:
        is_bf16 = case.parameters["logits_dtype"] == "bf16"
        logits = a["logits_f32"].astype(BF16 if is_bf16 else np.float32)
        return {"routing_logits": logits, "routing_bias": a.get("bias_f32")}
    if mode is RoutingInputMode.PackedPrecomputed:
        return {"topk_ids": a["topk_packed_i32"]}
    weights = a["weights_f32"] if "weights_f32" in a else a["weights"]
    return {"topk_ids": a["ids_i32"], "topk_weights": weights}


def moved(kind: ArrayKind, value: Any) -> Any:
    """Move NumPy arrays, also those in dictionaries and lists, to a library."""
    if isinstance(value, dict):
        return {name: moved(kind, item) for name, item in value.items()}
    if isinstance(value, list):
        return [moved(kind, item) for item in value]
    return kind.make(value) if isinstance(value, np.ndarray) else value


def run(form: str, arguments: dict[str, Any]) -> list[Any]:
    return OPERATIONS[form](**arguments)


@lru_cache(maxsize=9)
def _valid(mode: str, form: str) -> dict[str, Any]:
    case = case_of(mode)
    vector = np.full(EXPERTS, 1.5, np.float32)
    return fp4_arguments(mode, case, form) | {
        "gemm1_alpha": vector,
        "gemm1_beta": vector.copy(),
        "gemm1_clamp_limit": vector.copy(),
        "routing_bias": np.zeros(EXPERTS, np.float32),
        "routing_replay_out": np.zeros((NUM_TOKENS + 1, TOP_K), np.int16),
        "output": np.zeros((NUM_TOKENS, HIDDEN), BF16),
    }


def every_argument(mode: str, form: str, kind: ArrayKind | None = None) -> dict[str, Any]:
    """A valid call that gives every argument but the source of routing that it does not use."""
    return moved(kind or ArrayKind("numpy"), _valid(mode, form))


def accepted(form: str, arguments: dict[str, Any]) -> MoeOperands:
    """Operands of an accepted call, which is not run; the exception of a refused one."""

    def bind(_operation: str, _settings: object, operands: MoeOperands, _: object) -> None:
        raise AcceptedError(operands)

    with mock.patch.object(fp4_layers, "bind", bind):
        try:
            run(form, arguments)
        except AcceptedError as error:
            return error.operands
    raise AssertionError("the operation returned without running")


def assert_refused(
    form: str, arguments: dict[str, Any], error: type[Exception], pattern: str
) -> None:
    """The call raises ``error`` before it writes; the message has the form of all messages."""
    written = [arguments.get(name) for name in ("output", "routing_replay_out")]
    before = [None if x is None else np.array(x).tobytes() for x in written if _is_numpy(x)]
    with pytest.raises(error) as caught:
        run(form, arguments)
    message = str(caught.value)
    assert message.startswith(f"{OPERATIONS[form].__name__}: "), message
    assert re.search(pattern, message), message
    assert [np.array(x).tobytes() for x in written if _is_numpy(x)] == before


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray)
