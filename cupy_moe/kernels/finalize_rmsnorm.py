"""Launcher of ``finalize_rmsnorm.cu``: expert rows summed over ranks, normalized and added."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag
from struct import Struct
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import ParamLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_HIDDEN_SIZE",
    "MAX_PEERS",
    "MAX_TOP_K",
    "MAX_WARPS",
    "PARAMS",
    "RANKS",
    "VARYING_PARAMS",
    "ClusterShape",
    "FinalizeRmsnormConfig",
    "FinalizeScheme",
    "Phases",
    "all_finalize_rmsnorm_configs",
    "choose_shape",
    "possible_shapes",
]

RANKS = (1, 2, 4, 8)
MAX_PEERS = 7
MAX_TOP_K = 32
MAX_HIDDEN_SIZE = 16384
MAX_CLUSTER = 8  # blocks; every device with clusters can have as many
COLUMNS_PER_WARP = 256
MAX_WARPS = MAX_HIDDEN_SIZE // COLUMNS_PER_WARP
MAX_THREADS = 512
VECTOR_BYTES = 16  # eight columns
STATIC_SMEM = 2 * MAX_WARPS * MAX_TOP_K * 4


class FinalizeScheme(Enum):
    """Who reduces the expert rows of a token."""

    EveryRank = 0  # each rank all of them: one hop
    TokenOwner = 1  # the token's owner: least traffic
    ExpertOwner = 2  # each rank those of its slots


class Phases(IntFlag):
    """What a launch does; all of it, unless a transport copies in between."""

    Send = 1
    Reduce = 2
    Receive = 4
    All = 7


PARAMS = ParamLayout(
    ("gemm2", "ptr"),  # these six differ from call to call, see `VARYING_PARAMS`
    ("weights", "ptr"),
    ("index", "ptr"),
    ("norm_weight", "ptr"),
    ("output", "ptr"),
    ("call", "i32"),
    ("rank", "i32"),
    ("own", "ptr"),
    *((f"peer{number}", "ptr") for number in range(MAX_PEERS)),
    ("generations", "ptr"),
    ("failed", "ptr"),
    ("report", "ptr"),
    ("rows_offset", "i64"),
    ("results_offset", "i64"),
    ("row_stride", "i64"),
    ("timeout_ns", "u64"),
    ("rows_slots", "i32"),
    ("results_slots", "i32"),
    ("num_rows", "i32"),
    ("num_tokens", "i32"),
    ("hidden_size", "i32"),
    ("top_k", "i32"),
    ("phases", "i32"),
    ("is_polite", "i32"),
    ("weights_are_f32", "i32"),
    ("weight_before_norm", "i32"),
    ("eps", "f32"),
    ("gain_center", "f32"),
    ("is_shared", "i32"),
)

VARYING_PARAMS = Struct("=5Qi")
"""Lays out the first fields of `PARAMS`: five arrays and the number of the call."""


@dataclass(frozen=True)
class FinalizeRmsnormConfig:
    """Specialization of the kernel."""

    scheme: FinalizeScheme
    num_ranks: int
    num_threads: int = MAX_THREADS  # of a block, at most

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("finalize_rmsnorm", self, PARAMS)


def all_finalize_rmsnorm_configs() -> list[FinalizeRmsnormConfig]:
    """Every specialization a workspace can ask for; a single rank has nothing to send."""
    return [
        FinalizeRmsnormConfig(scheme, num_ranks)
        for num_ranks in RANKS
        for scheme in ([FinalizeScheme.EveryRank] if num_ranks == 1 else FinalizeScheme)
    ]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Blocks that share one token, their threads, and their dynamic shared memory in bytes."""

    num_blocks: int
    num_threads: int
    smem: int


def possible_shapes(
    hidden_size: int, top_k: int, max_shared_memory: int, has_clusters: bool
) -> dict[int, ClusterShape]:
    """Clusters that hold a row of ``hidden_size``, eight columns a thread, by number of blocks.

    A thread keeps its columns of ``top_k`` reduced rows in shared memory. ``max_shared_memory`` is
    what a block can have, in bytes.
    """
    num_warps = -(-hidden_size // COLUMNS_PER_WARP)
    shapes = {}
    for num_blocks in (1, 2, 4, MAX_CLUSTER) if has_clusters else (1,):
        threads = 32 * -(-num_warps // num_blocks)
        smem = top_k * threads * VECTOR_BYTES
        if threads <= MAX_THREADS and smem <= max_shared_memory - STATIC_SMEM:
            shapes[num_blocks] = ClusterShape(num_blocks, threads, smem)
    return shapes


def choose_shape(
    shapes: Mapping[int, ClusterShape], num_tokens: int, sm_count: int
) -> ClusterShape:
    """Spread every token over as many blocks as there are multiprocessors for.

    The result of a token does not depend on it: pieces of 256 columns are added in a fixed order.
    """
    fitting = [blocks for blocks in shapes if blocks * num_tokens <= sm_count]
    return shapes[max(fitting, default=min(shapes))]
