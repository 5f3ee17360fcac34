"""Runs checked calls on arrays in host memory with the reference, as `BoundLayer` does on a GPU."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupy_moe.formats import decode_bf16, encode_bf16
from cupy_moe.plan import max_token_tiles
from cupy_moe.problem import MoeOperands, MoeProblem, RoutingSource
from cupy_moe.reference.moe import DEFAULT_TILE, Mode, fp4_moe, fp8_moe
from cupy_moe.reference.routing import decode_packed, select_experts
from cupy_moe.results import allocate_result
from cupy_moe.runtime.arrays import ArrayRef, to_numpy
from cupy_moe.types import MoeFormat

__all__ = ["HostLayer"]

I32: TypeAlias = NDArray[np.int32]
F32: TypeAlias = NDArray[np.float32]
Computed: TypeAlias = "NDArray[np.uint16] | tuple[NDArray[np.uint16], I32]"

_MODES: dict[MoeFormat, Mode] = {
    MoeFormat.Nvfp4: "nvfp4",
    MoeFormat.Mxfp8: "mxfp8",
    MoeFormat.Bf16: "bf16",
}


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
        self._problem = problem
        self.operands = operands
        tiles = max_token_tiles(problem.num_slots, problem.local_num_experts, DEFAULT_TILE)
        self.result = allocate_result(problem, operands, tiles * DEFAULT_TILE)
        self.scratch_bytes = 0

    def prepare(self) -> None:
        """Nothing is to be loaded."""

    def enqueue(self) -> None:
        """Run the reference; the results are there on return."""
        problem, operands, result = self._problem, self.operands, self.result
        ids, weights = _routing(problem, operands)
        compute = _fp4 if problem.moe_format.has_block_scales else _fp8
        computed = compute(problem, operands, ids, weights)
        if isinstance(computed, np.ndarray):
            _fill(result.output, computed.view(ml_dtypes.bfloat16))
            return
        rows, expanded_to_permuted = computed
        _fill(result.gemm2_output, rows.view(ml_dtypes.bfloat16))
        _fill(result.expanded_idx_to_permuted_idx, expanded_to_permuted)
        if result.expert_weights is not operands.topk_weights:
            _fill(result.expert_weights, encode_bf16(weights).view(ml_dtypes.bfloat16))


def _fp8(problem: MoeProblem, o: MoeOperands, ids: I32, weights: F32) -> Computed:
    """Output, or rows and their map."""
    return fp8_moe(
        _raw(o.hidden_states),
        _raw(o.gemm1_weights[0]),
        _raw(o.gemm2_weights[0]),
        to_numpy(o.output1_scales),
        to_numpy(o.output1_gate_scales),
        to_numpy(o.output2_scales),
        ids,
        weights,
        activation=problem.activation,
        num_experts=problem.num_experts,
        local_expert_offset=problem.local_expert_offset,
        clamp_limit=_optional(o.clamp_limit),
        scale_input=problem.scale_input,
        do_finalize=problem.do_finalize,
    )


def _fp4(problem: MoeProblem, o: MoeOperands, ids: I32, weights: F32) -> Computed:
    """As `_fp8`; partitions are computed one after the other."""
    return fp4_moe(
        _raw(o.hidden_states),
        None if o.hidden_states_scale is None else _raw(o.hidden_states_scale),
        _raws(o.gemm1_weights),
        _raws(o.gemm1_scales),
        _raws(o.gemm2_weights),
        _raws(o.gemm2_scales),
        to_numpy(o.output1_scales),
        to_numpy(o.output1_gate_scales),
        to_numpy(o.output2_scales),
        ids,
        weights,
        mode=_MODES[problem.moe_format],
        activation=problem.activation,
        num_experts=problem.num_experts,
        local_expert_offset=problem.local_expert_offset,
        strategy=problem.strategy or "tp_n_tp_n",  # without partitions there is nothing to choose
        alpha=_optional(o.alpha),
        beta=_optional(o.beta),
        clamp_limit=_optional(o.clamp_limit),
        do_finalize=problem.do_finalize,
    )


def _routing(problem: MoeProblem, operands: MoeOperands) -> tuple[I32, F32]:
    """Global expert ids and FP32 weights (BF16 ones widened) of every slot, both (T, K)."""
    if problem.routing_source is RoutingSource.Logits:
        return _select(problem, operands)
    assert operands.topk_ids is not None
    ids = to_numpy(operands.topk_ids)
    if problem.routing_source is RoutingSource.Packed:
        return decode_packed(ids)
    assert operands.topk_weights is not None
    return ids, _as_f32(operands.topk_weights)


def _select(problem: MoeProblem, operands: MoeOperands) -> tuple[I32, F32]:
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


def _raw(ref: ArrayRef) -> NDArray[Any]:
    """Codes as unsigned integers of their width."""
    return to_numpy(ref).view(np.dtype(f"u{ref.itemsize}"))


def _raws(refs: tuple[ArrayRef, ...]) -> list[NDArray[Any]]:
    return [_raw(ref) for ref in refs]


def _optional(ref: ArrayRef | None) -> NDArray[Any] | None:
    return None if ref is None else to_numpy(ref)


def _as_f32(ref: ArrayRef) -> F32:
    array = to_numpy(ref)
    widened: F32 = decode_bf16(array.view(np.uint16)) if ref.dtype == "bfloat16" else array
    return widened


def _fill(ref: ArrayRef | None, values: NDArray[Any]) -> None:
    assert ref is not None
    to_numpy(ref)[...] = values
