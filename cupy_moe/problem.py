"""What a layer is asked to do: sizes, formats and choices, and the arrays of one call."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from cupy_moe.types import ActivationType, MoeFormat, RoutingMethodType

if TYPE_CHECKING:
    from cupy_moe.runtime.arrays import ArrayRef

__all__ = [
    "Addresses",
    "DeviceTraits",
    "MatrixAddresses",
    "MoeOperands",
    "MoeProblem",
    "MoeResult",
    "RoutingSource",
    "Strategy",
]

Strategy: TypeAlias = Literal["tp_n_tp_n", "tp_n_tp_k"]


class RoutingSource(Enum):
    """Where expert ids and weights come from."""

    Packed = 0  # one int32 word a slot: (id << 16) | bf16 weight
    Unpacked = 1  # int32 ids and a weight tensor
    Logits = 2  # computed by the router kernel


@dataclass(frozen=True, slots=True)
class MoeProblem:
    """Everything a plan depends on; hashable, so plans are cached by it."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    local_num_experts: int
    local_expert_offset: int
    activation: ActivationType
    routing_source: RoutingSource
    expert_weights_dtype: str  # "bfloat16" or "float32"
    scale_input: bool
    do_finalize: bool
    routing_method: RoutingMethodType
    num_groups: int  # 0: ungrouped
    topk_group: int
    norm_topk_prob: bool
    logits_dtype: str | None
    bias_dtype: str | None
    moe_format: MoeFormat = MoeFormat.Fp8
    weight_block_bytes: int = 0  # of BlockMajorK; 0: MajorK
    token_scale_pitch: int = 0  # block scales between two tokens
    rounds_weights: bool = False  # FP32 weights are given, BF16 ones are used
    strategy: Strategy | None = None  # how FC2 is partitioned
    partition_sms: tuple[int, ...] = ()  # multiprocessors of each partition
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Hash once: every call looks its plan up."""
        values = (getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))

    def __hash__(self) -> int:
        """Hash of all sizes and choices."""
        return self._hash

    @property
    def num_slots(self) -> int:
        """Routed (token, slot) pairs."""
        return self.num_tokens * self.top_k

    @property
    def fc1_rows(self) -> int:
        """Rows of one expert's first weight matrix."""
        return self.intermediate_size * (2 if self.activation.is_gated else 1)

    @property
    def fc1_part_rows(self) -> int:
        """Those of them that a partition multiplies."""
        return self.fc1_rows // (1 if self.strategy is None else 2)

    @property
    def fc2_part_rows(self) -> int:
        """Rows of one expert's second weight matrix that a partition multiplies."""
        return self.hidden_size // (2 if self.strategy == "tp_n_tp_n" else 1)


@dataclass(slots=True)
class MoeOperands:
    """The arrays of one call; ``None`` where the call has none."""

    hidden_states: ArrayRef
    gemm1_weights: ArrayRef
    gemm2_weights: ArrayRef
    output1_scales: ArrayRef
    output1_gate_scales: ArrayRef
    output2_scales: ArrayRef
    clamp_limit: ArrayRef | None = None
    topk_ids: ArrayRef | None = None  # packed words or ids
    topk_weights: ArrayRef | None = None
    routing_logits: ArrayRef | None = None
    routing_bias: ArrayRef | None = None
    routing_replay_out: ArrayRef | None = None
    output: ArrayRef | None = None
    workspace_buffer: ArrayRef | None = None
    routed_scaling_factor: float = 1.0
    enable_pdl: bool | None = None


@dataclass(slots=True)
class MoeResult:
    """What a call produced: ``output``, or the other three when it did not finalize."""

    output: ArrayRef | None = None
    gemm2_output: ArrayRef | None = None
    expert_weights: ArrayRef | None = None
    expanded_idx_to_permuted_idx: ArrayRef | None = None


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What a plan needs to know of a GPU."""

    arch: str
    num_sms: int


class MatrixAddresses(NamedTuple):
    """Where the FP4 weights of one partition are, and their block scales."""

    gemm1_weights: int
    gemm1_scales: int
    gemm2_weights: int
    gemm2_scales: int


class Addresses(NamedTuple):
    """Where the arrays of a call are, 0 for none.

    ``expert_weights``, ``gemm2_output`` and ``expanded_to_permuted`` lie in the scratch then.
    """

    hidden_states: int
    gemm1_weights: int
    gemm2_weights: int
    output1_scales: int
    output1_gate_scales: int
    output2_scales: int
    clamp_limit: int
    topk_ids: int
    routing_logits: int
    routing_bias: int
    routing_replay_out: int
    scratch: int
    output: int
    expert_weights: int
    gemm2_output: int
    expanded_to_permuted: int
    # FP4 only; weights are in `matrices` then, one entry per partition.
    hidden_states_scale: int = 0
    alpha: int = 0
    beta: int = 0
    unrounded_weights: int = 0
    matrices: tuple[MatrixAddresses, ...] = ()
