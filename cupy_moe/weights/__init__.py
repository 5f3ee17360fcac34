"""Preparation of weights and routing words for the operations.

`quantize` takes a model's expert weights all the way to the arguments of an operation and
`checkpoints` those that are FP4 already, `activations` does the hidden states, `calibrate` chooses
the one factor that depends on data, `layouts` has the single steps and their inverses, `shards`
cuts prepared weights in two for partitioned layers, and `topk` packs routing decisions.
"""

from cupy_moe.formats import fp8_quantize, mxfp4_quantize, mxfp8_quantize, nvfp4_quantize
from cupy_moe.weights.activations import (
    quantize_activations_fp8,
    quantize_activations_mxfp8,
    quantize_activations_nvfp4,
)
from cupy_moe.weights.calibrate import calibrate_intermediate_scale
from cupy_moe.weights.checkpoints import (
    Nvfp4Projection,
    experts_from_gpt_oss,
    experts_from_nvfp4,
)
from cupy_moe.weights.layouts import (
    from_block_major_k,
    gemm1_row_order,
    gemm2_row_order,
    interleave_gated,
    prepare_gemm1_scales,
    prepare_gemm1_weights,
    prepare_gemm2_scales,
    prepare_gemm2_weights,
    shuffle_rows,
    swizzle_scales_r128c4,
    to_block_major_k,
    uninterleave_gated,
    unprepare_gemm1_scales,
    unprepare_gemm1_weights,
    unprepare_gemm2_scales,
    unprepare_gemm2_weights,
    unshuffle_rows,
    unswizzle_scales_r128c4,
)
from cupy_moe.weights.prepared import PreparedWeightLayout, prepared_weight_layouts
from cupy_moe.weights.quantize import (
    Fp4ExpertWeights,
    Fp8ExpertWeights,
    physical_to_raw,
    quantize_experts_fp8,
    quantize_experts_mxfp4,
    quantize_experts_nvfp4,
    stack_projections,
)
from cupy_moe.weights.shards import MoeShardedWeights, shard_prepared_moe_weights
from cupy_moe.weights.topk import pack_topk_ids, unpack_topk_ids

__all__ = [
    "Fp4ExpertWeights",
    "Fp8ExpertWeights",
    "MoeShardedWeights",
    "Nvfp4Projection",
    "PreparedWeightLayout",
    "calibrate_intermediate_scale",
    "experts_from_gpt_oss",
    "experts_from_nvfp4",
    "fp8_quantize",
    "from_block_major_k",
    "gemm1_row_order",
    "gemm2_row_order",
    "interleave_gated",
    "mxfp4_quantize",
    "mxfp8_quantize",
    "nvfp4_quantize",
    "pack_topk_ids",
    "physical_to_raw",
    "prepare_gemm1_scales",
    "prepare_gemm1_weights",
    "prepare_gemm2_scales",
    "prepare_gemm2_weights",
    "prepared_weight_layouts",
    "quantize_activations_fp8",
    "quantize_activations_mxfp8",
    "quantize_activations_nvfp4",
    "quantize_experts_fp8",
    "quantize_experts_mxfp4",
    "quantize_experts_nvfp4",
    "shard_prepared_moe_weights",
    "shuffle_rows",
    "stack_projections",
    "swizzle_scales_r128c4",
    "to_block_major_k",
    "uninterleave_gated",
    "unpack_topk_ids",
    "unprepare_gemm1_scales",
    "unprepare_gemm1_weights",
    "unprepare_gemm2_scales",
    "unprepare_gemm2_weights",
    "unshuffle_rows",
    "unswizzle_scales_r128c4",
]
