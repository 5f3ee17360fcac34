"""Launcher of ``permute.cu``: expert-sorted, tile-padded order of the routed slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.compiler import capability_of
from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = [
    "MAX_LOCAL_EXPERTS",
    "PARAMS",
    "SCHEDULE_WORDS",
    "PermuteConfig",
    "all_permute_configs",
    "bind_permute",
    "permute_config",
]

MAX_LOCAL_EXPERTS = 2048
SCHEDULE_WORDS = 5  # token tiles in use, then tile counters of FC1 and FC2 of two partitions
WARP_SIZE = 32

PARAMS = ParamLayout(
    ("topk_ids", "ptr"),
    ("expert_weights", "ptr"),
    ("expanded_to_permuted", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("tile_info", "ptr"),
    ("schedule", "ptr"),
    ("num_slots", "i32"),
    ("local_num_experts", "i32"),
    ("local_expert_offset", "i32"),
    ("tile_n", "i32"),
)


_FIRST_CLUSTER_CAPABILITY = (9, 0)
_CLUSTER_SIZE = 8  # the most that every GPU with clusters can run

# One block places this many slots about as fast as a cluster starts and meets at its barriers.
_FEW_SLOTS = 1024
_FEW_THREADS = 256
_MANY_THREADS = 1024

# With a counter a warp and expert, 32 warps would take more shared memory than every GPU has.
_MANY_EXPERTS = 512

# Clusters share the placing of slots, but each counts all of them.
_SLOTS_PER_CLUSTER = 16384
_MAX_CLUSTERS = 8


@dataclass(frozen=True)
class PermuteConfig:
    """Specialization of the permutation kernel.

    Attributes
    ----------
    packed_ids : bool
        Whether ids come as words ``(id << 16) | bf16 weight``.
    cluster_size : int
        Blocks that count the slots together; 1 where the GPU has no clusters.
    num_threads : int
        Threads of a block.
    schedule_words : int
        The number of token tiles, and counters that start at zero.
    """

    packed_ids: bool
    cluster_size: int
    num_threads: int
    schedule_words: int = SCHEDULE_WORDS

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("permute", self, PARAMS)

    def grid(self, num_slots: int) -> tuple[int, int, int]:
        """Whole clusters, a power of two of them."""
        wanted = min(num_slots // _SLOTS_PER_CLUSTER, _MAX_CLUSTERS)
        num_clusters = 1 << max(wanted, 1).bit_length() - 1
        return (num_clusters * self.cluster_size, 1, 1)

    def smem_bytes(self, local_num_experts: int) -> int:
        """Dynamic shared memory: an expert has one counter a warp and three more words."""
        return 4 * (self.num_threads // WARP_SIZE + 3) * local_num_experts


def permute_config(
    *, packed_ids: bool, num_slots: int, local_num_experts: int, arch: str
) -> PermuteConfig:
    """Choose the specialization.

    Parameters
    ----------
    packed_ids : bool
        See `PermuteConfig`.
    num_slots : int
        Routed (token, slot) pairs.
    local_num_experts : int
        At most ``MAX_LOCAL_EXPERTS``.
    arch : str
        What the kernel is compiled for, e.g. ``sm_90a`` or ``compute_80``.
    """
    few = num_slots <= _FEW_SLOTS
    clusters = _has_clusters(arch) and not few
    return PermuteConfig(
        packed_ids=packed_ids,
        cluster_size=_CLUSTER_SIZE if clusters else 1,
        num_threads=_FEW_THREADS if few or local_num_experts > _MANY_EXPERTS else _MANY_THREADS,
    )


def _has_clusters(arch: str) -> bool:
    return capability_of(arch) >= _FIRST_CLUSTER_CAPABILITY


def all_permute_configs(arch: str) -> list[PermuteConfig]:
    """Every specialization a plan for an architecture can ask for."""
    return [
        PermuteConfig(packed_ids, cluster_size, num_threads)
        for packed_ids in (False, True)
        for cluster_size in ((1, _CLUSTER_SIZE) if _has_clusters(arch) else (1,))
        for num_threads in (_FEW_THREADS, _MANY_THREADS)
    ]


def bind_permute(
    function: Function,
    config: PermuteConfig,
    *,
    topk_ids: int,
    expert_weights: int,
    expanded_to_permuted: int,
    permuted_to_expanded: int,
    tile_info: int,
    schedule: int,
    num_slots: int,
    local_num_experts: int,
    local_expert_offset: int,
    tile_n: int,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(
        topk_ids,
        expert_weights,
        expanded_to_permuted,
        permuted_to_expanded,
        tile_info,
        schedule,
        num_slots,
        local_num_experts,
        local_expert_offset,
        tile_n,
    )
    return bind(
        function,
        params,
        grid=config.grid(num_slots),
        block=config.num_threads,
        smem=config.smem_bytes(local_num_experts),
        stream=stream,
        pdl=pdl,
        cluster=config.cluster_size,
    )
