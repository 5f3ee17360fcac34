"""The arrays that a layer hands back."""

from __future__ import annotations

from typing import Any, Protocol

from cupy_moe.problem import MoeProblem, MoeResult
from cupy_moe.runtime.arrays import ArrayRef

__all__ = ["allocate_result", "owners", "owners_list"]


class ResultOperands(Protocol):
    """What results are made from: `cupy_moe.problem.MoeOperands` or those of another operation."""

    @property
    def hidden_states(self) -> ArrayRef:
        """Array whose library and device the results have."""

    @property
    def topk_weights(self) -> ArrayRef | None:
        """Weights of the slots, if the caller gave them."""

    @property
    def output(self) -> ArrayRef | None:
        """The caller's output."""


def allocate_result(problem: MoeProblem, operands: ResultOperands, capacity: int) -> MoeResult:
    """Make what a layer fills; arrays that the caller gave for it are taken as they are.

    Parameters
    ----------
    problem : MoeProblem
    operands : ResultOperands
    capacity : int
        Rows of the permuted buffers.

    Returns
    -------
    MoeResult
        New arrays come from the library of ``hidden_states``.
    """
    like = operands.hidden_states
    empty, device = like.framework.empty, like.device
    if problem.do_finalize:
        output = operands.output
        if output is None:
            output = empty((problem.num_tokens, problem.hidden_size), "bfloat16", device)
        return MoeResult(output=output)
    weights = operands.topk_weights
    dtype = problem.expert_weights_dtype
    if weights is None or weights.dtype != dtype:
        weights = empty((problem.num_tokens, problem.top_k), dtype, device)
    return MoeResult(
        gemm2_output=empty((capacity, problem.hidden_size), "bfloat16", device),
        expert_weights=weights,
        expanded_idx_to_permuted_idx=empty((problem.num_slots,), "int32", device),
    )


def owners(result: MoeResult) -> Any:
    """Arrays to hand back, one or a list of three; the caller's own are the same objects."""
    if result.output is not None:
        return result.output.owner
    rows, weights = result.gemm2_output, result.expert_weights
    permutation = result.expanded_idx_to_permuted_idx
    assert rows is not None
    assert weights is not None
    assert permutation is not None
    return [rows.owner, weights.owner, permutation.owner]


def owners_list(result: MoeResult) -> list[Any]:
    """Like `owners`, for operations that hand back a list of one."""
    returned = owners(result)
    return returned if isinstance(returned, list) else [returned]
