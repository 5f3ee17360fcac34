"""What a rank raises when the others do not come."""

from __future__ import annotations

from cupy_moe.runtime.errors import PortableError

__all__ = ["PeerTimeoutError"]


class PeerTimeoutError(PortableError):
    """A rank waited too long for another one; what it could not finish of its output is NaN.

    The workspace stays unusable: close it on every rank and initialize again.

    Attributes
    ----------
    rank : int
        Who waited, within the group.
    peer : int or None
        For whom; None if that is not known.
    call : int
        Number of the call on this rank, counted from 1 and, within a CUDA graph, when it was
        captured.
    num_tokens : int
        Of that call's launch.
    """

    def __init__(
        self,
        operation: str,
        rank: int,
        peer: int | None,
        call: int,
        num_tokens: int,
        timeout_s: float,
    ) -> None:
        whom = "another rank" if peer is None else f"rank {peer}"
        super().__init__(
            f"{operation}: rank {rank} waited {timeout_s:g} s for {whom} in call {call} "
            f"(T = {num_tokens}); what it could not finish of the output is NaN. Every rank must "
            "make this call with the same T. Close the workspace on every rank and initialize "
            "again."
        )
        self.rank, self.peer, self.call, self.num_tokens = rank, peer, call, num_tokens
