"""An FP8 layer cut along its intermediate dimension, and the whole layer that ranks must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_moe.codecs import decode_bf16
from cupy_moe.comm.rules import NormOptions
from cupy_moe.testing.compare import to_host
from cupy_moe.testing.inputs import Fp8Layer
from cupy_moe.weights.layouts import (
    prepare_gemm1_weights,
    prepare_gemm2_weights,
    unprepare_gemm1_weights,
    unprepare_gemm2_weights,
)
from tests.finalize_cases import BF16, FinalizeCase

NORM = {"eps": 1e-6, "gain_center": 0.0, "weight_before_norm": False}


def finalized(unfinalized: Sequence[Any]) -> np.ndarray:
    """What the reference makes, with a gain of 1, of the three arrays of a layer on one GPU."""
    rows, weights, index = (to_host(array) for array in unfinalized)
    ones = np.ones(rows.shape[1], BF16).view(np.uint16)
    index = index.reshape(weights.shape)
    case = FinalizeCase([rows.view(np.uint16)], [index], weights, ones, NormOptions(**NORM))
    return case.terms().sum(axis=1)


def shard_layer(whole: Fp8Layer, rank: int, size: int) -> Fp8Layer:
    """The rank's part of the intermediate dimension; scales are those of the whole layer."""
    up_and_gate = unprepare_gemm1_weights(whole.weights.gemm1_weights)
    down = unprepare_gemm2_weights(whole.weights.gemm2_weights)
    up, gate = np.split(up_and_gate, 2, axis=1)
    own = slice(rank * up.shape[1] // size, (rank + 1) * up.shape[1] // size)
    shard = replace(
        whole.weights,
        gemm1_weights=prepare_gemm1_weights(np.concatenate([up[:, own], gate[:, own]], axis=1)),
        gemm2_weights=prepare_gemm2_weights(np.ascontiguousarray(down[:, :, own])),
    )
    return replace(whole, weights=shard)


def check_layer(out: np.ndarray, expected: np.ndarray) -> None:
    """Compare the BF16 bits of the ranks' output with the whole layer, token by token.

    The parts, their sum, the whole row and the output are rounded to BF16, which makes 3.3e-3 of a
    token's norm; tensor cores add what they lose when they sum half as many FP8 products.
    """
    error = np.linalg.norm(decode_bf16(out) - expected, axis=1)
    assert (error <= 6e-3 * np.linalg.norm(expected, axis=1)).all(), error
