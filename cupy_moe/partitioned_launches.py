"""Launches of a layer in two partitions, whose GEMMs run on multiprocessors of their own."""

from __future__ import annotations

from weakref import ref

from cupy_moe.partitions import MoePartitionResources
from cupy_moe.pipeline import Binding, Stages, bind_stages
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.launch import enqueue

__all__ = ["PartitionedLaunches"]


class PartitionedLaunches:
    """What `cupy_moe.runtime.graph.RepeatedLaunches` is to a layer without partitions.

    Kernels are launched one by one at every run. A graph put together node by node would leave the
    partitions: a node runs in the context of its function, which is the primary one. One that was
    captured and kept here would outlive green contexts that their owner closes.

    Parameters
    ----------
    binding : Binding
        Of a problem with a strategy.
    resources : MoePartitionResources
        Of the device of the arrays. Whoever enqueues keeps them, as they keep the arrays.
    """

    __slots__ = ("_binding", "_bound", "_resources")

    def __init__(self, binding: Binding, resources: MoePartitionResources) -> None:
        self._binding, self._resources = binding, ref(resources)
        self._bound: tuple[int, Stages | None] = (-1, None)

    def prepare(self, stream: int) -> None:
        """Load the kernels and bind them to a stream; errors are those of `bind_stages`."""
        with self._owner().launch_guard(), device_guard(self._binding.device):
            self._stages(stream)

    def enqueue(self, stream: int) -> None:
        """Enqueue the kernels: on a stream, which forks to the partitions and joins them.

        Raises
        ------
        RuntimeError
            If the driver refuses a launch. The partitions are joined in any case.
        Exception
            What `bind_stages` raises.
        """
        resources = self._owner()
        with resources.launch_guard(), device_guard(self._binding.device):
            stages = self._stages(stream)
            enqueue(stages.before)
            try:
                resources.fork_from(stream)
                enqueue(stages.fc1)
                if self._binding.problem.strategy == "tp_n_tp_n":  # FC2 reads what both computed
                    resources.exchange()
                enqueue(stages.fc2)
            finally:
                resources.join_into(stream)
            enqueue(stages.after)

    def _stages(self, stream: int) -> Stages:
        bound_stream, stages = self._bound
        if stages is None or stream != bound_stream:
            stages = bind_stages(self._binding, stream, self._owner().handles)
            self._bound = (stream, stages)
        return stages

    def _owner(self) -> MoePartitionResources:
        resources = self._resources()
        assert resources is not None
        return resources
