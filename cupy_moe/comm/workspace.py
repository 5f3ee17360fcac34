"""Symmetric receive buffers of a group, and the launches that exchange rows through them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.groups import Group, vote
from cupy_moe.comm.layout import (
    Buffers,
    SchemeLimits,
    WorkspaceLayout,
    choose_scheme,
    default_limits,
)
from cupy_moe.comm.rules import OPERATION, FinalizeArrays, NormOptions
from cupy_moe.comm.streams import StreamOrder, multiprocessors_of
from cupy_moe.kernels.finalize_rmsnorm import (
    MAX_PEERS,
    PARAMS,
    ClusterShape,
    FinalizeRmsnormConfig,
    FinalizeScheme,
    Phases,
    choose_shape,
    possible_shapes,
)
from cupy_moe.runtime.devices import (
    compute_capability,
    device_guard,
    max_shared_memory,
    sm_count,
)
from cupy_moe.runtime.jit import load
from cupy_moe.runtime.launch import bind, enqueue
from cupy_moe.runtime.occupancy import resident_clusters
from cupy_moe.runtime.peer_memory import DeviceMemory, HostPage, MemoryOffer, PeerMapping
from cupy_moe.runtime.requirements import import_cupy

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["FinalizeWorkspace"]

_REPORT_WORDS = 8
_MAX_PLANS = 1024


@dataclass(frozen=True, slots=True)
class _Plan:
    """How launches of so many tokens on a stream run."""

    function: Function
    buffers: Buffers
    shape: ClusterShape
    num_clusters: int


class FinalizeWorkspace:
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
    limits : SchemeLimits, optional
        Where the schemes change; default: by the number of ranks.

    Raises
    ------
    RuntimeError
        Memory could not be had or mapped on any rank. Raised on every rank, and all is given back.
    """

    def __init__(
        self,
        group: Group,
        device: int,
        *,
        hidden_size: int = 4096,
        top_k: int = 8,
        max_tokens: int = 1024,
        timeout_s: float = 30.0,
        limits: SchemeLimits | None = None,
    ) -> None:
        self.group, self.device, self.timeout_s = group, device, timeout_s
        limits = default_limits(group.size) if limits is None else limits
        self.layout = WorkspaceLayout(group.size, hidden_size, top_k, max_tokens, limits)
        self._buffers = self.layout.buffers()
        self._resources = ExitStack()
        self._memory: DeviceMemory | None = None
        self._report: HostPage | None = None
        self._peers: tuple[int, ...] = ()
        self._num_calls = 0
        self._plans: dict[tuple[FinalizeScheme, int, int], _Plan] = {}
        self._shapes: dict[int, ClusterShape] = {}
        self._functions: dict[FinalizeScheme, Function] = {}
        self._sharers = 1  # ranks whose kernels run on this device
        self._set_up()

    # --- making and closing -----------------------------------------------------------------------

    def _set_up(self) -> None:
        offer = self._attempt(self._allocate)
        offers: list[MemoryOffer] = [
            pickle.loads(data) for data in self.group.all_gather(pickle.dumps(offer))
        ]
        self._attempt(lambda: self._map(offers))
        # Nobody writes before all buffers are filled.
        self.group.barrier()

    def _attempt(self, step: Any) -> Any:
        """Do a step on every rank; if it fails on any, give all back and raise on all."""
        failure, result = None, None
        try:
            result = step()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = f"{type(error).__name__}: {error}"
        failures = vote(self.group, failure)
        if failures:
            self._resources.close()
            raise RuntimeError(
                f"init_{OPERATION}: no workspace of {self.layout.num_bytes} B a rank: "
                f"{'; '.join(failures)}"
            )
        return result

    def _allocate(self) -> MemoryOffer:
        self._has_clusters = compute_capability(self.device) >= (9, 0)
        self._shapes = possible_shapes(
            self.layout.hidden_size,
            self.layout.top_k,
            max_shared_memory(self.device),
            self._has_clusters,
        )
        if not self._shapes:
            raise NotImplementedError(
                f"hidden size {self.layout.hidden_size} with top_k {self.layout.top_k} needs "
                f"thread block clusters, which cuda:{self.device} does not have"
            )
        for scheme in self._schemes():
            config = FinalizeRmsnormConfig(scheme, self.group.size)
            self._functions[scheme] = load(config.spec(), self.device)
        self._order = StreamOrder(OPERATION, self.device)
        self._resources.callback(self._order.close)
        self._memory = DeviceMemory(self.device, self.layout.num_bytes)
        self._resources.callback(self._memory.free)
        self._report = HostPage(self.device, _REPORT_WORDS)
        self._resources.callback(self._report.free)
        self._memory.fill(self.layout.fills())
        return self._memory.offer()

    def _schemes(self) -> Sequence[FinalizeScheme]:
        return (FinalizeScheme.EveryRank,) if self.group.size == 1 else tuple(FinalizeScheme)

    def _map(self, offers: Sequence[MemoryOffer]) -> None:
        # Memory that others have mapped must not be freed; callbacks run in reverse order.
        self._resources.callback(self._wait_for_others)
        addresses = []
        own = offers[self.group.rank]
        for rank, offer in enumerate(offers):
            if rank != self.group.rank:
                mapping = PeerMapping(self.device, offer)
                self._resources.callback(mapping.close)
                addresses.append(mapping.address)
        self._peers = (*addresses, *[0] * (MAX_PEERS - len(addresses)))
        self._sharers = sum((o.host, o.bus_id) == (own.host, own.bus_id) for o in offers)

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._memory is not None and self._memory.address != 0

    def close(self) -> None:
        """Give everything back; collective unless a wait has timed out."""
        if not self.is_open:
            return
        with device_guard(self.device):
            self._synchronize()
        self._wait_for_others()  # all have read what this rank sent
        self._plans.clear()
        self._resources.close()

    def _wait_for_others(self) -> None:
        if not self._has_failed():
            self.group.barrier()

    def _synchronize(self) -> None:
        import_cupy().cuda.runtime.deviceSynchronize()

    def __enter__(self) -> FinalizeWorkspace:
        """Return the workspace."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

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

    def run(self, arrays: FinalizeArrays, options: NormOptions, stream: int) -> None:
        """Enqueue one call on a stream.

        Raises
        ------
        PeerTimeoutError
            An earlier call gave up.
        RuntimeError
            The stream is captured into a graph that has a call on another stream, or the driver
            refuses a launch.
        """
        self.check()
        self._num_calls += 1
        total = arrays.num_tokens
        scheme = choose_scheme(total, self.group.size, self.layout.limits)
        step = total if self.group.size == 1 else self.layout.token_capacity
        with device_guard(self.device):
            is_captured = self._order.before(stream)
            enqueue(
                self._bind(arrays, options, stream, scheme, first, min(step, total - first))
                for first in range(0, total, step)
            )
            if not is_captured:
                self._order.after(stream)

    def _plan(self, scheme: FinalizeScheme, num_tokens: int, stream: int) -> _Plan:
        granted = multiprocessors_of(stream, self.device)
        if granted == sm_count(self.device):
            granted //= self._sharers
        key = (scheme, num_tokens, granted)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(scheme, num_tokens, granted)
        return plan

    def _make_plan(self, scheme: FinalizeScheme, num_tokens: int, granted: int) -> _Plan:
        function, total = self._functions[scheme], sm_count(self.device)
        # A part of the multiprocessors need not have room for a large cluster in one piece.
        smallest = min(self._shapes)
        shapes = self._shapes if granted == total else {smallest: self._shapes[smallest]}
        shape = choose_shape(shapes, num_tokens, granted)
        resident = resident_clusters(function, shape.num_blocks, shape.num_threads, shape.smem)
        num_clusters = min(num_tokens, max(1, resident * granted // total))
        if num_clusters < num_tokens and num_clusters > 1:
            num_clusters -= 1 - num_clusters % 2  # odd: a cluster meets tokens of every owner
        return _Plan(function, self._buffers[scheme], shape, num_clusters)

    def _bind(
        self,
        arrays: FinalizeArrays,
        options: NormOptions,
        stream: int,
        scheme: FinalizeScheme,
        first: int,
        count: int,
        phases: Phases = Phases.All,
    ) -> Any:
        plan = self._plan(scheme, count, stream)
        assert self._memory is not None
        assert self._report is not None
        base, hidden_size, top_k = self._memory.address, self.layout.hidden_size, self.layout.top_k
        buffers, shape = plan.buffers, plan.shape
        params = PARAMS.pack(
            arrays.gemm2.ptr,
            arrays.index.ptr + 4 * first * top_k,
            arrays.weights.ptr + arrays.weights.itemsize * first * top_k,
            arrays.norm_weight.ptr,
            arrays.output.ptr + 2 * first * hidden_size,
            base,
            *self._peers,
            base + buffers.generations_offset,
            base + self.layout.failed_offset,
            self._report.address,
            buffers.rows_offset,
            buffers.results_offset,
            arrays.row_stride,
            int(self.timeout_s * 1e9),
            buffers.rows_slots,
            buffers.results_slots,
            arrays.gemm2.shape[0],
            count,
            hidden_size,
            top_k,
            self.group.rank,
            self._num_calls,
            phases,
            arrays.weights.dtype == "float32",
            options.weight_before_norm,
            options.eps,
            options.gain_center,
        )
        return bind(
            plan.function,
            params,
            grid=(plan.num_clusters * shape.num_blocks, 1, 1),
            block=shape.num_threads,
            smem=shape.smem,
            stream=stream,
            pdl=self._has_clusters,
            cluster=shape.num_blocks,
        )
