"""Symmetric receive buffers of a group, and the calls that exchange rows through them."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import ExitStack
from functools import cache
from typing import TypeAlias

from cupy_moe.comm.agreement import ResultT, SetUpError, agree, on_all
from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.groups import Group
from cupy_moe.comm.launches import REPORT_WORDS, Call, CallLaunches, Launcher
from cupy_moe.comm.layout import SchemeLimits, WorkspaceLayout, choose_scheme, default_limits
from cupy_moe.comm.repeated import Key
from cupy_moe.comm.residents import enter_device, leave_device
from cupy_moe.comm.rules import OPERATION, FinalizeArrays, NormOptions, check_sizes
from cupy_moe.comm.streams import StreamOrder
from cupy_moe.comm.transport import IpcTransport, NcclTransport, Transport
from cupy_moe.kernels.finalize_rmsnorm import RANKS
from cupy_moe.runtime.closing import Closing
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.memory import Memory
from cupy_moe.runtime.peer_memory import DeviceMemory, HostPage, MemoryOffer
from cupy_moe.runtime.requirements import import_cupy

__all__ = ["FinalizeWorkspace"]

_Place: TypeAlias = "tuple[Key, int | None, int]"  # with the id of a stream and ranks on the device

_INIT = f"init_{OPERATION}"
_logger = logging.getLogger("cupy_moe")
MAX_CALLS = 1024  # that are remembered, about 3 KiB each
GRACE_S = 5.0  # for the host of a rank to see that a launch has given up


class FinalizeWorkspace(Closing):
    """Memory that the ranks of a group exchange expert rows through.

    Made by every rank together (collective), used for any number of calls one after another, and
    closed by every rank together.

    Parameters
    ----------
    group : Group
    device : int
        CUDA ordinal of this rank's GPU.
    hidden_size : int
        Columns of a row, a multiple of 8 up to 16,384.
    top_k : int
        Expert slots of a token, up to 32.
    max_tokens : int
        Tokens of one launch; more are taken in several. Memory grows with it.
    timeout_s : float
        The longest a launch waits for other ranks, in seconds.
    transport : str
        "auto", "ipc" or "nccl".
    limits : SchemeLimits, optional
        Where the schemes change; default: by the number of ranks.

    Attributes
    ----------
    transport : Transport
        What is in use.

    Raises
    ------
    TypeError, ValueError
        A size or a number of ranks that no workspace can have.
    ValueError
        The ranks pass different sizes. Raised on every rank.
    RuntimeError
        Memory could not be had or mapped on any rank. Raised on every rank, and all is given back.

    Notes
    -----
    Launches of all ranks on one device must be resident at once, so they divide its
    multiprocessors: those of the group, and of every group with a workspace in this process.
    Groups of other processes on the device are not known; give them green contexts or a device of
    their own. A graph keeps the share that it was captured with: open all workspaces before.
    """

    transport: Transport

    def __init__(
        self,
        group: Group,
        device: int,
        *,
        hidden_size: int = 4096,
        top_k: int = 8,
        max_tokens: int = 1024,
        timeout_s: float = 30.0,
        transport: str = "auto",
        limits: SchemeLimits | None = None,
    ) -> None:
        sizes = check_sizes(_INIT, hidden_size, top_k, max_tokens, timeout_s, transport)
        if group.size not in RANKS:
            each = ", ".join(map(str, RANKS))
            raise ValueError(f"{_INIT}: group must have one of {each} ranks, got {group.size}.")
        self.group, self.device, self.timeout_s = group, device, sizes.timeout_s
        limits = default_limits(group.size) if limits is None else limits
        self.layout = WorkspaceLayout(
            group.size, sizes.hidden_size, sizes.top_k, sizes.max_tokens, limits
        )
        self._mapped = ExitStack()  # peers' memory
        self._resources = ExitStack()
        self._report: HostPage | None = None
        self._lock = threading.RLock()  # of calls: they share the order and the parameters
        self._repeatable: Memory[_Place, CallLaunches] = Memory(MAX_CALLS)
        self._last: tuple[_Place | None, CallLaunches | None] = (None, None)
        self._num_calls = 0
        self._is_open = False
        self._is_written = False  # perhaps, by the others: from the last exchange of the set-up on
        try:
            self._set_up(sizes.transport)
        except BaseException:  # whatever it is, memory must not stay behind
            with self._resources, self._mapped:
                raise

    # --- making and closing -----------------------------------------------------------------------

    def _set_up(self, transport: str) -> None:
        agree(self.group, _INIT, (self.layout, transport, self.timeout_s))
        offers = self._allocate()
        self.transport = self._connect(transport, offers)
        own = offers[self.group.rank]
        sharers = [o for o in offers if (o.host, o.bus_id) == (own.host, own.bus_id)]
        self._launcher.share_device(sum(o.process != own.process for o in sharers))
        # Nobody writes before all buffers are filled.
        self._is_written = True
        self.group.barrier()
        self._is_open = True

    def _on_all(self, step: Callable[[], ResultT]) -> ResultT:
        what = f"{_INIT}: no workspace of {self.layout.num_bytes} B a rank"
        return on_all(self.group, what, step)

    def _allocate(self) -> list[MemoryOffer]:
        def step() -> MemoryOffer:
            resources = self._resources
            self._order = StreamOrder(OPERATION, self.device)
            resources.callback(self._order.close)
            enter_device(self.device)
            resources.callback(leave_device, self.device)
            self._memory = DeviceMemory(self.device, self.layout.num_bytes)
            resources.callback(self._free_memory)
            self._report = HostPage(self.device, REPORT_WORDS)
            resources.callback(self._report.free)
            self._launcher = Launcher(
                self.layout,
                self.group.rank,
                self.device,
                self._memory.address,
                self._report.address,
            )
            self._memory.fill(self.layout.fills())
            return self._memory.offer()

        own = self._on_all(step)
        return [pickle.loads(data) for data in self.group.all_gather(pickle.dumps(own))]

    def _connect(self, name: str, offers: list[MemoryOffer]) -> Transport:
        if name != "nccl":
            try:
                return self._connect_ipc(offers)
            except SetUpError as error:
                if name == "ipc":
                    raise
                _log_fallback(str(error))
        return self._connect_nccl()

    def _connect_ipc(self, offers: list[MemoryOffer]) -> Transport:
        try:
            return self._on_all(
                lambda: IpcTransport(self.device, self.group.rank, offers, self._mapped)
            )
        except SetUpError:
            self._mapped.close()
            self.group.barrier()  # memory that others have mapped must not be freed
            raise

    def _connect_nccl(self) -> Transport:
        transport = self._on_all(
            lambda: NcclTransport(
                self.group, self.device, self._memory.address, self.layout, self._resources
            )
        )
        name = self._on_all(lambda: transport.unique_id() if self.group.rank == 0 else b"")
        name = self.group.all_gather(name)[0]
        self._on_all(lambda: transport.connect(name, self._resources))
        return transport

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._is_open

    def close(self) -> None:
        """Give everything back; collective.

        Waits for the other ranks to close, for as long as a launch of theirs may wait (`timeout_s`)
        and as long again, at least 5 s. If one does not come, a late launch of it could still write
        into this rank's memory: that memory stays allocated, and a warning says so. Messages that
        still wait for a peer are aborted. Waits for the device, so no stream of it may be captured
        meanwhile.
        """
        with self._lock:  # a call that another thread makes is enqueued before, or refused
            if not self._is_open:
                return
            self._is_open = False
        # From the last to the first, whatever any of them raises.
        with ExitStack() as steps:
            steps.callback(self._resources.close)
            steps.callback(self._meet)
            steps.callback(self._mapped.close)
            self._drain()

    @property
    def _patience_s(self) -> float:
        return self.timeout_s + max(self.timeout_s, GRACE_S)

    def _drain(self) -> None:
        """Wait for the device. Launches end in time; messages may have to be aborted."""
        with futures.ThreadPoolExecutor(1) as worker:
            done = worker.submit(self._synchronize)
            try:
                done.result(self._patience_s)
            except futures.TimeoutError:
                self.transport.abort()
                done.result()

    def _synchronize(self) -> None:
        with device_guard(self.device):
            import_cupy().cuda.runtime.deviceSynchronize()

    def _meet(self) -> None:
        """Wait until no rank writes into the memory of another any more."""
        try:
            self.group.rendezvous(self._patience_s)
        except Exception as error:  # of whatever library the group is
            self.transport.abort()
            _logger.warning("%s: closing without all ranks: %s", OPERATION, error)
        else:
            self._is_written = False

    def _free_memory(self) -> None:
        if not self._is_written:
            self._memory.free()
            return
        _logger.warning(
            "%s: %d B of cuda:%d stay allocated, as other ranks may still write into them",
            OPERATION,
            self.layout.num_bytes,
            self.device,
        )

    # --- calls ------------------------------------------------------------------------------------

    def _has_failed(self) -> bool:
        return self._report is not None and bool(self._report.words[0])

    def check(self) -> None:
        """Raise if a launch that has run gave up waiting; does not wait for launches.

        Raises
        ------
        PeerTimeoutError
        """
        if self._has_failed():
            assert self._report is not None
            _, peer, call, num_tokens = (int(word) for word in self._report.words[:4])
            raise PeerTimeoutError(
                OPERATION, self.group.rank, peer, call, num_tokens, self.timeout_s
            )

    def run(
        self, arrays: FinalizeArrays, options: NormOptions, stream: int, key: Key | None = None
    ) -> None:
        """Enqueue one call on a stream; nothing for T = 0.

        Parameters
        ----------
        arrays : FinalizeArrays
        options : NormOptions
        stream : int
        key : tuple, optional
            Of `repeat`, for later calls like this one.

        Raises
        ------
        PeerTimeoutError
            An earlier call gave up.
        RuntimeError
            The workspace is closed. The stream is captured into a graph that has a call on another
            stream. The driver refuses a launch.
        """
        with self._lock, device_guard(self.device):
            if not self._is_open:
                raise RuntimeError(
                    f"{OPERATION}: the workspace is closed. Make another one on every rank."
                )
            self.check()
            if arrays.num_tokens == 0:
                return
            identity = self._order.before(stream)
            num_sharers = self._launcher.num_sharers
            launches = self._bind(arrays, options, stream, num_sharers)
            self._enqueue(launches, arrays.addresses, identity, stream)
            if key is not None and identity is not None:
                self._repeatable.insert((key, identity, num_sharers), launches)

    def repeat(self, key: Key, addresses: Sequence[int], stream: int) -> bool:
        """Enqueue a call that equals an earlier one on this stream in all but the addresses.

        Parameters
        ----------
        key : tuple
            Equal for such calls.
        addresses : sequence of int
            Of the arrays, in the order of the public arguments.
        stream : int

        Returns
        -------
        bool
            False if nothing was enqueued, as there was no such call or something is wrong: `run`
            is to be called.
        """
        with self._lock, device_guard(self.device):
            if not self._is_open or self._has_failed():
                return False
            identity = self._order.before(stream)
            where = (key, identity, self._launcher.num_sharers)
            last, launches = self._last
            if where != last:  # cheaper than to look it up, and alike for all layers of a model
                launches = self._repeatable.get(where)
            if launches is None or launches.overwrites(addresses):
                return False
            self._last = where, launches
            self._enqueue(launches, addresses, identity, stream)
        return True

    def _bind(
        self, arrays: FinalizeArrays, options: NormOptions, stream: int, num_sharers: int
    ) -> CallLaunches:
        """Prepare the launches of a call."""
        total = arrays.num_tokens
        scheme = choose_scheme(total, self.group.size, self.layout.limits)
        call = Call(arrays, options, stream, scheme, self.timeout_s, num_sharers)
        most = total if self.group.size == 1 else self.layout.token_capacity
        launches = []
        for first in range(0, total, most):
            count = min(most, total - first)
            steps = self.transport.steps(scheme, count)
            launches += [self._launcher.bind(call, first, count, step) for step in steps]
        return CallLaunches(launches, arrays, stream)

    def _enqueue(
        self, launches: CallLaunches, addresses: Sequence[int], identity: int | None, stream: int
    ) -> None:
        self._num_calls += 1
        try:
            launches.enqueue(addresses, self._num_calls)
        finally:  # some launches of a call that fails may be under way
            if identity is not None:
                self._order.after(stream)


@cache
def _log_fallback(reason: str) -> None:
    """Say once why messages are used."""
    _logger.warning("%s: using NCCL. %s", OPERATION, reason)
