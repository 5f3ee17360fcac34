"""Routing as the peers want it: rows of assignments, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.workloads import Ids, Workload

__all__ = ["Assignments", "aligned_order", "expert_order", "local_assignments"]


@dataclass(frozen=True, eq=False)
class Assignments:
    """Local (token, slot) pairs, in the order of the slots unless said otherwise.

    Attributes
    ----------
    tokens, experts : numpy.ndarray (R,), int32
        Of each pair; experts are counted on the rank.
    row_of_slot : numpy.ndarray (T, K), int32
        Index of the slot's pair, -1 if its expert is not local.
    """

    tokens: NDArray[np.int32]
    experts: NDArray[np.int32]
    row_of_slot: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        """Number R of pairs."""
        return self.tokens.size

    @property
    def is_every_slot(self) -> bool:
        """Whether every slot has a row."""
        return self.num_rows == self.row_of_slot.size


def local_assignments(workload: Workload, ids: Ids) -> Assignments:
    """List the pairs of a routing whose expert is local."""
    is_local = ids < workload.local_num_experts
    row_of_slot = np.full(ids.shape, -1, np.int32)
    row_of_slot[is_local] = np.arange(is_local.sum(), dtype=np.int32)
    return Assignments(np.nonzero(is_local)[0].astype(np.int32), ids[is_local], row_of_slot)


def aligned_order(
    experts: NDArray[np.int32], num_experts: int, block: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows by expert, every expert padded to whole blocks.

    Parameters
    ----------
    experts : numpy.ndarray (R,), int32
        Expert of each row.
    num_experts, block : int

    Returns
    -------
    rows : numpy.ndarray (P,), int32
        A multiple of ``block``; padding is R.
    block_experts : numpy.ndarray (P / block,), int32
        Expert of each block.
    """
    counts = np.bincount(experts, minlength=num_experts)
    blocks = -(-counts // block)
    padded_start = block * (np.cumsum(blocks) - blocks)
    start = np.cumsum(counts) - counts
    order = np.argsort(experts, kind="stable").astype(np.int32)
    of_row = experts[order]
    rows = np.full(block * int(blocks.sum()), experts.size, np.int32)
    rows[padded_start[of_row] + np.arange(experts.size) - start[of_row]] = order
    return rows, np.repeat(np.arange(num_experts, dtype=np.int32), blocks)


def expert_order(assigned: Assignments) -> Assignments:
    """Sort the pairs by expert; equal ones keep their order."""
    order = np.argsort(assigned.experts, kind="stable")
    position = np.empty(assigned.num_rows + 1, np.int32)
    position[order] = np.arange(assigned.num_rows, dtype=np.int32)
    position[-1] = -1  # of slots without a row
    return Assignments(
        assigned.tokens[order], assigned.experts[order], position[assigned.row_of_slot]
    )
