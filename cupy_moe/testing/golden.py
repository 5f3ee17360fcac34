"""Golden vectors: files of cases with inputs and expected results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupy_moe.testing.inputs import Arguments, Fp8Layer
from cupy_moe.types import ActivationType
from cupy_moe.weights import Fp8ExpertWeights, prepare_gemm1_weights, prepare_gemm2_weights

__all__ = ["GoldenCase", "golden_fp8_arguments", "load_golden_cases"]


@dataclass(frozen=True, eq=False)
class GoldenCase:
    """One case of a file of golden vectors.

    Attributes
    ----------
    name : str
    parameters : mapping
        The case's entry in the file's list of cases.
    arrays : mapping
        The case's arrays. FP8 and BF16 are typed, and their names have lost the suffix of the raw
        bytes: ``out_bf16_u16`` is ``out``, ``x_e4m3_u8`` is ``x``. Others keep their name.
    weights : mapping
        The arrays of the case's weight set, likewise (``w1``, ``w2``).
    """

    name: str
    parameters: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]
    weights: Mapping[str, NDArray[Any]]


_RAW_SUFFIXES = {
    "_bf16_u16": np.dtype(ml_dtypes.bfloat16),
    "_e4m3_u8": np.dtype(ml_dtypes.float8_e4m3fn),
}


def _typed(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    found = {}
    for key in arrays:
        if not key.startswith(prefix):
            continue
        name, array = key.removeprefix(prefix), arrays[key]
        for suffix, dtype in _RAW_SUFFIXES.items():
            if name.endswith(suffix):
                name, array = name.removesuffix(suffix), array.view(dtype)
        found[name] = array
    return found


def load_golden_cases(path: Path) -> list[GoldenCase]:
    """Load every case of an ``.npz`` file of golden vectors that has cases."""
    with np.load(path) as file:
        arrays = dict(file)
    cases = json.loads(str(arrays.pop("cases")))["cases"]
    return [
        GoldenCase(
            case["name"],
            case,
            _typed(arrays, f"{case['name']}/"),
            _typed(arrays, f"{case['weights']}_") if "weights" in case else {},
        )
        for case in cases
    ]


def golden_fp8_arguments(case: GoldenCase) -> Arguments:
    """Keyword arguments of ``trtllm_fp8_per_tensor_scale_routed_moe`` for a golden case (NumPy)."""
    p, a = case.parameters, case.arrays
    activation = ActivationType(p["activation_type"])
    rows = p["intermediate_size"] * (2 if activation.is_gated else 1)
    layer = Fp8Layer(
        Fp8ExpertWeights(
            prepare_gemm1_weights(case.weights["w1"][:, :rows], gated=activation.is_gated),
            prepare_gemm2_weights(case.weights["w2"]),
            a["s1_f32"],
            a["sgate_f32"],
            a["s2_f32"],
        ),
        activation,
        p["num_experts"],
        p["local_expert_offset"],
        a.get("clamp_limit_f32"),
    )
    ids, packed = a["ids_i32"], p["routing_input"] == "packed"
    weights = a["weights_f32"] if "weights_f32" in a else a["weights"]
    return layer.arguments(
        a["x"],
        a["topk_packed_i32"] if packed else (ids, weights),
        use_routing_scales_on_input=p["use_routing_scales_on_input"],
        routing_method_type=p["routing_method_type"],
        do_finalize=p["do_finalize"],
    )
