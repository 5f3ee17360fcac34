"""Runs checked calls on arrays in host memory with the reference, as the pipeline does on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupy_moe.formats import decode_bf16, encode_bf16
from cupy_moe.plan import MoeOperands, MoeProblem, MoeResult, RoutingSource
from cupy_moe.reference.moe import fp8_moe
from cupy_moe.reference.routing import decode_packed, select_experts
from cupy_moe.runtime.arrays import HOST, ArrayRef, to_numpy

__all__ = ["run_moe"]


def run_moe(problem: MoeProblem, operands: MoeOperands) -> MoeResult:
    """Run a call whose arrays are all in host memory.

    Parameters
    ----------
    problem : MoeProblem
        At least one token.
    operands : MoeOperands
        Checked arguments; ``enable_pdl`` and ``workspace_buffer`` have no effect here.

    Returns
    -------
    MoeResult
        New arrays come from the library of ``hidden_states``.
    """
    ids, weights = _routing(problem, operands)
    limit = operands.clamp_limit
    result = fp8_moe(
        _raw(operands.hidden_states),
        _raw(operands.gemm1_weights),
        _raw(operands.gemm2_weights),
        to_numpy(operands.output1_scales),
        to_numpy(operands.output1_gate_scales),
        to_numpy(operands.output2_scales),
        ids,
        weights,
        activation=problem.activation,
        num_experts=problem.num_experts,
        local_expert_offset=problem.local_expert_offset,
        clamp_limit=None if limit is None else to_numpy(limit),
        scale_input=problem.scale_input,
        do_finalize=problem.do_finalize,
    )
    like = operands.hidden_states
    if isinstance(result, np.ndarray):
        return MoeResult(output=_bf16_array(result, like, operands.output))
    rows, expanded_to_permuted = result
    return MoeResult(
        gemm2_output=_bf16_array(rows, like),
        expert_weights=operands.topk_weights or _bf16_array(encode_bf16(weights), like),
        expanded_idx_to_permuted_idx=_int32_array(expanded_to_permuted, like),
    )


def _routing(
    problem: MoeProblem, operands: MoeOperands
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Global expert ids and FP32 weights (BF16 ones widened) of every slot, both (T, K)."""
    if problem.routing_source is RoutingSource.Logits:
        return _select(problem, operands)
    assert operands.topk_ids is not None
    ids = to_numpy(operands.topk_ids)
    if problem.routing_source is RoutingSource.Packed:
        return decode_packed(ids)
    assert operands.topk_weights is not None
    return ids, _as_f32(operands.topk_weights)


def _select(
    problem: MoeProblem, operands: MoeOperands
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    assert operands.routing_logits is not None
    bias, replay = operands.routing_bias, operands.routing_replay_out
    ids, weights = select_experts(
        _as_f32(operands.routing_logits),
        None if bias is None else _as_f32(bias),
        method=problem.routing_method,
        top_k=problem.top_k,
        n_group=problem.num_groups,
        topk_group=problem.topk_group,
        routed_scaling_factor=operands.routed_scaling_factor,
        norm_topk_prob=problem.norm_topk_prob,
    )
    if replay is not None:
        to_numpy(replay)[: problem.num_tokens] = ids
    return ids, weights


def _raw(ref: ArrayRef) -> NDArray[np.uint8]:
    return to_numpy(ref).view(np.uint8)


def _as_f32(ref: ArrayRef) -> NDArray[np.float32]:
    array = to_numpy(ref)
    widened: NDArray[np.float32] = (
        decode_bf16(array.view(np.uint16)) if ref.dtype == "bfloat16" else array
    )
    return widened


def _bf16_array(bits: NDArray[np.uint16], like: ArrayRef, out: ArrayRef | None = None) -> ArrayRef:
    """BF16 array of the library of ``like`` holding ``bits``; ``out`` if given."""
    ref = out or like.framework.empty(bits.shape, "bfloat16", HOST)
    to_numpy(ref)[...] = bits.view(ml_dtypes.bfloat16)
    return ref


def _int32_array(values: NDArray[Any], like: ArrayRef) -> ArrayRef:
    ref = like.framework.empty(values.shape, "int32", HOST)
    to_numpy(ref)[...] = values
    return ref
