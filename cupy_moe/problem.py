"""What a layer is asked to do: sizes, formats and choices, and the arrays of one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from cupy_moe.types import ActivationType, MoeFormat, RoutingMethodType

if TYPE_CHECKING:
    from cupy_moe.runtime.arrays import ArrayRef

__all__ = [
    "Addresses",
    "DeviceTraits",
    "MoeOperands",
    "MoeProblem",
    "MoeResult",
    "RoutingSource",
    "Strategy",
    "partition_names",
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
    """The arrays of one call; ``None`` where the call has none.

    Weights and their block scales are one array per partition, and one without partitions.
    """

    moe_format: MoeFormat
    hidden_states: ArrayRef
    gemm1_weights: tuple[ArrayRef, ...]
    gemm2_weights: tuple[ArrayRef, ...]
    output1_scales: ArrayRef
    output1_gate_scales: ArrayRef
    output2_scales: ArrayRef
    hidden_states_scale: ArrayRef | None = None
    gemm1_scales: tuple[ArrayRef, ...] = ()
    gemm2_scales: tuple[ArrayRef, ...] = ()
    alpha: ArrayRef | None = None
    beta: ArrayRef | None = None
    clamp_limit: ArrayRef | None = None
    topk_ids: ArrayRef | None = None  # packed words or ids
    topk_weights: ArrayRef | None = None
    routing_logits: ArrayRef | None = None
    routing_bias: ArrayRef | None = None
    routing_replay_out: ArrayRef | None = None
    output: ArrayRef | None = None
    workspace_buffer: ArrayRef | None = None
    strategy: Strategy | None = None  # how FC2 is partitioned
    routed_scaling_factor: float = 1.0
    enable_pdl: bool | None = None

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states; NVFP4 packs two of them in a byte."""
        return self.hidden_states.shape[1] * (2 if self.moe_format is MoeFormat.Nvfp4 else 1)

    def arrays(self) -> Iterator[tuple[str, ArrayRef]]:
        """All arrays by field; those of two partitions as ``field[0]`` and ``field[1]``."""
        for name in _ARRAY_FIELDS:
            value = getattr(self, name)
            if isinstance(value, tuple):
                yield from zip(partition_names(name, len(value)), value, strict=True)
            elif value is not None:
                yield name, value


_CHOICES = ("moe_format", "strategy", "routed_scaling_factor", "enable_pdl")
_ARRAY_FIELDS = tuple(f.name for f in fields(MoeOperands) if f.name not in _CHOICES)


@cache
def partition_names(name: str, count: int) -> tuple[str, ...]:
    """Names of what every partition has of something; the name alone without partitions."""
    return (name,) if count == 1 else tuple(f"{name}[{part}]" for part in range(count))


@dataclass(slots=True)
class MoeResult:
    """What a call produced: ``output``, or the other three when it did not finalize."""

    output: ArrayRef | None = None
    gemm2_output: ArrayRef | None = None
    expert_weights: ArrayRef | None = None
    expanded_idx_to_permuted_idx: ArrayRef | None = None

    def arrays(self) -> Iterator[tuple[str, ArrayRef]]:
        """Arrays that there are, by field."""
        for name in self.__slots__:
            ref = getattr(self, name)
            if ref is not None:
                yield name, ref


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What a plan needs to know of a GPU."""

    arch: str
    num_sms: int


class Addresses(NamedTuple):
    """Where the arrays of a call are, 0 for none.

    ``expert_weights``, ``gemm2_output`` and ``expanded_to_permuted`` lie in the scratch then.
    Weights and their block scales have an entry per partition.
    """

    hidden_states: int = 0
    hidden_states_scale: int = 0
    gemm1_weights: tuple[int, ...] = ()
    gemm1_scales: tuple[int, ...] = ()
    gemm2_weights: tuple[int, ...] = ()
    gemm2_scales: tuple[int, ...] = ()
    output1_scales: int = 0
    output1_gate_scales: int = 0
    output2_scales: int = 0
    alpha: int = 0
    beta: int = 0
    clamp_limit: int = 0
    topk_ids: int = 0
    routing_logits: int = 0
    routing_bias: int = 0
    routing_replay_out: int = 0
    scratch: int = 0
    output: int = 0
    expert_weights: int = 0
    unrounded_weights: int = 0
    gemm2_output: int = 0
    expanded_to_permuted: int = 0

    @classmethod
    def of(cls, problem: MoeProblem, at: Mapping[str, int]) -> Addresses:
        """Put together where a layer works.

        Parameters
        ----------
        problem : MoeProblem
        at : mapping
            Addresses by the names of `MoeOperands.arrays` and `MoeResult.arrays`, and ``scratch``.
        """
        count, given = max(1, len(problem.partition_sms)), at.get("topk_weights", 0)
        unrounded, as_given = (given, 0) if problem.rounds_weights else (0, given)

        def parts(name: str) -> tuple[int, ...]:
            return tuple(at.get(part, 0) for part in partition_names(name, count))

        return cls(
            gemm1_weights=parts("gemm1_weights"),
            gemm1_scales=parts("gemm1_scales"),
            gemm2_weights=parts("gemm2_weights"),
            gemm2_scales=parts("gemm2_scales"),
            expert_weights=at.get("expert_weights") or as_given,
            unrounded_weights=unrounded,
            expanded_to_permuted=at.get("expanded_idx_to_permuted_idx", 0),
            **{name: at.get(name, 0) for name in _PLAIN},
        )


_DERIVED = ("expert_weights", "unrounded_weights", "expanded_to_permuted")
_PLAIN = tuple(
    name
    for name, default in Addresses._field_defaults.items()
    if default == 0 and name not in _DERIVED
)
