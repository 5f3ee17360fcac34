"""Fused mixture-of-experts layers for NVIDIA GPUs, and their NumPy reference.

Submodules are imported at first use. Importing the package needs no GPU, neither CuPy nor PyTorch,
and creates no CUDA context.

Submodules
----------
fused_moe
    The operations.
comm
    The tensor-parallel finalize, between ranks.
weights
    From a model's weights to the arguments of an operation.
reference
    The same operations, stage by stage, in NumPy.
runtime
    Streams of parts of a GPU, devices, kernels.
testing
    Comparison of results, and inputs made from a seed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupy_moe import comm, fused_moe, reference, runtime, testing, weights
    from cupy_moe.types import ActivationType, RoutingMethodType, WeightLayout

__all__ = [
    "ActivationType",
    "RoutingMethodType",
    "WeightLayout",
    "comm",
    "fused_moe",
    "reference",
    "runtime",
    "testing",
    "weights",
]

__version__ = "0.1.0"

_ENUMERATIONS = ("ActivationType", "RoutingMethodType", "WeightLayout")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _ENUMERATIONS:
        value = getattr(import_module(f"{__name__}.types"), name)
    else:
        value = import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
