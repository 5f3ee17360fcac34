"""A layer on fixed CUDA arrays: its memory, its streams, and the launches bound to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from cupy_moe.pipeline import Addresses, bind_stages, overrides, plan_for
from cupy_moe.problem import MoeOperands, MoeProblem, MoeResult
from cupy_moe.results import allocate_result
from cupy_moe.runtime.array_ref import Array
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.runtime.graph import RepeatedLaunches
from cupy_moe.runtime.memory import Memory
from cupy_moe.runtime.scratch import allocate

__all__ = ["BoundLayer", "LayerOperands", "RepeatableLayer", "fp8_addresses"]

_MAX_PLACES = 1024  # about 4 KiB each, and a graph

_FP8_FIELDS = tuple(n for n in Addresses._fields if n not in Addresses._field_defaults)
_WRITTEN = ("routing_replay_out", "output", "workspace_buffer")


class LayerOperands(Protocol):
    """What a layer needs to know of the arrays of any operation."""

    hidden_states: ArrayRef
    topk_weights: ArrayRef | None
    output: ArrayRef | None
    workspace_buffer: ArrayRef | None
    routed_scaling_factor: float
    enable_pdl: bool | None


OperandsT = TypeVar("OperandsT", bound=LayerOperands)


class BoundLayer(Generic[OperandsT]):
    """One layer on fixed CUDA arrays, with scratch and results of its own.

    A run is one launch of a CUDA graph once the layer was prepared, or from its ninth run on, where
    the driver has CUDA 12.3 or newer and the stream is neither captured nor of a green context;
    else its kernels are launched one by one. Calls of the FP4 operations make a layer each, which
    runs once and never becomes a graph.

    Parameters
    ----------
    problem : MoeProblem
        Of at least one token.
    operands : LayerOperands
        CUDA arrays of one device, validated against the problem. The layer keeps them alive.
    addresses : callable
        From operands, result and scratch to the fields of `cupy_moe.problem.Addresses`.

    Attributes
    ----------
    problem : MoeProblem
    operands : LayerOperands
    result : MoeResult
        Arrays of the kind of ``hidden_states``.
    scratch_bytes : int
        Scratch memory allocated for the layer; 0 if the caller's suffices.
    """

    __slots__ = (
        *("_binding", "_device", "_framework", "_launches", "_scratch", "_stream"),
        *("operands", "problem", "result", "scratch_bytes"),
    )

    def __init__(
        self,
        problem: MoeProblem,
        operands: OperandsT,
        addresses: Callable[[OperandsT, MoeResult, ArrayRef], tuple[Any, ...]],
    ) -> None:
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
        places = addresses(operands, self.result, scratch)
        factor, pdl = operands.routed_scaling_factor, operands.enable_pdl
        self._binding = (problem, device, arch, tiling, pdl, factor, places)
        self._launches = RepeatedLaunches(device, partial(bind_stages, *self._binding))
        self._stream: int | None = None

    def prepare(self) -> None:
        """Prepare for many runs: load the kernels and put them into a graph.

        During a capture the graph is left to the first run outside of one.

        Raises
        ------
        KernelCompileError
            If a kernel does not compile.
        RuntimeError
            If a kernel would have to be loaded during a stream capture.
        """
        self._launches.prepare(self._use_current_stream())

    def enqueue(self) -> None:
        """Enqueue the layer on the current stream.

        Raises
        ------
        KernelCompileError, RuntimeError
            As for `prepare`, and if the driver refuses a launch.
        """
        self._launches.enqueue(self._use_current_stream())

    def _use_current_stream(self) -> int:
        stream = self._framework.current_stream(self._device)
        if stream != self._stream:
            if self._stream is not None:
                self._use_on_another_stream()
            self._stream = stream
        return stream

    def _use_on_another_stream(self) -> None:
        """Tell allocators of memory that a stream uses besides the one it was allocated on."""
        r = self.result
        results = (r.output, r.gemm2_output, r.expert_weights, r.expanded_idx_to_permuted_idx)
        for ref in (self._scratch, *results):
            if ref is not None:
                ref.framework.record_stream(ref)


class RepeatableLayer:
    """A layer that ran, without its arrays: runs on others of the same forms.

    Scratch, and the output unless the caller gives one, are allocated at every run. Runs at
    the same addresses become a graph as those of a `BoundLayer` do.

    Parameters
    ----------
    layer : BoundLayer
        With ``output`` as its result. It is not kept, nor are its arrays.
    operands : sequence of str
        Fields of `MoeOperands`, in the order in which `run` takes their addresses.
    """

    __slots__ = (
        *("_device", "_form", "_framework", "_choices", "_operands", "_output_shape"),
        *("_scratch_bytes", "_sizes"),
    )

    def __init__(self, layer: BoundLayer[MoeOperands], operands: Sequence[str]) -> None:
        assert layer.result.output is not None
        self._framework, self._device = layer._framework, layer._device
        self._choices = layer._binding[:-1]
        self._output_shape, self._scratch_bytes = layer.result.output.shape, layer.scratch_bytes
        self._operands = tuple(operands)
        # None for what has no effect on the layer.
        refs = (getattr(layer.operands, name) for name in operands)
        self._sizes = tuple(None if ref is None else ref.nbytes for ref in refs)
        form = (self._choices, self._operands, self._sizes)
        self._form = _forms.setdefault(form, _Form())

    def run(self, output: Array | None, addresses: Sequence[int]) -> Array | None:
        """Enqueue the layer on the current stream.

        Parameters
        ----------
        output : array or None
            The caller's.
        addresses : sequence of int
            Of the operands, the output among them if the caller gives one.

        Returns
        -------
        array or None
            ``output``, or a new one; None if nothing was done as the call overwrites an input.
        """
        framework, device = self._framework, self._device
        scratch_address = output_address = 0
        if self._scratch_bytes:
            scratch = allocate(framework, self._scratch_bytes, device)
            scratch_address = scratch.ptr
        if output is None:
            made = framework.empty(self._output_shape, "bfloat16", device)
            output, output_address = made.owner, made.ptr
        place = (self._form, scratch_address, output_address, *addresses)
        launches = _places.get(place)
        if launches is None:
            if self._overwrites(addresses):
                return None
            binding = self._binding(addresses, scratch_address, output_address)
            launches = RepeatedLaunches(device, partial(bind_stages, *self._choices, binding))
            _places.insert(place, launches)
        launches.enqueue(framework.current_stream(device))
        return output

    def _overwrites(self, addresses: Sequence[int]) -> bool:
        """Whether an array that is written shares memory with another."""
        operands = zip(self._operands, addresses, self._sizes, strict=True)
        spans = sorted((at, at + size, name in _WRITTEN) for name, at, size in operands if size)
        end = end_of_written = 0
        for begin, span_end, is_written in spans:
            if begin < (end if is_written else end_of_written):
                return True
            end = max(end, span_end)
            end_of_written = max(end_of_written, span_end) if is_written else end_of_written
        return False

    def _binding(self, addresses: Sequence[int], scratch: int, output: int) -> tuple[int, ...]:
        """Put together the fields of `Addresses`; 0 for scratch and output of the caller's."""
        operands = zip(self._operands, addresses, self._sizes, strict=True)
        at = {name: address for name, address, size in operands if size is not None}
        made = {
            "scratch": scratch or at.get("workspace_buffer", 0),
            "output": output or at.get("output", 0),
            "expert_weights": at.get("topk_weights", 0),
        }
        return tuple((made | at).get(name, 0) for name in _FP8_FIELDS)


class _Form:
    """Stands for all that binds a layer but addresses: compared as an object, which is cheap."""

    __slots__ = ("__weakref__",)


# One object for equal forms, as long as a layer or a place has it.
_forms: WeakValueDictionary[tuple[Hashable, ...], _Form] = WeakValueDictionary()

# Forms with the addresses of their arrays, which allocators hand out again.
_places: Memory[tuple[Hashable, ...], RepeatedLaunches] = Memory(_MAX_PLACES)


def fp8_addresses(operands: MoeOperands, result: MoeResult, scratch: ArrayRef) -> tuple[int, ...]:
    """Fields of `cupy_moe.problem.Addresses`; a plain tuple, as it is made at every call."""
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
