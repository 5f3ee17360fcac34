"""The finalize on arrays in host memory: every rank gathers all rows and computes the reference."""

from __future__ import annotations

import pickle

import numpy as np

from cupy_moe.codecs import decode_bf16
from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.groups import Group
from cupy_moe.comm.rules import OPERATION, FinalizeArrays, NormOptions
from cupy_moe.reference.finalize import tp_moe_finalize_rmsnorm
from cupy_moe.runtime.array_ref import HostArray
from cupy_moe.runtime.arrays import HOST, ArrayRef, to_numpy

__all__ = ["HostWorkspace"]

_NAN = 0x7FC0  # of BF16


class HostWorkspace:
    """Stands for the memory of a group whose arrays are in host memory.

    Parameters
    ----------
    group : Group
        For example a `ThreadGroup`, which simulates the ranks in one process.
    hidden_size, top_k : int
    timeout_s : float
        The longest that a call waits for other ranks, in seconds, if the group can tell.
    """

    device = HOST

    def __init__(
        self, group: Group, *, hidden_size: int, top_k: int, timeout_s: float = 30.0
    ) -> None:
        self.group, self.hidden_size, self.top_k = group, hidden_size, top_k
        self.timeout_s = timeout_s
        self._num_calls = 0
        self._failure: PeerTimeoutError | None = None

    def check(self) -> None:
        """Raise again what a call has raised that waited too long.

        Raises
        ------
        PeerTimeoutError
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Nothing is kept."""

    def run(self, arrays: FinalizeArrays, options: NormOptions) -> None:
        """Exchange rows and write the output; returns when it is written.

        Raises
        ------
        ValueError
            The ranks pass different numbers of tokens.
        PeerTimeoutError
            A rank has not come in this call or an earlier one. The output is NaN.
        """
        self.check()
        index = to_numpy(arrays.index).reshape(-1, self.top_k)
        own = (_bits(arrays.gemm2)[:, : self.hidden_size], index)
        gathered = [pickle.loads(data) for data in self._gather(arrays, pickle.dumps(own))]
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

    def _gather(self, arrays: FinalizeArrays, own: bytes) -> list[bytes]:
        """Exchange bytes after waiting for all ranks as long as a launch would."""
        self._num_calls += 1
        try:
            self.group.rendezvous(self.timeout_s)
        except TimeoutError as error:
            raise self._give_up(arrays) from error
        try:
            return self.group.all_gather(own)
        except Exception as error:  # of whatever library the group is: a rank has given up
            raise self._give_up(arrays) from error

    def _give_up(self, arrays: FinalizeArrays) -> PeerTimeoutError:
        _bits(arrays.output)[...] = _NAN
        call, tokens = self._num_calls, arrays.num_tokens
        self._failure = PeerTimeoutError(
            OPERATION, self.group.rank, None, call, tokens, self.timeout_s
        )
        return self._failure


def _bits(ref: ArrayRef) -> HostArray:
    return to_numpy(ref).view(np.uint16)
