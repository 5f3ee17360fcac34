"""The finalize on arrays in host memory: every rank gathers all rows and computes the reference."""

from __future__ import annotations

import pickle

import numpy as np

from cupy_moe.codecs import decode_bf16
from cupy_moe.comm.groups import Group
from cupy_moe.comm.rules import OPERATION, FinalizeArrays, NormOptions
from cupy_moe.reference.finalize import tp_moe_finalize_rmsnorm
from cupy_moe.runtime.array_ref import HostArray
from cupy_moe.runtime.arrays import HOST, ArrayRef, to_numpy

__all__ = ["HostWorkspace"]


class HostWorkspace:
    """Stands for the memory of a group whose arrays are in host memory.

    Parameters
    ----------
    group : Group
        For example a `ThreadGroup`, which simulates the ranks in one process.
    hidden_size, top_k : int
    """

    device = HOST

    def __init__(self, group: Group, *, hidden_size: int, top_k: int) -> None:
        self.group, self.hidden_size, self.top_k = group, hidden_size, top_k

    def check(self) -> None:
        """Nothing can time out here without an error of its own."""

    def close(self) -> None:
        """Nothing is kept."""

    def run(self, arrays: FinalizeArrays, options: NormOptions) -> None:
        """Exchange rows and write the output; returns when it is written.

        Raises
        ------
        ValueError
            The ranks pass different numbers of tokens.
        """
        index = to_numpy(arrays.index).reshape(-1, self.top_k)
        own = (_bits(arrays.gemm2)[:, : self.hidden_size], index)
        gathered = [pickle.loads(data) for data in self.group.all_gather(pickle.dumps(own))]
        tokens = [len(idx) for _, idx in gathered]
        if len(set(tokens)) > 1:
            raise ValueError(
                f"{OPERATION}: every rank must pass the same number of tokens, got {tokens}."
            )
        weights = to_numpy(arrays.weights)
        if arrays.weights.dtype == "bfloat16":
            weights = decode_bf16(weights.view(np.uint16))
        _bits(arrays.output)[...] = tp_moe_finalize_rmsnorm(
            [rows for rows, _ in gathered],
            weights,
            [idx for _, idx in gathered],
            _bits(arrays.norm_weight),
            eps=options.eps,
            gain_center=options.gain_center,
            weight_before_norm=options.weight_before_norm,
        )


def _bits(ref: ArrayRef) -> HostArray:
    return to_numpy(ref).view(np.uint16)
