"""Fused mixture-of-experts operations.

Arrays of PyTorch, CuPy, NumPy or any other DLPack producer go in; results are arrays of the library
of ``hidden_states``. Arrays in host memory run the NumPy reference.

An operation reads its arguments and allocates at every call, and checks them unless a call of the
same form has passed; the function ``plan_...`` beside it does all of it once and returns a
`PlannedMoe` that only runs (FP8 only). The partitioned FP4 operation takes `MoePartitionResources`
and weights cut by `shard_prepared_moe_weights`.
"""

from cupy_moe.fused_moe.fp4 import (
    prims_ts_fp4_block_scale_moe,
    prims_ts_fp4_block_scale_moe_partitioned,
)
from cupy_moe.fused_moe.fp8 import (
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.fused_moe.planned import (
    PlannedMoe,
    plan_fp8_per_tensor_scale_moe,
    plan_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.partitions import MoePartitionResources
from cupy_moe.types import ActivationType, RoutingInputMode, RoutingMethodType, WeightLayout
from cupy_moe.weights.prepared import PreparedWeightLayout, prepared_weight_layouts
from cupy_moe.weights.shards import MoeShardedWeights, shard_prepared_moe_weights

__all__ = [
    "ActivationType",
    "MoePartitionResources",
    "MoeShardedWeights",
    "PlannedMoe",
    "PreparedWeightLayout",
    "RoutingInputMode",
    "RoutingMethodType",
    "WeightLayout",
    "plan_fp8_per_tensor_scale_moe",
    "plan_fp8_per_tensor_scale_routed_moe",
    "prepared_weight_layouts",
    "prims_ts_fp4_block_scale_moe",
    "prims_ts_fp4_block_scale_moe_partitioned",
    "shard_prepared_moe_weights",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
]
