"""A layer on fixed CUDA arrays: its memory, its streams, and the launches bound to them."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from cupy_moe.pipeline import Addresses, bind_stages, overrides, plan_for
from cupy_moe.plan import MoeOperands, MoeProblem, MoeResult
from cupy_moe.results import allocate_result
from cupy_moe.runtime.array_ref import Array
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.runtime.devices import (
    context_is_current,
    device_guard,
    stream_is_capturing,
    stream_is_primary,
)
from cupy_moe.runtime.graph import LaunchGraph, capture_stream
from cupy_moe.runtime.launch import BoundLaunch, enqueue
from cupy_moe.runtime.scratch import allocate

__all__ = ["BoundLayer", "RepeatableLayer"]


class BoundLayer:
    """One layer on fixed CUDA arrays, with scratch and results of its own.

    Parameters
    ----------
    problem : MoeProblem
        Of at least one token.
    operands : MoeOperands
        CUDA arrays of one device, validated against the problem. The layer keeps them alive.

    Attributes
    ----------
    problem : MoeProblem
    operands : MoeOperands
    result : MoeResult
        Arrays of the kind of ``hidden_states``.
    scratch_bytes : int
        Scratch memory allocated for the layer; 0 if the caller's suffices.
    """

    __slots__ = (
        *("_binding", "_bound", "_device", "_framework", "_graph", "_lock", "_scratch"),
        *("operands", "problem", "result", "scratch_bytes"),
    )

    def __init__(self, problem: MoeProblem, operands: MoeOperands) -> None:
        hidden = operands.hidden_states
        framework, device = hidden.framework, hidden.device
        arch, tiling = overrides()
        plan = plan_for(problem, device, arch, tiling)
        scratch, self.scratch_bytes = operands.workspace_buffer, 0
        if scratch is None or scratch.nbytes < plan.scratch.num_bytes:
            self.scratch_bytes = plan.scratch.num_bytes
            scratch = allocate(framework, self.scratch_bytes, device)
        self.result = allocate_result(problem, operands, plan.capacity)
        self._framework, self._device = framework, device
        self.problem, self.operands, self._scratch = problem, operands, scratch
        addresses = _addresses(operands, self.result, scratch)
        factor, pdl = operands.routed_scaling_factor, operands.enable_pdl
        self._binding = (problem, device, arch, tiling, pdl, factor, addresses)
        self._lock = Lock()
        # A stream and the launches on it, in one attribute: threads may share a layer.
        self._bound: tuple[int | None, tuple[BoundLaunch, ...]] = (None, ())
        self._graph: LaunchGraph | None = None

    def prepare(self) -> None:
        """Prepare for many runs: load the kernels and put them into a graph.

        During a stream capture there will be no graph, and kernels are launched one by one.

        Raises
        ------
        KernelCompileError
            If a kernel does not compile.
        RuntimeError
            If a kernel would have to be loaded during a stream capture.
        """
        with self._lock:
            device, stream = self._device, self._framework.current_stream(self._device)
            self._bind(stream)
            with device_guard(device):
                if not stream_is_capturing(stream):
                    launches = bind_stages(*self._binding, capture_stream(device))
                    self._graph = LaunchGraph(device, launches)

    def enqueue(self) -> None:
        """Enqueue the layer on the current stream.

        Raises
        ------
        KernelCompileError, RuntimeError
            As for `prepare`, and if the driver refuses a launch.
        """
        with self._lock:  # stages of two runs must not mix, even on one stream
            stream = self._framework.current_stream(self._device)
            launches = self._bind(stream)
            if self._graph is None:
                _enqueue_on(self._device, launches)
                return
            with device_guard(self._device):
                if self._graph_fits(stream):
                    self._graph.enqueue(stream)
                else:
                    enqueue(launches)

    def _graph_fits(self, stream: int) -> bool:
        """Whether the graph does what the launches on a stream do.

        It would leave the multiprocessors of a green context, and be a graph inside of a graph
        during a capture.
        """
        return stream_is_primary(stream, self._device) and not stream_is_capturing(stream)

    def _bind(self, stream: int) -> tuple[BoundLaunch, ...]:
        """Return the launches on a stream."""
        bound_stream, launches = self._bound
        if stream != bound_stream:
            launches = bind_stages(*self._binding, stream)
            if bound_stream is not None:
                self._use_on_another_stream()
            self._bound = (stream, launches)
        return launches

    def _use_on_another_stream(self) -> None:
        """Tell allocators of memory that a stream uses besides the one it was allocated on."""
        r = self.result
        results = (r.output, r.gemm2_output, r.expert_weights, r.expanded_idx_to_permuted_idx)
        for ref in (self._scratch, *results):
            if ref is not None:
                ref.framework.record_stream(ref)


class RepeatableLayer:
    """A layer that ran, without its arrays: runs on what is at the same addresses now.

    Scratch, and the output unless the caller gives one, are allocated at every run.

    Parameters
    ----------
    layer : BoundLayer
        With ``output`` as its result. It is not kept, nor are its arrays.
    """

    __slots__ = (
        *("_bound", "_choices", "_device", "_framework", "_inputs", "_output_address"),
        *("_output_shape", "_scratch_address", "_scratch_bytes", "_weights"),
    )

    def __init__(self, layer: BoundLayer) -> None:
        assert layer.result.output is not None
        *self._choices, addresses = layer._binding
        at = Addresses(*addresses)
        self._framework, self._device = layer._framework, layer._device
        self._inputs = addresses[: Addresses._fields.index("scratch")]
        self._scratch_address, self._scratch_bytes = at.scratch, layer.scratch_bytes
        self._output_address, self._output_shape = at.output, layer.result.output.shape
        self._weights = at.expert_weights
        # Where the last run took place, and the launches bound there.
        self._bound: tuple[tuple[int, int, int], tuple[BoundLaunch, ...]] = ((0, 0, -1), ())

    def run(self, output: Array | None) -> Array:
        """Enqueue the layer on the current stream.

        Parameters
        ----------
        output : array or None
            The caller's, at the address of the first run; None if that call had none.

        Returns
        -------
        array
            ``output``, or a new one.
        """
        framework, device = self._framework, self._device
        scratch_address, output_address = self._scratch_address, self._output_address
        if self._scratch_bytes:
            scratch = allocate(framework, self._scratch_bytes, device)
            scratch_address = scratch.ptr
        if output is None:
            made = framework.empty(self._output_shape, "bfloat16", device)
            output, output_address = made.owner, made.ptr
        stream = framework.current_stream(device)
        place = (scratch_address, output_address, stream)
        bound_place, launches = self._bound
        if place != bound_place:
            results = (output_address, self._weights, 0, 0)
            addresses = (*self._inputs, scratch_address, *results)
            launches = bind_stages(*self._choices, addresses, stream)
            self._bound = (place, launches)
        _enqueue_on(device, launches)
        return output


def _enqueue_on(device: int, launches: Iterable[BoundLaunch]) -> None:
    """Enqueue with the device's context current."""
    if context_is_current(device):  # the usual case, without the cost of a guard
        enqueue(launches)
        return
    with device_guard(device):
        enqueue(launches)


def _addresses(operands: MoeOperands, result: MoeResult, scratch: ArrayRef) -> tuple[int, ...]:
    """Fields of `cupy_moe.pipeline.Addresses`; a plain tuple, as it is made at every call."""
    o, r = operands, result
    weights = r.expert_weights or o.topk_weights
    return (
        o.hidden_states.ptr,
        o.gemm1_weights.ptr,
        o.gemm2_weights.ptr,
        o.output1_scales.ptr,
        o.output1_gate_scales.ptr,
        o.output2_scales.ptr,
        o.clamp_limit.ptr if o.clamp_limit else 0,
        o.topk_ids.ptr if o.topk_ids else 0,
        o.routing_logits.ptr if o.routing_logits else 0,
        o.routing_bias.ptr if o.routing_bias else 0,
        o.routing_replay_out.ptr if o.routing_replay_out else 0,
        scratch.ptr,
        r.output.ptr if r.output else 0,
        weights.ptr if weights else 0,
        r.gemm2_output.ptr if r.gemm2_output else 0,
        r.expanded_idx_to_permuted_idx.ptr if r.expanded_idx_to_permuted_idx else 0,
    )
