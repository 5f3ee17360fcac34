"""A layer on fixed CUDA arrays: its memory, its streams, and the launches bound to them."""

from __future__ import annotations

from threading import Lock

from cupy_moe.pipeline import bind_stages, overrides, plan_for
from cupy_moe.plan import MoeOperands, MoeProblem, MoeResult
from cupy_moe.results import allocate_result
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.runtime.devices import context_is_current, device_guard
from cupy_moe.runtime.launch import BoundLaunch, enqueue
from cupy_moe.runtime.scratch import allocate

__all__ = ["BoundLayer"]


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
    operands : MoeOperands
    result : MoeResult
        Arrays of the kind of ``hidden_states``.
    scratch_bytes : int
        Scratch memory allocated for the layer; 0 if the caller's suffices.
    """

    __slots__ = (
        *("_binding", "_bound", "_device", "_framework", "_lock", "_scratch"),
        *("operands", "result", "scratch_bytes"),
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
        self.operands, self._scratch = operands, scratch
        addresses = _addresses(operands, self.result, scratch)
        factor, pdl = operands.routed_scaling_factor, operands.enable_pdl
        self._binding = (problem, device, arch, tiling, pdl, factor, addresses)
        self._lock = Lock()
        # A stream and the launches on it, in one attribute: threads may share a layer.
        self._bound: tuple[int | None, tuple[BoundLaunch, ...]] = (None, ())

    def bind(self) -> tuple[BoundLaunch, ...]:
        """Return the launches on the current stream of the library of ``hidden_states``.

        Raises
        ------
        KernelCompileError
            If a kernel does not compile.
        RuntimeError
            If a kernel would have to be loaded during a stream capture.
        """
        stream = self._framework.current_stream(self._device)
        bound_stream, launches = self._bound
        if stream != bound_stream:
            launches = bind_stages(*self._binding, stream)
            if bound_stream is not None:
                self._use_on_another_stream()
            self._bound = (stream, launches)
        return launches

    def enqueue(self) -> None:
        """Enqueue the layer on the current stream.

        Raises
        ------
        KernelCompileError, RuntimeError
            As for `bind`, and if the driver refuses a launch.
        """
        with self._lock:  # stages of two runs must not mix, even on one stream
            launches = self.bind()
            if context_is_current(self._device):  # the usual case, without the cost of a guard
                enqueue(launches)
                return
            with device_guard(self._device):
                enqueue(launches)

    def _use_on_another_stream(self) -> None:
        """Tell allocators of memory that a stream uses besides the one it was allocated on."""
        r = self.result
        results = (r.output, r.gemm2_output, r.expert_weights, r.expanded_idx_to_permuted_idx)
        for ref in (self._scratch, *results):
            if ref is not None:
                ref.framework.record_stream(ref)


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
