"""What a rank raises when the others do not come."""

from __future__ import annotations

__all__ = ["PeerTimeoutError"]


class PeerTimeoutError(RuntimeError):
    """A rank waited too long for another one and filled its output with NaN.

    The workspace stays unusable: close it on every rank and initialize again.

    Attributes
    ----------
    rank, peer : int
        Who waited for whom, within the group.
    call : int
        Number of the call on this rank, counted from 1 and, within a CUDA graph, when it was
        captured.
    num_tokens : int
        Of that call's launch.
    """

    def __init__(
        self, operation: str, rank: int, peer: int, call: int, num_tokens: int, timeout_s: float
    ) -> None:
        super().__init__(
            f"{operation}: rank {rank} waited {timeout_s:g} s for rank {peer} in call {call} "
            f"(T = {num_tokens}); output is filled with NaN. Every rank must make this call with "
            "the same T. Close the workspace on every rank and initialize again."
        )
        self.rank, self.peer, self.call, self.num_tokens = rank, peer, call, num_tokens
