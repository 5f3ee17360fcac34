"""A layer on fixed CUDA arrays: its memory, its streams, and the launches bound to them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias
from weakref import WeakValueDictionary, ref

from cupy_moe.partitioned_launches import PartitionedLaunches
from cupy_moe.partitions import MoePartitionResources
from cupy_moe.pipeline import Binding, bind_stages, overrides, plan_for
from cupy_moe.problem import Addresses, MoeOperands, MoeProblem
from cupy_moe.results import allocate_result
from cupy_moe.runtime.graph import RepeatedLaunches
from cupy_moe.runtime.memory import Memory
from cupy_moe.runtime.scratch import allocate

__all__ = ["BoundLayer", "RepeatableLayer"]

Launches: TypeAlias = RepeatedLaunches | PartitionedLaunches

_MAX_PLACES = 1024  # about 4 KiB each, and a graph

_NOWHERE = Addresses()
_WRITTEN = ("routing_replay_out", "output", "workspace_buffer")


def _launches(binding: Binding, resources: MoePartitionResources | None) -> Launches:
    if resources is not None:
        return PartitionedLaunches(binding, resources)
    return RepeatedLaunches(
        binding.device, lambda stream: tuple(chain(*bind_stages(binding, stream)))
    )


class BoundLayer:
    """One layer on fixed CUDA arrays, with scratch and results of its own.

    A run is one launch of a CUDA graph once the layer was prepared, or from its ninth run on, where
    the driver has CUDA 12.3 or newer and the stream is neither captured nor of a green context;
    else, and always in partitions, its kernels are launched one by one.

    Parameters
    ----------
    problem : MoeProblem
        Of at least one token.
    operands : MoeOperands
        CUDA arrays of one device, validated against the problem. The layer keeps them alive.
    resources : MoePartitionResources or None
        Streams of the partitions, which the layer keeps as well.

    Attributes
    ----------
    binding : Binding
    operands : MoeOperands
    resources : MoePartitionResources or None
    result : MoeResult
        Arrays of the kind of ``hidden_states``.
    scratch_bytes : int
        Scratch memory allocated for the layer; 0 if the caller's suffices.
    """

    __slots__ = (
        *("_device", "_framework", "_launches", "_scratch", "_stream"),
        *("binding", "operands", "resources", "result", "scratch_bytes"),
    )

    def __init__(
        self,
        problem: MoeProblem,
        operands: MoeOperands,
        resources: MoePartitionResources | None = None,
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
        self.operands, self.resources, self._scratch = operands, resources, scratch
        arrays = chain(operands.arrays(), self.result.arrays(), [("scratch", scratch)])
        at = Addresses.of(problem, {name: array.ptr for name, array in arrays})
        factor, pdl = operands.routed_scaling_factor, operands.enable_pdl
        self.binding = Binding(problem, device, arch, tiling, pdl, factor, at)
        self._launches = _launches(self.binding, resources)
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
        for _, array in chain(self.result.arrays(), [("scratch", self._scratch)]):
            array.framework.record_stream(array)


class RepeatableLayer:
    """A layer that ran, without its arrays: runs on others of the same forms.

    Scratch, and results that the caller does not give, are allocated at every run. Runs at the same
    addresses become a graph as those of a `BoundLayer` do.

    Parameters
    ----------
    layer : BoundLayer
        It is not kept, nor are its arrays and resources.
    operands : mapping
        Where arrays are among the arguments of `run`, by the names of `MoeOperands.arrays`.
    """

    __slots__ = (
        *("_binding", "_device", "_form", "_framework", "_names", "_resources"),
        *("_results", "_scratch_bytes", "_sizes"),
    )

    def __init__(self, layer: BoundLayer, operands: Mapping[str, int]) -> None:
        self._framework, self._device = layer._framework, layer._device
        self._binding = layer.binding._replace(at=_NOWHERE)
        self._resources = None if layer.resources is None else ref(layer.resources)
        self._scratch_bytes = layer.scratch_bytes
        own = dict(layer.operands.arrays())
        where = {id(array): operands[name] for name, array in own.items()}
        # The argument that a result is, or None, shape and dtype of a new one.
        self._results = [(where.get(id(a)), a.shape, a.dtype) for _, a in layer.result.arrays()]
        made = ["scratch"] if self._scratch_bytes else []
        made += [name for name, array in layer.result.arrays() if id(array) not in where]
        # Nameless is what has no effect on the layer; new memory has no size, as it is distinct.
        self._names = (*made, *(name if name in own else "" for name in operands))
        sizes = [own[name].nbytes if name in own else 0 for name in operands]
        self._sizes = (*(0 for _ in made), *sizes)
        form = (self._binding, self._resources, self._names, self._sizes)
        self._form = _forms.setdefault(form, _Form())

    def run(self, arguments: Sequence[Any], addresses: Sequence[int]) -> Any:
        """Enqueue the layer on the current stream.

        Parameters
        ----------
        arguments : sequence
            The arrays of the operands are among them.
        addresses : sequence of int
            Of the operands, in their order.

        Returns
        -------
        array, list of three arrays or None
            As of the layer that ran; None if nothing was done as the call overwrites an input.
        """
        framework, device = self._framework, self._device
        made, results = [], []
        if self._scratch_bytes:
            scratch = allocate(framework, self._scratch_bytes, device)
            made.append(scratch.ptr)
        for argument, shape, dtype in self._results:
            if argument is None:
                array = framework.empty(shape, dtype, device)
                made.append(array.ptr)
                results.append(array.owner)
            else:
                results.append(arguments[argument])
        place: tuple[Any, ...] = (self._form, *made, *addresses)
        launches = _places.get(place)
        if launches is None:
            if self._overwrites(place[1:]):
                return None
            at = dict(zip(self._names, place[1:], strict=True))
            at.setdefault("scratch", at.get("workspace_buffer", 0))
            binding = self._binding._replace(at=Addresses.of(self._binding.problem, at))
            resources = None if self._resources is None else self._resources()
            launches = _launches(binding, resources)
            _places.insert(place, launches)
        launches.enqueue(framework.current_stream(device))
        return results if len(results) > 1 else results[0]

    def _overwrites(self, addresses: Sequence[int]) -> bool:
        """Whether an array that is written shares memory with another."""
        arrays = zip(self._names, addresses, self._sizes, strict=True)
        spans = sorted((at, at + size, name in _WRITTEN) for name, at, size in arrays if size)
        end = end_of_written = 0
        for begin, span_end, is_written in spans:
            if begin < (end if is_written else end_of_written):
                return True
            end = max(end, span_end)
            end_of_written = max(end_of_written, span_end) if is_written else end_of_written
        return False


class _Form:
    """Stands for all that binds a layer but addresses: compared as an object, which is cheap."""

    __slots__ = ("__weakref__",)


# One object for equal forms, as long as a layer or a place has it.
_forms: WeakValueDictionary[tuple[Hashable, ...], _Form] = WeakValueDictionary()

# Forms with the addresses of their arrays, which allocators hand out again.
_places: Memory[tuple[Hashable, ...], Launches] = Memory(_MAX_PLACES)
