"""Launches of the kernel: shapes, co-residency, parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add

from cupy_moe.comm.layout import WorkspaceLayout, peer_number
from cupy_moe.comm.residents import count_residents
from cupy_moe.comm.rules import FinalizeArrays, NormOptions
from cupy_moe.comm.streams import multiprocessors_of
from cupy_moe.comm.transport import Step
from cupy_moe.kernels.finalize_rmsnorm import (
    MAX_PEERS,
    PARAMS,
    VARYING_PARAMS,
    ClusterShape,
    FinalizeRmsnormConfig,
    FinalizeScheme,
    Phases,
    choose_shape,
    possible_shapes,
    schemes_of,
)
from cupy_moe.runtime.devices import compute_capability, max_shared_memory, sm_count
from cupy_moe.runtime.jit import load
from cupy_moe.runtime.launch import BoundLaunch, PackedParams, bind, enqueue
from cupy_moe.runtime.occupancy import resident_clusters

__all__ = ["REPORT_WORDS", "Call", "CallLaunches", "Launch", "Launcher", "device_shapes"]

REPORT_WORDS = 8
POLITE_TOKENS = 8  # more of them are waited for politely
_MAX_PLANS = 1024
_MAX_CALL = 2**31 - 1  # of an int32


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the operation."""

    arrays: FinalizeArrays
    options: NormOptions
    stream: int
    scheme: FinalizeScheme
    timeout_s: float
    num_sharers: int  # ranks on the device


class Launch:
    """A launch of the kernel for some tokens, on whatever arrays it is placed on.

    Parameters
    ----------
    bound : BoundLaunch
    params : PackedParams
        Of that launch and of no other: `place` changes them.
    offsets : tuple of int, optional
        Bytes from the start of each array to its first token; default: none.
    copy : callable, optional
        See `Step`.
    """

    __slots__ = ("_offsets", "_params", "_struct", "bound", "copy")

    def __init__(
        self,
        bound: BoundLaunch,
        params: PackedParams,
        offsets: tuple[int, ...] | None,
        copy: Callable[[int], None] | None,
    ) -> None:
        self.bound, self.copy, self._offsets = (bound,), copy, offsets
        address = ctypes.c_uint64.from_address(params.address).value
        self._struct = (ctypes.c_char * PARAMS.size).from_address(address)
        self._params = params  # holds the memory

    def place(self, addresses: Sequence[int], number: int) -> None:
        """Set the addresses of the arrays and the number of the call."""
        at = addresses if self._offsets is None else map(add, addresses, self._offsets)
        VARYING_PARAMS.pack_into(self._struct, 0, *at, number & _MAX_CALL)


class CallLaunches:
    """All launches of a call, which can be made again on arrays of the same forms.

    One call at a time, as the launches have one set of parameters.

    Parameters
    ----------
    launches : sequence of Launch
    arrays : FinalizeArrays
        Their sizes are kept.
    stream : int
    """

    __slots__ = ("_launches", "_sizes", "_stream")

    def __init__(self, launches: Sequence[Launch], arrays: FinalizeArrays, stream: int) -> None:
        self._launches, self._sizes, self._stream = tuple(launches), arrays.extents, stream

    def overwrites(self, addresses: Sequence[int]) -> bool:
        """Whether the output, the last of the arrays, shares memory with another one."""
        rows, weights, index, norm_weight, output = addresses
        rows_size, weights_size, index_size, norm_size, output_size = self._sizes
        end = output + output_size
        return (
            (rows < end and output < rows + rows_size)
            or (weights < end and output < weights + weights_size)
            or (index < end and output < index + index_size)
            or (norm_weight < end and output < norm_weight + norm_size)
        )

    def enqueue(self, addresses: Sequence[int], number: int) -> None:
        """Enqueue a call; `addresses` in the order of the public arguments."""
        for launch in self._launches:
            launch.place(addresses, number)
            enqueue(launch.bound)
            if launch.copy is not None:
                launch.copy(self._stream)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a launch of so many tokens is spread over the device."""

    shape: ClusterShape
    num_clusters: int


def device_shapes(
    device: int, num_ranks: int, hidden_size: int, top_k: int
) -> dict[int, ClusterShape]:
    """List the clusters of a device that hold a row; none if it cannot run the kernel.

    Rows of more than 4096 columns take clusters, which compute capability 9.0 brought.
    """
    has_clusters = compute_capability(device) >= (9, 0)
    most = max_shared_memory(device)
    return possible_shapes(num_ranks, hidden_size, top_k, most, has_clusters)


class Launcher:
    """Kernels of one rank, loaded on its device.

    Parameters
    ----------
    layout : WorkspaceLayout
    rank, device : int
    workspace : int
        Address of this rank's workspace.
    report : int
        Address of the host memory that a launch reports to when it gives up.

    Raises
    ------
    NotImplementedError
        The device cannot hold a row.
    """

    def __init__(
        self, layout: WorkspaceLayout, rank: int, device: int, workspace: int, report: int
    ) -> None:
        self._layout, self._rank, self._device = layout, rank, device
        self._workspace, self._report = workspace, report
        self._buffers = layout.buffers()
        self._failed = workspace + layout.failed_offset
        self._num_sms = sm_count(device)
        self._has_pdl = compute_capability(device) >= (9, 0)
        self._shapes = device_shapes(device, layout.num_ranks, layout.hidden_size, layout.top_k)
        if not self._shapes:
            raise NotImplementedError(
                f"hidden size {layout.hidden_size} with top_k {layout.top_k} needs thread block "
                f"clusters or shared memory that cuda:{device} does not have"
            )
        self._functions = {
            (scheme, groups): load(
                FinalizeRmsnormConfig(scheme, layout.num_ranks, groups).spec(), device
            )
            for scheme in schemes_of(layout.num_ranks)
            for groups in {shape.num_groups for shape in self._shapes.values()}
        }
        self._num_elsewhere = 0
        self._plans: dict[tuple[FinalizeScheme, int, int, int], _Plan] = {}

    def share_device(self, num_elsewhere: int) -> None:
        """Leave multiprocessors to ranks of other processes on the device as well.

        Those of this process are counted at every launch, whatever their groups.
        """
        self._num_elsewhere = num_elsewhere

    @property
    def num_sharers(self) -> int:
        """Ranks that are on the device now, this one among them."""
        return self._num_elsewhere + count_residents(self._device)

    def bind(self, call: Call, first: int, count: int, step: Step) -> Launch:
        """Prepare a launch for tokens [first, first + count)."""
        is_shared = call.num_sharers > 1
        plan = self._plan(call.scheme, count, call.stream, call.num_sharers)
        layout, buffers, arrays = self._layout, self._buffers[call.scheme], call.arrays
        params = PARAMS.pack(
            *(0, 0, 0, 0, 0),  # see `Launch.place`
            0,
            self._rank,
            self._workspace + buffers.rows_offset,
            self._workspace + buffers.results_offset,
            *self._destinations(call.scheme, step.peers),
            buffers.rows_copy_bytes,
            buffers.rows_sender_bytes,
            buffers.results_copy_bytes,
            buffers.results_sender_bytes,
            buffers.row_group_bytes,
            buffers.result_bytes,
            self._workspace + buffers.generations_offset,
            self._failed,
            self._report,
            arrays.row_stride,
            int(call.timeout_s * 1e9),
            arrays.gemm2.shape[0],
            count,
            layout.hidden_size,
            layout.top_k,
            step.phases,
            count > POLITE_TOKENS,
            arrays.weights.dtype == "float32",
            call.options.weight_before_norm,
            call.options.eps,
            call.options.gain_center,
            1.0 / layout.hidden_size,
            is_shared,
        )
        shape, slots = plan.shape, first * layout.top_k
        bound = bind(
            self._functions[call.scheme, shape.num_groups],
            params,
            grid=(plan.num_clusters * shape.num_blocks, 1, 1),
            block=shape.num_threads,
            smem=shape.smem,
            stream=call.stream,
            # Blocks that are launched early could take the place of another rank's on the device.
            pdl=self._has_pdl and step.phases == Phases.All and not is_shared,
            cluster=shape.num_blocks,
        )
        offsets = (0, arrays.weights.itemsize * slots, 4 * slots, 0, 2 * first * layout.hidden_size)
        return Launch(bound, params, offsets if first else None, step.copy)

    def _destinations(self, scheme: FinalizeScheme, peers: Sequence[int]) -> list[int]:
        """List where rows go and where results go, the next rank's buffers first.

        Parameters
        ----------
        scheme : FinalizeScheme
        peers : sequence of int
            Addresses of the others' workspaces, in order of rank.
        """
        buffers, rank, size = self._buffers[scheme], self._rank, self._layout.num_ranks
        rows, results = [0] * MAX_PEERS, [0] * MAX_PEERS
        for turn in range(size - 1):
            receiver = (rank + 1 + turn) % size
            address, sender = peers[peer_number(receiver, rank)], peer_number(rank, receiver)
            rows[turn] = address + buffers.rows_offset + sender * buffers.rows_sender_bytes
            if scheme is FinalizeScheme.ExpertOwner:
                sender = rank  # who sends a sum to itself as well
            results[turn] = address + buffers.results_offset + sender * buffers.results_sender_bytes
        return rows + results

    def _plan(
        self, scheme: FinalizeScheme, num_tokens: int, stream: int, num_sharers: int
    ) -> _Plan:
        granted = multiprocessors_of(stream, self._device)
        parts = 1 if num_sharers == 1 else 2  # blocks of others are where room is needed
        if granted == self._num_sms:  # no green context divides them
            granted = max(1, self._num_sms // num_sharers)
        else:  # all ranks may be on this green context
            parts = max(parts, num_sharers)
        key = (scheme, num_tokens, granted, num_sharers)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(scheme, num_tokens, granted, parts)
        return plan

    def _make_plan(
        self, scheme: FinalizeScheme, num_tokens: int, granted: int, parts: int
    ) -> _Plan:
        # A part of the multiprocessors need not have room for a large cluster in one piece.
        smallest = min(self._shapes)
        is_whole = granted == self._num_sms
        shapes = self._shapes if is_whole else {smallest: self._shapes[smallest]}
        shape = choose_shape(shapes, num_tokens, granted)
        resident = resident_clusters(
            self._functions[scheme, shape.num_groups],
            shape.num_blocks,
            shape.num_threads,
            shape.smem,
        )
        resident //= parts
        num_clusters = min(num_tokens, max(1, resident * granted // self._num_sms))
        if 1 < num_clusters < num_tokens:
            num_clusters -= 1 - num_clusters % 2  # odd: a cluster meets tokens of every owner
        return _Plan(shape, num_clusters)
