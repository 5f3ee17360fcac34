"""The two GEMMs of a layer as launches: one per matrix and partition."""

from __future__ import annotations

from cupy_moe.kernels.gemm_tiles import GemmStage, MainloopKind
from cupy_moe.kernels.grouped_gemm import GemmConfig, bind_grouped_gemm, default_alpha_beta
from cupy_moe.plan import GemmPart, MoePlan
from cupy_moe.problem import MoeProblem
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.launch import BoundLaunch
from cupy_moe.runtime.tensor_map import NO_TENSOR_MAP, Swizzle, encode_tensor_map
from cupy_moe.stage_inputs import StageInputs
from cupy_moe.types import MoeFormat

__all__ = ["bind_fc1", "bind_fc2"]

_WHOLE_ROWS = 30  # as a shift: a block of K that no row is longer than
_TOKEN_ROW_BYTES = 128  # of a box
_FP4_BOX_BYTES = 64  # of a row of codes in a box: 128 of K, and no block of K is shorter


def _weight_map(
    device: int, config: GemmConfig, weights: int, experts: int, part: GemmPart, block: int
) -> bytes:
    """Map of [experts, K / block, rows, block] weights: boxes of tile_m rows.

    E4M3 is cut into blocks of a step of K, FP4 only where its layout is BlockMajorK.
    """
    if config.mainloop_kind is not MainloopKind.Wgmma:
        return NO_TENSOR_MAP
    if config.moe_format.has_block_scales:
        row_bytes = part.k // 2
        block, swizzle = block or row_bytes, Swizzle.NONE
        pitch, block_pitch = block, block * part.rows
        box_bytes = _FP4_BOX_BYTES
    else:
        row_bytes, block, swizzle = part.k, config.tile_k, Swizzle.BYTES_128
        pitch, block_pitch, box_bytes = row_bytes, block, block
    shape = (block, part.rows, row_bytes // block, experts)
    strides = (pitch, block_pitch, row_bytes * part.rows)
    with device_guard(device):
        return encode_tensor_map(weights, shape, strides, (box_bytes, config.tile_m, 1, 1), swizzle)


def _tile_counter(plan: MoePlan, config: GemmConfig, scratch: dict[str, int], part: int) -> int:
    """Address of a GEMM's counter: behind the number of token tiles, FC1's and FC2's of a part."""
    if not plan.take_tiles:
        return 0
    return scratch["schedule"] + 4 * (1 + len(GemmStage) * part + config.gemm_stage.value)


def _token_map(
    device: int, config: GemmConfig, address: int, rows: int, row_bytes: int, pitch: int
) -> bytes:
    """Map of [row_bytes / 128, rows, 128] of token rows that are not gathered."""
    if config.mainloop_kind is not MainloopKind.Wgmma or config.gather_tokens:
        return NO_TENSOR_MAP
    shape = (_TOKEN_ROW_BYTES, rows, row_bytes // _TOKEN_ROW_BYTES)
    box = (_TOKEN_ROW_BYTES, config.token_box, config.token_box_windows)
    with device_guard(device):
        return encode_tensor_map(address, shape, (pitch, _TOKEN_ROW_BYTES), box)


def _shared_params(
    layer: StageInputs, config: GemmConfig, part: int
) -> dict[str, int | float | bytes]:
    """Fields that do not depend on the matrix."""
    problem, plan, scratch = layer.problem, layer.plan, layer.scratch
    block, packed = problem.weight_block_bytes, layer.is_packed
    alpha, beta = default_alpha_beta(problem.activation)
    return {
        "permuted_to_expanded": scratch.get("permuted_to_expanded", 0),
        "tile_info": scratch.get("tile_info", 0),
        "num_n_tiles": scratch.get("schedule", 0),
        "tile_counter": _tile_counter(plan, config, scratch, part),
        "topk_ids": layer.topk_ids,
        "expert_weights": layer.expert_weights if packed else 0,
        "expanded_to_permuted": layer.expanded_to_permuted,
        "num_slots": problem.num_slots,
        "packed_ids": packed,
        "local_num_experts": problem.local_num_experts,
        "local_expert_offset": problem.local_expert_offset,
        "weight_block_shift": block.bit_length() - 1 if block else _WHOLE_ROWS,
        "top_k": problem.top_k,
        "token_scales_are_f32": layer.weights_are_f32,
        "stream_weights": plan.stream_weights,
        "default_alpha": alpha,
        "default_beta": beta,
    }


def _uses_scalars(problem: MoeProblem) -> bool:
    """Whether the scale vectors of the outputs have a meaning."""
    return problem.moe_format in (MoeFormat.Fp8, MoeFormat.Nvfp4)


def _element_bytes(problem: MoeProblem) -> int:
    """Bytes of a token's element: E4M3, or BF16 beside FP4 weights."""
    return 2 if problem.moe_format.has_block_scales else 1


def bind_fc1(layer: StageInputs, index: int, stream: int) -> BoundLaunch:
    """Bind FC1 with the activation, or what partition ``index`` computes of it."""
    problem, plan, device, at = layer.problem, layer.plan, layer.device, layer.at
    part, weights = plan.fc1_parts[index], at.gemm1_weights[index]
    experts, element = problem.local_num_experts, _element_bytes(problem)
    pitch, block = element * problem.hidden_size, problem.weight_block_bytes
    scaled = _uses_scalars(problem)
    return bind_grouped_gemm(
        layer.functions.fc1,
        plan.fc1,
        part.grid,
        stream=stream,
        pdl=layer.pdl,
        **_shared_params(layer, plan.fc1, index),
        token_map=_token_map(
            device, plan.fc1, layer.tokens, plan.capacity, element * part.k, pitch
        ),
        weight_map=_weight_map(device, plan.fc1, weights, experts, part, block),
        weights=weights,
        weight_scales=at.gemm1_scales[index],
        tokens=layer.tokens,
        output_scales=at.output1_scales if scaled else 0,
        gate_scales=at.output1_gate_scales if scaled else 0,
        clamp_limits=at.clamp_limit,
        alphas=at.alpha,
        betas=at.beta,
        token_scales=layer.expert_weights if problem.scale_input else 0,
        output=layer.scratch["intermediate"],
        first_feature=part.first_feature,
        m=part.rows,
        k=part.k,
        token_pitch=pitch,
        output_pitch=element * problem.intermediate_size,
        prefetch_steps=plan.prefetch_steps,
    )


def bind_fc2(layer: StageInputs, index: int, stream: int) -> BoundLaunch:
    """Bind FC2, or what partition ``index`` computes of it."""
    problem, plan, device, at = layer.problem, layer.plan, layer.device, layer.at
    part, weights = plan.fc2_parts[index], at.gemm2_weights[index]
    experts, element = problem.local_num_experts, _element_bytes(problem)
    pitch, block = element * problem.intermediate_size, problem.weight_block_bytes
    tokens = layer.scratch["intermediate"] + part.token_offset
    output = layer.scratch[part.output_buffer] if part.output_buffer else layer.gemm2_output
    return bind_grouped_gemm(
        layer.functions.fc2,
        plan.fc2,
        part.grid,
        stream=stream,
        pdl=layer.pdl,
        **_shared_params(layer, plan.fc2, index),
        token_map=_token_map(device, plan.fc2, tokens, plan.capacity, element * part.k, pitch),
        weight_map=_weight_map(device, plan.fc2, weights, experts, part, block),
        weights=weights,
        weight_scales=at.gemm2_scales[index],
        tokens=tokens,
        output_scales=at.output2_scales if _uses_scalars(problem) else 0,
        gate_scales=0,
        clamp_limits=0,
        alphas=0,
        betas=0,
        token_scales=0,
        output=output,
        first_feature=part.first_feature,
        m=part.rows,
        k=part.k,
        token_pitch=pitch,
        output_pitch=2 * problem.hidden_size,
        prefetch_steps=0,
    )
