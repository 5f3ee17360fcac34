"""What the stages of a layer are bound with."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_moe.plan import MoePlan
from cupy_moe.problem import Addresses, MoeProblem, RoutingSource
from cupy_moe.runtime.jit import Function

__all__ = ["Functions", "StageInputs"]


@dataclass(frozen=True, slots=True)
class Functions:
    """The loaded kernels of a plan."""

    route: Function | None
    permute: Function | None
    place: Function | None
    fc1: Function
    fc2: Function
    add_rows: Function | None
    finalize: Function | None


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Sizes, kernels and addresses of a layer."""

    problem: MoeProblem
    plan: MoePlan
    functions: Functions
    at: Addresses
    device: int
    pdl: bool  # stages may start before their predecessors end
    routed_scaling_factor: float
    scratch: dict[str, int]

    @property
    def tokens(self) -> int:
        """What FC1 reads: permuted rows, or rows by token, the caller's or made of them."""
        if self.plan.fc1.gather_tokens:
            return self.scratch["tokens"] if self.plan.place else self.at.hidden_states
        # NOTE: the copy is dead when FC2 starts to write its output, which takes no fewer bytes.
        # Partial sums of one partition are written while the other one still reads.
        return self.scratch.get("permuted_tokens") or self.gemm2_output

    @property
    def gemm2_output(self) -> int:
        """FC2's rows; 0 where they are partial sums only."""
        return self.at.gemm2_output or self.scratch.get("gemm2_output", 0)

    @property
    def expert_weights(self) -> int:
        """Routing weights of the slots."""
        return self.at.expert_weights or self.scratch["expert_weights"]

    @property
    def expanded_to_permuted(self) -> int:
        """Row of each slot."""
        return self.at.expanded_to_permuted or self.scratch["expanded_to_permuted"]

    @property
    def topk_ids(self) -> int:
        """Expert ids, or words that hold them."""
        return self.scratch["topk_ids"] if self.plan.route else self.at.topk_ids

    @property
    def is_packed(self) -> bool:
        """Whether ids and weights come in words."""
        return self.problem.routing_source is RoutingSource.Packed

    @property
    def weights_are_f32(self) -> bool:
        """Whether routing weights are FP32, else BF16."""
        return self.problem.expert_weights_dtype == "float32"
