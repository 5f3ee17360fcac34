"""Which scheme a batch takes, and where the receive buffers of every scheme lie; pure sizes."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_moe.kernels.finalize_rmsnorm import MAX_GROUPS, MAX_WARPS, FinalizeScheme

__all__ = [
    "Buffers",
    "SchemeLimits",
    "WorkspaceLayout",
    "choose_scheme",
    "default_limits",
    "peer_number",
]

GENERATIONS = 3
BF16_SENTINEL = 0x80008000  # two of -0.0
F32_SENTINEL = 0x80000000  # -0.0
ALIGNMENT = 256  # bytes; every buffer starts on its own


@dataclass(frozen=True, slots=True)
class SchemeLimits:
    """The most tokens of a call that a scheme is used for; `TokenOwner` takes larger ones.

    Attributes
    ----------
    every_rank : int
        One hop, but every row to every rank.
    expert_owner : int
        Two hops, with few rows for each rank to normalize.
    """

    every_rank: int
    expert_owner: int


# NOTE: at hidden size 4096 and top-8. Two ranks: measured on two H200, one hop is no slower up to
# eight tokens and ExpertOwner never the fastest. More ranks: not measured on as many GPUs, but
# estimated from ranks that share one, with the bytes' time on NVLink added.
_LIMITS = {
    1: SchemeLimits(1, 0),
    2: SchemeLimits(8, 0),
    4: SchemeLimits(2, 0),
    8: SchemeLimits(0, 1),
}


def default_limits(num_ranks: int) -> SchemeLimits:
    """Limits for a number of ranks."""
    return _LIMITS[num_ranks]


def choose_scheme(num_tokens: int, num_ranks: int, limits: SchemeLimits) -> FinalizeScheme:
    """Choose from the numbers of ranks and tokens only, so that all ranks choose alike."""
    if num_ranks == 1 or num_tokens <= limits.every_rank:
        return FinalizeScheme.EveryRank
    if num_tokens <= limits.expert_owner:
        return FinalizeScheme.ExpertOwner
    return FinalizeScheme.TokenOwner


def peer_number(sender: int, receiver: int) -> int:
    """Return the number of a rank among the others of a rank, in order of rank."""
    return sender if sender < receiver else sender - 1


@dataclass(frozen=True, slots=True)
class Buffers:
    """Receive buffers of one scheme; offsets in bytes from the start of the workspace.

    Attributes
    ----------
    capacity : int
        Tokens of a launch.
    rows_offset, rows_senders, rows_slots : int
        Expert rows, ``[3, rows_senders, rows_slots, reduced slots, hidden_size]`` BF16; each peer
        is a sender, see `peer_number`.
    row_group_bytes : int
        Of one token's rows from one sender.
    results_offset, results_senders, results_slots : int
        ``[3, results_senders, results_slots, hidden_size]``, BF16 from every peer, or FP32 from
        every rank.
    result_bytes : int
        Of one token's result from one sender.
    results_sentinel : int
    generations_offset : int
        ``[capacity, 64, 8]`` int32.
    end : int
    """

    capacity: int
    rows_offset: int
    rows_senders: int
    rows_slots: int
    row_group_bytes: int
    results_offset: int
    results_senders: int
    results_slots: int
    result_bytes: int
    results_sentinel: int
    generations_offset: int
    end: int

    @property
    def rows_sender_bytes(self) -> int:
        """Bytes of all tokens' rows from one sender."""
        return self.rows_slots * self.row_group_bytes

    @property
    def results_sender_bytes(self) -> int:
        """Bytes of all tokens' results from one sender."""
        return self.results_slots * self.result_bytes

    @property
    def rows_copy_bytes(self) -> int:
        """Bytes of one of the three copies of the rows."""
        return self.rows_senders * self.rows_sender_bytes

    @property
    def results_copy_bytes(self) -> int:
        """Bytes of one of the three copies of the results."""
        return self.results_senders * self.results_sender_bytes


@dataclass(frozen=True)
class WorkspaceLayout:
    """Sizes that a workspace is made for.

    Every rank has the same layout: a sender finds the buffers of a peer by its own offsets. Slots,
    and with them generations, belong to one scheme, so that schemes never wait for each other's
    counters.
    """

    num_ranks: int
    hidden_size: int
    top_k: int
    max_tokens: int
    limits: SchemeLimits

    @property
    def token_capacity(self) -> int:
        """Tokens of one launch: ``max_tokens``, as many for each owner."""
        return -(-self.max_tokens // self.num_ranks) * self.num_ranks

    def buffers(self) -> dict[FinalizeScheme, Buffers]:
        """Lay the schemes out one after another."""
        found, end = {}, 0
        for scheme in FinalizeScheme:
            found[scheme] = self._place(scheme, end)
            end = found[scheme].end
        return found

    @property
    def failed_offset(self) -> int:
        """Bytes to the word that says that a wait was given up."""
        return max(buffers.end for buffers in self.buffers().values())

    @property
    def num_bytes(self) -> int:
        """Size of the whole workspace."""
        return self.failed_offset + ALIGNMENT

    @property
    def staging_bytes(self) -> int:
        """Bytes of what one rank sends to all others in one hop, at most."""
        hops = [max(b.rows_sender_bytes, b.results_sender_bytes) for b in self.buffers().values()]
        return max(1, (self.num_ranks - 1) * max(hops))

    def fills(self) -> list[tuple[int, int, int]]:
        """Offset, number of words and word of all that is set before the first use."""
        fills = []
        for b in self.buffers().values():
            fills.append((b.rows_offset, (b.results_offset - b.rows_offset) // 4, BF16_SENTINEL))
            words = (b.generations_offset - b.results_offset) // 4
            fills.append((b.results_offset, words, b.results_sentinel))
            fills.append((b.generations_offset, (b.end - b.generations_offset) // 4, 0))
        fills.append((self.failed_offset, ALIGNMENT // 4, 0))
        return [fill for fill in fills if fill[1]]

    def _capacity(self, scheme: FinalizeScheme) -> int:
        if self.num_ranks == 1:
            return 0
        largest = {
            FinalizeScheme.EveryRank: self.limits.every_rank,
            FinalizeScheme.ExpertOwner: self.limits.expert_owner,
            FinalizeScheme.TokenOwner: self.token_capacity,
        }
        return largest[scheme]

    def _place(self, scheme: FinalizeScheme, start: int) -> Buffers:
        by_token = scheme is FinalizeScheme.TokenOwner
        by_expert = scheme is FinalizeScheme.ExpertOwner
        capacity, num_peers = self._capacity(scheme), self.num_ranks - 1
        slots = capacity // self.num_ranks if by_token else capacity
        reduced = -(-self.top_k // self.num_ranks) if by_expert else self.top_k
        row_group_bytes = reduced * self.hidden_size * 2
        results_slots = 0 if scheme is FinalizeScheme.EveryRank else slots
        result_bytes = self.hidden_size * (4 if by_expert else 2)
        num_senders = self.num_ranks if by_expert else num_peers

        results_offset = _align(start + GENERATIONS * num_peers * slots * row_group_bytes)
        generations_offset = _align(
            results_offset + GENERATIONS * num_senders * results_slots * result_bytes
        )
        return Buffers(
            capacity=capacity,
            rows_offset=start,
            rows_senders=num_peers,
            rows_slots=slots,
            row_group_bytes=row_group_bytes,
            results_offset=results_offset,
            results_senders=num_senders,
            results_slots=results_slots,
            result_bytes=result_bytes,
            results_sentinel=F32_SENTINEL if by_expert else BF16_SENTINEL,
            generations_offset=generations_offset,
            end=_align(generations_offset + capacity * MAX_WARPS * MAX_GROUPS * 4),
        )


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
