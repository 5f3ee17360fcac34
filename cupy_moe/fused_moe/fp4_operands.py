"""The arrays of one call of an FP4 operation, and how they are to be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_moe.fused_moe.partitions import MoePartitionResources
from cupy_moe.problem import Strategy
from cupy_moe.runtime.arrays import ArrayRef
from cupy_moe.types import MoeFormat

__all__ = ["Fp4Operands", "PreparedMatrix", "Strategy"]


@dataclass(frozen=True, slots=True)
class PreparedMatrix:
    """Prepared weights of the local experts, or the part of them that one partition has.

    Attributes
    ----------
    weights : ArrayRef
        Packed E2M1, (EL, rows, K/2) or (EL, K/2/block, rows, block).
    scales : ArrayRef
        Their block scales in the 128x4 order, of any shape.
    name : str
        Of the public argument, ``gemm1_weights`` or ``gemm2_weights``.
    index : str
        ``[0]`` or ``[1]``, the partition; empty without partitions.
    """

    weights: ArrayRef
    scales: ArrayRef
    name: str
    index: str = ""

    def named_arrays(self) -> Iterator[tuple[str, ArrayRef]]:
        """Both arrays under the names of the public arguments."""
        yield f"{self.name}{self.index}", self.weights
        yield f"{self.name}_scale{self.index}", self.scales


@dataclass(slots=True)
class Fp4Operands:
    """The arrays of one call; ``None`` where the call has none.

    Attributes
    ----------
    mode : MoeFormat
        One with block scales.
    strategy : {"tp_n_tp_n", "tp_n_tp_k"} or None
        How FC2 is partitioned; None without partitions.
    hidden_size : int
        Logical: ``hidden_states`` may be packed.
    gemm1, gemm2 : tuple of PreparedMatrix
        One entry per partition.
    resources : MoePartitionResources or None
        Streams of the partitions.
    workspace_buffer : None
        These operations take none.
    """

    mode: MoeFormat
    strategy: Strategy | None
    hidden_size: int
    hidden_states: ArrayRef
    hidden_states_scale: ArrayRef | None
    gemm1: tuple[PreparedMatrix, ...]
    gemm2: tuple[PreparedMatrix, ...]
    output1_scales: ArrayRef
    output1_gate_scales: ArrayRef
    output2_scales: ArrayRef
    alpha: ArrayRef | None = None
    beta: ArrayRef | None = None
    clamp_limit: ArrayRef | None = None
    topk_ids: ArrayRef | None = None  # packed words or ids
    topk_weights: ArrayRef | None = None
    routing_logits: ArrayRef | None = None
    routing_bias: ArrayRef | None = None
    routing_replay_out: ArrayRef | None = None
    output: ArrayRef | None = None
    routed_scaling_factor: float = 1.0
    enable_pdl: bool | None = None
    resources: MoePartitionResources | None = None
    workspace_buffer: ArrayRef | None = None

    def named_arrays(self) -> Iterator[tuple[str, ArrayRef | None]]:
        """All arrays under the names of the public arguments."""
        yield "hidden_states", self.hidden_states
        yield "hidden_states_scale", self.hidden_states_scale
        for matrix in (*self.gemm1, *self.gemm2):
            yield from matrix.named_arrays()
        yield "output1_scale_scalar", self.output1_scales
        yield "output1_scale_gate_scalar", self.output1_gate_scales
        yield "output2_scale_scalar", self.output2_scales
        yield "gemm1_alpha", self.alpha
        yield "gemm1_beta", self.beta
        yield "gemm1_clamp_limit", self.clamp_limit
        for name in ("topk_ids", "topk_weights", "routing_logits", "routing_bias"):
            yield name, getattr(self, name)
        yield "routing_replay_out", self.routing_replay_out
        yield "output", self.output
