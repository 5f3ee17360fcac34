"""Fused mixture-of-experts operations.

Arrays of PyTorch, CuPy, NumPy or any other DLPack producer go in; results are arrays of the library
of ``hidden_states``. Arrays in host memory run the NumPy reference.
"""

from cupy_moe.fused_moe.fp8 import (
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.types import ActivationType, RoutingMethodType, WeightLayout

__all__ = [
    "ActivationType",
    "RoutingMethodType",
    "WeightLayout",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
]
