"""What is timed: layers of known models, and random routings whose weights come from memory.

    bytes = experts hit * 3 * H * I  (weights)  +  T * H  (hidden states)  +  2 * T * H  (output)
    flops = 2 * assignments * 3 * H * I

Weights and hidden states have one byte an element, outputs two. An assignment is a (token, slot)
pair whose expert is local; an expert is hit if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["TOKENS", "WORKLOADS", "Work", "Workload", "make_routings", "work_of"]

Ids: TypeAlias = NDArray[np.int32]  # (T, K)

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384)

# Calls in one CUDA graph: as many as share no expert, else a few different random ones.
MOST_CALLS = 32
RANDOM_CALLS = 4


@dataclass(frozen=True)
class Workload:
    """Sizes of one rank's gated FP8 layer; its experts are the first of the model's.

    Attributes
    ----------
    key, model : str
        Short name, and the model that has such layers.
    hidden_size, intermediate_size, num_experts, top_k, local_num_experts : int
    """

    key: str
    model: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    local_num_experts: int

    def __post_init__(self) -> None:
        """Check that a token has a whole number of local experts on average."""
        if self.top_k * self.local_num_experts % self.num_experts:
            raise ValueError(
                f"Workload {self.key}: top_k * local_num_experts must be a multiple of "
                f"num_experts, got {self.top_k} * {self.local_num_experts} and {self.num_experts}."
            )

    @property
    def local_slots(self) -> int:
        """Local experts that a token visits on average."""
        return self.top_k * self.local_num_experts // self.num_experts

    @property
    def expert_size(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def title(self) -> str:
        """All sizes, as ``H4096 I1536 E128 K8``."""
        is_part = self.local_num_experts != self.num_experts
        experts = f"E{self.local_num_experts}of{self.num_experts}" if is_part else ""
        return (
            f"H{self.hidden_size} I{self.intermediate_size} "
            f"{experts or f'E{self.num_experts}'} K{self.top_k}"
        )


WORKLOADS: Mapping[str, Workload] = {
    workload.key: workload
    for workload in (
        Workload("W-A", "Qwen3-235B-A22B", 4096, 1536, 128, 8, 128),
        Workload("W-B", "DeepSeek-V3, one of 8 ranks", 7168, 2048, 256, 8, 32),
        Workload("mixtral", "Mixtral 8x7B", 4096, 14336, 8, 2, 8),
        Workload("llama4", "Llama 4 Scout", 5120, 8192, 16, 1, 16),
    )
}


def make_routings(workload: Workload, num_tokens: int, seed: int = 0) -> list[Ids]:
    """Uniform random expert ids of the calls that one CUDA graph holds.

    Where that many tokens leave room, no expert is hit by two calls: each call is drawn alone and
    its local experts are then renamed to unused ones, which leaves it uniform. Every token then
    visits exactly the average number of local experts, so that calls do equal work. Larger batches
    are free draws from all experts, a token's local ones included.

    Parameters
    ----------
    workload : Workload
    num_tokens : int
    seed : int

    Returns
    -------
    list of numpy.ndarray (T, K), int32
        Global ids, distinct in every token. At least four calls.
    """
    rng = np.random.default_rng(seed)
    if RANDOM_CALLS * num_tokens * workload.local_slots > workload.local_num_experts:
        sizes = num_tokens, workload.top_k, workload.num_experts
        return [_choose(rng, *sizes) for _ in range(RANDOM_CALLS)]
    unused = rng.permutation(workload.local_num_experts)
    routings: list[Ids] = []
    while len(routings) < MOST_CALLS:
        ids = _even_ids(rng, workload, num_tokens)
        hit = local_experts(workload, ids)
        if hit.size > unused.size:
            break
        name = np.arange(workload.num_experts, dtype=np.int32)
        name[hit], unused = unused[: hit.size], unused[hit.size :]
        routings.append(name[ids])
    return routings


def _even_ids(rng: np.random.Generator, workload: Workload, num_tokens: int) -> Ids:
    """Ids with the average number of local experts in every token, in random slots."""
    local = _choose(rng, num_tokens, workload.local_slots, workload.local_num_experts)
    num_remote = workload.num_experts - workload.local_num_experts
    remote = _choose(rng, num_tokens, workload.top_k - workload.local_slots, num_remote)
    ids = np.concatenate([local, remote + np.int32(workload.local_num_experts)], axis=1)
    return rng.permuted(ids, axis=1)


def _choose(rng: np.random.Generator, rows: int, count: int, population: int) -> Ids:
    """``count`` distinct numbers below ``population`` in each row."""
    if count == 0:
        return np.empty((rows, 0), np.int32)
    keys = rng.random((rows, population), dtype=np.float32)
    return np.argpartition(keys, count - 1, axis=1)[:, :count].astype(np.int32)


def local_experts(workload: Workload, ids: Ids) -> Ids:
    """Sorted ids of the local experts that a routing hits."""
    return np.unique(ids[ids < workload.local_num_experts])


@dataclass(frozen=True)
class Work:
    """Average work of one call; the formulas are those of the module."""

    experts_hit: float
    assignments: float
    num_bytes: float
    flops: float


def work_of(workload: Workload, routings: Sequence[Ids]) -> Work:
    """Count what the calls with these routings read, write and multiply, on average."""
    num_tokens = routings[0].shape[0]
    hit = float(np.mean([local_experts(workload, ids).size for ids in routings]))
    assignments = float(np.mean([(ids < workload.local_num_experts).sum() for ids in routings]))
    return Work(
        experts_hit=hit,
        assignments=assignments,
        num_bytes=hit * workload.expert_size + 3 * num_tokens * workload.hidden_size,
        flops=2 * assignments * workload.expert_size,
    )
