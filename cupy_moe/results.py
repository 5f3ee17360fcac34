"""The arrays that a layer hands back."""

from __future__ import annotations

from typing import Any

from cupy_moe.problem import MoeOperands, MoeProblem, MoeResult

__all__ = ["allocate_result", "as_list", "owners"]


def allocate_result(problem: MoeProblem, operands: MoeOperands, capacity: int) -> MoeResult:
    """Make what a layer fills; arrays that the caller gave for it are taken as they are.

    Parameters
    ----------
    problem : MoeProblem
    operands : MoeOperands
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


def as_list(returned: Any) -> list[Any]:
    """Put what `owners` says into a list, if it is one array."""
    return returned if isinstance(returned, list) else [returned]
