"""How rows get from rank to rank: stores into mapped memory, or messages of NCCL."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from cupy_moe.comm.groups import Group
from cupy_moe.comm.layout import WorkspaceLayout, peer_number
from cupy_moe.kernels.finalize_rmsnorm import MAX_PEERS, FinalizeScheme, Phases
from cupy_moe.runtime.array_ref import Library
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.peer_memory import DeviceMemory, MemoryOffer, PeerMapping
from cupy_moe.runtime.requirements import import_cupy

__all__ = ["IpcTransport", "NcclTransport", "Step", "Transport"]

Addresses: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of the kernel, and what is enqueued behind it.

    Attributes
    ----------
    phases : Phases
    peers : tuple of int
        Addresses where the launch finds the workspaces of the other ranks, padded with zeros.
    copy : callable, optional
        Enqueues the messages that carry what the launch wrote; takes the stream.
    """

    phases: Phases
    peers: Addresses
    copy: Callable[[int], None] | None = None


class Transport(ABC):
    """A way between the ranks of a group.

    Attributes
    ----------
    name : str
    """

    name: str

    @abstractmethod
    def steps(self, scheme: FinalizeScheme, num_tokens: int) -> Sequence[Step]:
        """List the steps of one launch of so many tokens."""

    def abort(self) -> None:  # noqa: B027 (nothing waits without a limit)
        """End whatever waits for a peer without a limit; nothing can be exchanged afterwards."""


class IpcTransport(Transport):
    """One launch that stores into the peers' memory.

    Parameters
    ----------
    device : int
        CUDA ordinal of this rank.
    rank : int
    offers : sequence of MemoryOffer
        Of all ranks.
    resources : ExitStack
        Receives what undoes the mapping.

    Raises
    ------
    RuntimeError
        A peer's memory cannot be mapped.
    """

    name = "ipc"

    def __init__(
        self, device: int, rank: int, offers: Sequence[MemoryOffer], resources: ExitStack
    ) -> None:
        addresses = []
        for offer in [*offers[:rank], *offers[rank + 1 :]]:
            mapping = PeerMapping(device, offer)
            resources.callback(mapping.close)
            addresses.append(mapping.address)
        self._steps = (Step(Phases.All, _padded(addresses)),)

    def steps(self, scheme: FinalizeScheme, num_tokens: int) -> Sequence[Step]:
        """See `Transport.steps`."""
        return self._steps


class NcclTransport(Transport):
    """Launches that store into memory of their own, and messages that carry it into the buffers.

    The kernels are the same, and so are the bits of the results. Messages wait for the peers
    without a limit of time, until they are aborted.

    Parameters
    ----------
    group : Group
    device : int
        CUDA ordinal of this rank.
    address : int
        Of this rank's workspace.
    layout : WorkspaceLayout
    resources : ExitStack
        Receives what gives everything back.

    Raises
    ------
    RuntimeError
        NCCL is missing or cannot connect the ranks, or memory is.
    """

    name = "nccl"

    def __init__(
        self,
        group: Group,
        device: int,
        address: int,
        layout: WorkspaceLayout,
        resources: ExitStack,
    ) -> None:
        self._rank, self._size, self._device = group.rank, group.size, device
        self._address, self._buffers = address, layout.buffers()
        self._nccl = _import_nccl()
        self._communicator: Library = None
        self._staging = DeviceMemory(device, layout.staging_bytes)
        resources.callback(self._staging.free)

    def unique_id(self) -> bytes:
        """Name of a new communicator."""
        return pickle.dumps(self._nccl.get_unique_id())

    def connect(self, unique_id: bytes, resources: ExitStack) -> None:
        """Make the communicator that rank 0 has named; collective."""
        name = pickle.loads(unique_id)
        with device_guard(self._device):
            self._communicator = self._nccl.NcclCommunicator(self._size, name, self._rank)
        resources.callback(self.abort)

    def abort(self) -> None:
        """See `Transport.abort`.

        Also ends a communicator that is idle: destroying one can wait for peers.
        """
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def steps(self, scheme: FinalizeScheme, num_tokens: int) -> Sequence[Step]:
        """See `Transport.steps`."""
        b = self._buffers[scheme]
        owned = [self._tokens_of(rank, scheme, num_tokens) for rank in range(self._size)]
        own = [owned[self._rank]] * self._size
        rows = b.rows_offset, b.rows_slots, b.row_group_bytes
        send = self._step(Phases.Send, rows, owned, own, by_rank=False)
        if scheme is FinalizeScheme.EveryRank:
            return (send, Step(Phases.Reduce, _padded(())))
        results = b.results_offset, b.results_slots, b.result_bytes
        by_expert = scheme is FinalizeScheme.ExpertOwner
        reduce = self._step(Phases.Reduce, results, own, owned, by_rank=by_expert)
        return (send, reduce, Step(Phases.Receive, _padded(())))

    def _step(
        self,
        phases: Phases,
        buffer: tuple[int, int, int],
        sent: Sequence[int],
        received: Sequence[int],
        *,
        by_rank: bool,
    ) -> Step:
        """Launch into the staging memory, and one message to and from each peer.

        Parameters
        ----------
        phases : Phases
        buffer : tuple of int
            Offset of the first sender's buffer in a workspace, its slots, bytes of a slot.
        sent, received : sequence of int
            Slots to and from each rank.
        by_rank : bool
            Whether this rank has a buffer as well; else peers are numbered without the receiver.
        """
        offset, num_slots, slot_bytes = buffer
        size = num_slots * slot_bytes
        messages = [
            _Message(
                rank,
                self._staging.address + number * size,
                sent[rank] * slot_bytes,
                self._address + offset + (rank if by_rank else number) * size,
                received[rank] * slot_bytes,
            )
            for number, rank in enumerate(self._peers)
        ]
        staged = self._staged(offset, size, by_rank=by_rank)
        return Step(phases, staged, partial(self._exchange, messages))

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _tokens_of(self, rank: int, scheme: FinalizeScheme, num_tokens: int) -> int:
        """How many tokens a rank reduces."""
        if scheme is not FinalizeScheme.TokenOwner:
            return num_tokens
        return len(range(rank, num_tokens, self._size))

    def _staged(self, offset: int, size: int, *, by_rank: bool) -> Addresses:
        """Workspaces that have their buffer for this rank's data in the staging memory."""
        addresses = []
        for number, receiver in enumerate(self._peers):
            sender = self._rank if by_rank else peer_number(self._rank, receiver)
            addresses.append(self._staging.address + number * size - offset - sender * size)
        return _padded(addresses)

    def _exchange(self, messages: Sequence[_Message], stream: int) -> None:
        communicator, uint8 = self._communicator, self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for m in messages:
            if m.send_bytes:
                communicator.send(m.staged, m.send_bytes, uint8, m.rank, stream)
            if m.receive_bytes:
                communicator.recv(m.received, m.receive_bytes, uint8, m.rank, stream)
        self._nccl.groupEnd()


@dataclass(frozen=True, slots=True)
class _Message:
    """What goes to a rank and what comes from it: addresses and bytes."""

    rank: int
    staged: int
    send_bytes: int
    received: int
    receive_bytes: int


def _padded(addresses: Sequence[int]) -> Addresses:
    return (*addresses, *[0] * (MAX_PEERS - len(addresses)))


def _import_nccl() -> Library:
    import_cupy()
    from cupy.cuda import nccl

    if not nccl.available:
        raise RuntimeError('NCCL is not installed: pip install "nvidia-nccl-cu13>=2.27"')
    return nccl
