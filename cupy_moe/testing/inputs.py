"""Inputs made from a seed, as the keyword arguments of the operations.

Everything is plain data: a layer is made once with NumPy or, for large ones, CuPy; the arguments of
a call are a dictionary with the names of the public operation; :func:`to_library` moves them to the
array library under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupy_moe.codecs import encode_e4m3
from cupy_moe.formats import Array
from cupy_moe.runtime.arrays import CupyFramework, TorchFramework, to_xp
from cupy_moe.testing.compare import to_host
from cupy_moe.types import ActivationType, RoutingMethodType
from cupy_moe.weights import (
    Fp8ExpertWeights,
    pack_topk_ids,
    quantize_experts_fp8,
)

__all__ = [
    "INVALID_IDS",
    "ROUTING_PATTERNS",
    "Fp8Layer",
    "make_fp8_layer",
    "make_hidden_states",
    "make_topk",
    "move_arguments",
    "to_library",
]

Arguments: TypeAlias = dict[str, Any]
Module: TypeAlias = Any  # numpy or cupy
Topk: TypeAlias = Any  # array (T, K) of packed words, or tuple of ids and weights

# Hidden states are standard normal; the factor lets six standard deviations fit E4M3.
INPUT_SCALE = 448.0 / 6.0
# FC1 results of such inputs reach about 15; as much again is left before they saturate.
INTERMEDIATE_SCALE = 16.0


# --- array libraries --------------------------------------------------------------------------


def to_library(array: Array, library: str) -> Array:
    """Move an array of any library (``ml_dtypes`` too) to ``"numpy"``, ``"cupy"`` or ``"torch"``.

    The last two mean CUDA memory; CuPy arrays reach torch without a copy.
    """
    if library == "numpy":
        return to_host(array)
    view, _ = to_xp(array)
    on_device = CupyFramework().export(view)
    if library == "cupy":
        return on_device
    import torch

    return TorchFramework(torch).export(on_device)


def move_arguments(arguments: Mapping[str, Any], library: str) -> Arguments:
    """Apply :func:`to_library` to every array among the arguments of a call, tuples included."""

    def move(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(move(v) for v in value)
        return to_library(value, library) if hasattr(value, "dtype") else value

    return {name: move(value) for name, value in arguments.items()}


# --- a layer ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fp8Layer:
    """One rank's experts of an FP8 per-tensor MoE layer.

    Attributes
    ----------
    weights : Fp8ExpertWeights
        Prepared weights and scale vectors of the local experts.
    activation : ActivationType
    num_experts, local_expert_offset : int
        All experts of the layer, and the first local one.
    clamp_limit : array (EL,), float32, or None
    """

    weights: Fp8ExpertWeights
    activation: ActivationType
    num_experts: int
    local_expert_offset: int = 0
    clamp_limit: Array | None = None

    @property
    def local_num_experts(self) -> int:
        """Experts on this rank."""
        return int(self.weights.gemm2_weights.shape[0])

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states and of the output."""
        return int(self.weights.gemm2_weights.shape[1])

    @property
    def intermediate_size(self) -> int:
        """Columns of the FC1 output."""
        return int(self.weights.gemm2_weights.shape[2])

    def arguments(self, hidden_states: Array, topk: Topk, **options: object) -> Arguments:
        """Keyword arguments of ``trtllm_fp8_per_tensor_scale_routed_moe``.

        Parameters
        ----------
        hidden_states : array (T, H), float8_e4m3fn
        topk : array or tuple of two
            Packed words, or ids and weights.
        **options
            Further arguments, or other values for those set here.
        """
        ids = topk[0] if isinstance(topk, tuple) else topk
        return {"topk_ids": topk, **self._common(hidden_states, int(ids.shape[1])), **options}

    def logits_arguments(
        self, hidden_states: Array, routing_logits: Array, top_k: int, **options: object
    ) -> Arguments:
        """Keyword arguments of ``trtllm_fp8_per_tensor_scale_moe``."""
        common = self._common(hidden_states, top_k)
        return {"routing_logits": routing_logits, **common, **options}

    def _common(self, hidden_states: Array, top_k: int) -> Arguments:
        clamp = {} if self.clamp_limit is None else {"gemm1_clamp_limit": self.clamp_limit}
        return {
            "routing_bias": None,
            "hidden_states": hidden_states,
            **{name: getattr(self.weights, name) for name in self.weights.__dataclass_fields__},
            "num_experts": self.num_experts,
            "top_k": top_k,
            "n_group": None,
            "topk_group": None,
            "intermediate_size": self.intermediate_size,
            "local_expert_offset": self.local_expert_offset,
            "local_num_experts": self.local_num_experts,
            "routed_scaling_factor": None,
            "use_routing_scales_on_input": False,
            "routing_method_type": int(RoutingMethodType.Default),
            "activation_type": int(self.activation),
            **clamp,
        }


def make_fp8_layer(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    activation: ActivationType = ActivationType.Swiglu,
    local: tuple[int, int] | None = None,
    gains: Sequence[float] | None = None,
    clamp_limit: float | None = None,
    seed: int = 0,
    xp: Module = np,
) -> Fp8Layer:
    """Make a layer with random weights for standard normal hidden states.

    Parameters
    ----------
    hidden_size, intermediate_size, num_experts : int
    activation : ActivationType
    local : (offset, count), optional
        The experts of this rank; default: all of them.
    gains : sequence of float, optional
        Factor of the FC1 weights of each local expert: makes all its scales differ.
    clamp_limit : float, optional
        In physical units (SwigluStep).
    seed : int
    xp : module
        ``numpy`` or ``cupy``: where the weights are made, and live.
    """
    offset, count = local or (0, num_experts)
    gain = np.ones(count) if gains is None else np.asarray(gains, np.float64)
    rows = intermediate_size * (2 if activation.is_gated else 1)
    rng = xp.random.default_rng(seed)
    w1 = rng.standard_normal((count, rows, hidden_size), dtype=np.float32)
    w2 = rng.standard_normal((count, hidden_size, intermediate_size), dtype=np.float32)
    w1 *= xp.asarray(gain / np.sqrt(hidden_size), dtype=np.float32)[:, None, None]
    w2 *= np.float32(1 / np.sqrt(intermediate_size))
    weights = quantize_experts_fp8(
        w1,
        w2,
        activation_type=activation,
        input_scale=INPUT_SCALE,
        # The product of two halves grows with the square of the gain; a single tanh does not grow.
        intermediate_scale=xp.asarray(INTERMEDIATE_SCALE / gain**2, dtype=np.float32),
    )
    limit = None
    if clamp_limit is not None:  # the operation takes it in units of the raw sums
        limit = np.float32(clamp_limit) / weights.output1_scales_gate_scalar
    return Fp8Layer(weights, activation, num_experts, offset, limit)


def make_hidden_states(num_tokens: int, hidden_size: int, seed: int = 0, xp: Module = np) -> Array:
    """Quantize standard normal rows: (T, H), float8_e4m3fn."""
    x = xp.random.default_rng(seed).standard_normal((num_tokens, hidden_size), dtype=np.float32)
    return encode_e4m3(x * np.float32(INPUT_SCALE)).view(ml_dtypes.float8_e4m3fn)


# --- routing ----------------------------------------------------------------------------------

Rng = np.random.Generator
Ids = NDArray[np.int32]


def _uniform(keys: NDArray[np.float64]) -> NDArray[np.float64]:
    return keys


def _skewed(keys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expert e is wanted about twice as often as expert 2e."""
    return keys ** (1.0 + np.arange(keys.shape[1]))


def _one_expert(keys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every token wants the last expert."""
    keys[:, -1] = 2.0
    return keys


def _half_empty(keys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Nobody wants the experts with an odd id."""
    keys[:, 1::2] -= 2.0
    return keys


ROUTING_PATTERNS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "one_expert": _one_expert,
    "half_empty": _half_empty,
}
"""How the experts' random keys are bent before each token takes its ``top_k`` largest."""


def _all_rows(ids: Ids, _: int) -> Ids:
    return np.full_like(ids, -1)


def _half_the_rows(ids: Ids, _: int) -> Ids:
    ids[::2] = -1
    return ids


def _one_slot(ids: Ids, _: int) -> Ids:
    ids[ids.shape[0] // 2, -1] = -1
    return ids


def _num_experts(ids: Ids, num_experts: int) -> Ids:
    ids[::3, 0] = num_experts
    return ids


def _extremes(ids: Ids, num_experts: int) -> Ids:
    """Take ids that wrap around if they are cut to 16 bits or multiplied in 32."""
    bad = [np.iinfo(np.int32).min, np.iinfo(np.int32).max, 1 << 16, -(1 << 16), num_experts + 1]
    slots = ids.reshape(-1)[: ids.size - ids.size % 2 : 2]
    slots[:] = np.resize(np.array(bad, np.int32), slots.shape)
    return ids


INVALID_IDS: Mapping[str, Callable[[Ids, int], Ids]] = {
    "all_rows": _all_rows,
    "half_the_rows": _half_the_rows,
    "one_slot": _one_slot,
    "num_experts": _num_experts,
    "extremes": _extremes,
}
"""Ways to overwrite some of a batch's ids with ids of no expert (in place; also returned)."""


def make_topk(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    *,
    pattern: str = "uniform",
    invalid: str | None = None,
    dtype: str = "packed",
    seed: int = 0,
) -> Topk:
    """Make random routing decisions with distinct experts in every token.

    Parameters
    ----------
    num_tokens, top_k, num_experts : int
    pattern : str
        A key of :data:`ROUTING_PATTERNS`.
    invalid : str, optional
        A key of :data:`INVALID_IDS`. The weights of such slots become NaN.
    dtype : {"packed", "bfloat16", "float32"}
        Packed words, or a tuple of ids and weights of this dtype.
    seed : int

    Returns
    -------
    numpy.ndarray (T, K) int32, or tuple of ids (T, K) int32 and weights (T, K)
        About one weight in eight is negative.
    """
    rng = np.random.default_rng(seed)
    keys = ROUTING_PATTERNS[pattern](rng.random((num_tokens, num_experts)))
    ids = np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    ids = rng.permuted(ids, axis=1)
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32) / np.float32(np.sqrt(top_k))
    weights *= np.where(rng.random(ids.shape) < 0.125, -1, 1).astype(np.float32)
    if invalid is not None:
        valid = ids.copy()
        ids = INVALID_IDS[invalid](ids, num_experts)
        weights[ids != valid] = np.nan
    if dtype == "packed":
        return pack_topk_ids(ids, weights)
    return ids, weights.astype(getattr(ml_dtypes, dtype, dtype))
