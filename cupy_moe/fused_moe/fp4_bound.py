"""FP4 layers on fixed CUDA arrays, whole or in two partitions."""

from __future__ import annotations

from typing import Any

from cupy_moe.bound_layer import BoundLayer
from cupy_moe.fused_moe.fp4_operands import Fp4Operands
from cupy_moe.fused_moe.partitions import MoePartitionResources
from cupy_moe.pipeline import PartitionedStages, bind_partitioned_stages
from cupy_moe.problem import Addresses, MatrixAddresses, MoeProblem, MoeResult
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.launch import enqueue
from cupy_moe.types import MoeFormat

__all__ = ["PartitionedLayer", "bound_fp4_layer"]


def bound_fp4_layer(problem: MoeProblem, operands: Fp4Operands) -> BoundLayer[Fp4Operands]:
    """Make the layer of a call with at least one token."""
    if operands.resources is None:
        return BoundLayer(problem, operands, _addresses)
    return PartitionedLayer(problem, operands, operands.resources)


class PartitionedLayer(BoundLayer[Fp4Operands]):
    """A layer whose GEMMs run on two streams, each on multiprocessors of its own.

    Parameters
    ----------
    problem : MoeProblem
        With a strategy, and the multiprocessors of both partitions.
    operands : Fp4Operands
        One matrix per partition.
    resources : MoePartitionResources
        Of the device of the arrays.
    """

    __slots__ = ("_resources",)

    def __init__(
        self, problem: MoeProblem, operands: Fp4Operands, resources: MoePartitionResources
    ) -> None:
        super().__init__(problem, operands, _addresses)
        self._resources = resources

    def prepare(self) -> None:
        """Load the kernels and bind them to the current stream."""
        with device_guard(self._device):
            self._stages(self._use_current_stream())

    def enqueue(self) -> None:
        """Enqueue the layer: on the current stream, which forks to the partitions and joins them.

        Raises
        ------
        KernelCompileError, RuntimeError
            As for `BoundLayer.enqueue`. The partitions are joined in any case.
        """
        stream, resources = self._use_current_stream(), self._resources
        with device_guard(self._device), resources.launch_guard():
            stages = self._stages(stream)
            enqueue(stages.before)
            try:
                resources.fork_from(stream)
                enqueue(stages.fc1)
                if self.problem.strategy == "tp_n_tp_n":  # FC2 reads what both have computed
                    resources.join_into(stream)
                    resources.fork_from(stream)
                enqueue(stages.fc2)
            finally:
                resources.join_into(stream)
            enqueue(stages.after)

    def _stages(self, stream: int) -> PartitionedStages:
        return bind_partitioned_stages(*self._binding, stream, self._resources.handles)


def _addresses(operands: Fp4Operands, result: MoeResult, scratch: ArrayRef) -> tuple[Any, ...]:
    o, r = operands, result
    weights, unrounded = r.expert_weights or o.topk_weights, None
    if _is_rounded(o):
        weights, unrounded = r.expert_weights, o.topk_weights
    return Addresses(
        hidden_states=o.hidden_states.ptr,
        gemm1_weights=0,
        gemm2_weights=0,
        output1_scales=o.output1_scales.ptr,
        output1_gate_scales=o.output1_gate_scales.ptr,
        output2_scales=o.output2_scales.ptr,
        clamp_limit=_pointer(o.clamp_limit),
        topk_ids=_pointer(o.topk_ids),
        routing_logits=_pointer(o.routing_logits),
        routing_bias=_pointer(o.routing_bias),
        routing_replay_out=_pointer(o.routing_replay_out),
        scratch=scratch.ptr,
        output=_pointer(r.output),
        expert_weights=_pointer(weights),
        gemm2_output=_pointer(r.gemm2_output),
        expanded_to_permuted=_pointer(r.expanded_idx_to_permuted_idx),
        hidden_states_scale=_pointer(o.hidden_states_scale),
        alpha=_pointer(o.alpha),
        beta=_pointer(o.beta),
        unrounded_weights=_pointer(unrounded),
        matrices=tuple(
            MatrixAddresses(
                first.weights.ptr, first.scales.ptr, second.weights.ptr, second.scales.ptr
            )
            for first, second in zip(o.gemm1, o.gemm2, strict=True)
        ),
    )


def _is_rounded(operands: Fp4Operands) -> bool:
    """Whether given routing weights are used in another format."""
    weights = operands.topk_weights
    return weights is not None and weights.dtype == "float32" and operands.mode is MoeFormat.Nvfp4


def _pointer(ref: ArrayRef | None) -> int:
    return 0 if ref is None else ref.ptr
