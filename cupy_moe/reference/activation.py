"""FC1 activations in float64 on raw accumulators.

``up`` and ``gate`` are the two halves of the FC1 sums; a non-gated activation gets its one half as
both. The output scale is not applied here: it belongs to the quantizer that follows. Limits, and
the additive constant of Swiglu, are in units of the raw accumulators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupy_moe.types import ActivationType

__all__ = [
    "FP4_ACTIVATIONS",
    "FP8_ACTIVATIONS",
    "NVFP4_ACTIVATIONS",
    "Activation",
    "ActivationScalars",
]

F64: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class ActivationScalars:
    """Scalars of one expert; None where the caller gave none.

    Attributes
    ----------
    gate_scale : float
        Dequantization factor of the raw sums inside the nonlinearity.
    alpha, beta : float or None
        Swiglu: slope of the sigmoid (default 1), constant added to up (default 0). Situ: saturation
        values of gate and up (default 1).
    limit : float or None
        Clamp of up on both sides and of gate from above.
    """

    gate_scale: float = 1.0
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None


Activation: TypeAlias = Callable[[F64, F64, ActivationScalars], F64]


def _sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def _silu(x: F64) -> F64:
    return x * _sigmoid(x)


def _gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1.0 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def _gelu_quick(x: F64) -> F64:
    return x * _sigmoid(1.702 * x)


def _clamp_above(x: F64, limit: float) -> F64:
    return np.where(x > limit, limit, x)  # NaN passes


def _clamp(x: F64, limit: float) -> F64:
    return np.where(x < -limit, -limit, _clamp_above(x, limit))


def _clamp_halves(up: F64, gate: F64, limit: float | None) -> tuple[F64, F64]:
    if limit is None:
        return up, gate
    return _clamp(up, limit), _clamp_above(gate, limit)


def _swiglu(up: F64, gate: F64, s: ActivationScalars) -> F64:
    up, gate = _clamp_halves(up, gate, s.limit)
    beta = 0.0 if s.beta is None else s.beta
    alpha = 1.0 if s.alpha is None else s.alpha
    gate = s.gate_scale * gate
    return (up + beta) * gate * _sigmoid(alpha * gate)


def _swiglu_step(up: F64, gate: F64, s: ActivationScalars) -> F64:
    with np.errstate(divide="ignore", invalid="ignore"):  # a gate scale of 0: nothing to limit
        limit = np.float64(7) / s.gate_scale if s.limit is None else s.limit
        most = limit * s.gate_scale
    capped = _clamp_above(_silu(s.gate_scale * gate), most)  # after the silu
    return _clamp(up, limit) * capped


def _situ(up: F64, gate: F64, s: ActivationScalars) -> F64:
    up, gate = _clamp_halves(up, gate, s.limit)
    beta = 1.0 if s.beta is None else s.beta
    alpha = 1.0 if s.alpha is None else s.alpha
    up, gate = s.gate_scale * up, s.gate_scale * gate
    return beta * np.tanh(up / beta) * alpha * np.tanh(gate / alpha) * _sigmoid(gate)


def _geglu_tanh(up: F64, gate: F64, s: ActivationScalars) -> F64:
    return up * _gelu_tanh(s.gate_scale * gate)


def _geglu_quick(up: F64, gate: F64, s: ActivationScalars) -> F64:
    return up * _gelu_quick(s.gate_scale * gate)


def _relu2(x: F64, _: F64, s: ActivationScalars) -> F64:
    return np.square(np.maximum(s.gate_scale * x, 0.0))


def _identity(x: F64, _: F64, __: ActivationScalars) -> F64:
    return x


def _silu_only(x: F64, _: F64, s: ActivationScalars) -> F64:
    return _silu(s.gate_scale * x)


# The two families read Geglu differently: tanh form of the GELU in FP8, quick-GELU in FP4.
FP8_ACTIVATIONS: Mapping[ActivationType, Activation] = MappingProxyType(
    {
        ActivationType.Swiglu: _swiglu,
        ActivationType.Geglu: _geglu_tanh,
        ActivationType.SwigluStep: _swiglu_step,
        ActivationType.Situ: _situ,
        ActivationType.Relu2: _relu2,
        ActivationType.Identity: _identity,
        ActivationType.Silu: _silu_only,
    }
)
"""Activations of the FP8 per-tensor operations."""

FP4_ACTIVATIONS: Mapping[ActivationType, Activation] = MappingProxyType(
    {
        ActivationType.Swiglu: _swiglu,
        ActivationType.Geglu: _geglu_quick,
        ActivationType.Situ: _situ,
    }
)
"""Activations of the FP4 block-scale operations."""

NVFP4_ACTIVATIONS: Mapping[ActivationType, Activation] = MappingProxyType(
    {**FP4_ACTIVATIONS, ActivationType.SwigluStep: _swiglu_step}
)
"""Those of the NVFP4 mode."""
