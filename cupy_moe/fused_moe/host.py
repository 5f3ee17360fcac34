"""Runs checked calls on arrays in host memory with the reference, as `BoundLayer` does on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupy_moe.formats import decode_bf16, encode_bf16
from cupy_moe.plan import MoeOperands, MoeProblem, RoutingSource, max_token_tiles
from cupy_moe.reference.moe import DEFAULT_TILE, fp8_moe
from cupy_moe.reference.routing import decode_packed, select_experts
from cupy_moe.results import allocate_result
from cupy_moe.runtime.arrays import ArrayRef, to_numpy

__all__ = ["HostLayer"]


class HostLayer:
    """One layer on fixed arrays in host memory, like `cupy_moe.bound_layer.BoundLayer`.

    Parameters
    ----------
    problem : MoeProblem
        At least one token.
    operands : MoeOperands
        Checked arguments; ``enable_pdl`` and ``workspace_buffer`` have no effect here.

    Attributes
    ----------
    operands : MoeOperands
    result : MoeResult
        New arrays come from the library of ``hidden_states``.
    scratch_bytes : int
        0: scratch memory lives as long as a run.
    """

    __slots__ = ("_problem", "operands", "result", "scratch_bytes")

    def __init__(self, problem: MoeProblem, operands: MoeOperands) -> None:
        self._problem, self.operands = problem, operands
        tiles = max_token_tiles(problem.num_slots, problem.local_num_experts, DEFAULT_TILE)
        self.result = allocate_result(problem, operands, tiles * DEFAULT_TILE)
        self.scratch_bytes = 0

    def bind(self) -> None:
        """Nothing is to be loaded."""

    def enqueue(self) -> None:
        """Run the reference; the results are there on return."""
        problem, operands, result = self._problem, self.operands, self.result
        ids, weights = _routing(problem, operands)
        computed = _run(problem, operands, ids, weights)
        if isinstance(computed, np.ndarray):
            _fill(result.output, computed.view(ml_dtypes.bfloat16))
            return
        rows, expanded_to_permuted = computed
        _fill(result.gemm2_output, rows.view(ml_dtypes.bfloat16))
        _fill(result.expanded_idx_to_permuted_idx, expanded_to_permuted)
        if operands.topk_weights is None:
            _fill(result.expert_weights, encode_bf16(weights).view(ml_dtypes.bfloat16))


def _run(
    problem: MoeProblem,
    operands: MoeOperands,
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
) -> NDArray[np.uint16] | tuple[NDArray[np.uint16], NDArray[np.int32]]:
    limit = operands.clamp_limit
    return fp8_moe(
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


def _fill(ref: ArrayRef | None, values: NDArray[Any]) -> None:
    assert ref is not None
    to_numpy(ref)[...] = values
