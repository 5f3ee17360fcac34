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
    "MAX_GROUPS",
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
    "max_groups",
    "possible_shapes",
    "schemes_of",
    "static_smem",
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
MAX_GROUPS = 8  # of warps that share columns


def static_smem(has_clusters: bool) -> int:
    """Bytes of static shared memory of a block: without clusters a row is short."""
    pieces = MAX_WARPS + 16 if has_clusters else MAX_THREADS // 32
    return 2 * MAX_TOP_K * pieces * 4 + 16


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
    ("rows_from", "ptr"),
    ("results_from", "ptr"),
    ("rows_to", "ptr", MAX_PEERS),
    ("results_to", "ptr", MAX_PEERS),
    ("rows_copy_bytes", "i64"),
    ("rows_sender_bytes", "i64"),
    ("results_copy_bytes", "i64"),
    ("results_sender_bytes", "i64"),
    ("rows_token_bytes", "i32"),
    ("results_token_bytes", "i32"),
    ("generations", "ptr"),
    ("failed", "ptr"),
    ("report", "ptr"),
    ("row_stride", "i64"),
    ("timeout_ns", "u64"),
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
    ("per_column", "f32"),
    ("is_shared", "i32"),
)

VARYING_PARAMS = Struct("=5Qi")
"""Lays out the first fields of `PARAMS`: five arrays and the number of the call."""


@dataclass(frozen=True)
class FinalizeRmsnormConfig:
    """Specialization of the kernel."""

    scheme: FinalizeScheme
    num_ranks: int
    num_groups: int = 1  # warps that share the slots of a token
    num_threads: int = MAX_THREADS  # of a block, at most

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("finalize_rmsnorm", self, PARAMS)


def all_finalize_rmsnorm_configs() -> list[FinalizeRmsnormConfig]:
    """Every specialization a workspace can ask for; a single rank has nothing to send."""
    return [
        FinalizeRmsnormConfig(scheme, num_ranks, num_groups)
        for num_ranks in RANKS
        for scheme in schemes_of(num_ranks)
        for num_groups in (1, 2, 4, 8)
        if num_groups <= max_groups(num_ranks)
    ]


def max_groups(num_ranks: int) -> int:
    """Return how many warps may share columns: rows of many ranks take longer than what it costs.

    Eight are slower than four with one or two ranks, faster with more (H200).
    """
    return 4 if num_ranks <= 2 else MAX_GROUPS


def schemes_of(num_ranks: int) -> tuple[FinalizeScheme, ...]:
    """Schemes that so many ranks can use; a single one has nothing to send."""
    return (FinalizeScheme.EveryRank,) if num_ranks == 1 else tuple(FinalizeScheme)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Blocks that share one token.

    Attributes
    ----------
    num_blocks : int
    num_threads : int
        Of a block.
    num_groups : int
        Warps that share 256 columns, each with some of the slots.
    smem : int
        Dynamic shared memory of a block, in bytes.
    """

    num_blocks: int
    num_threads: int
    num_groups: int
    smem: int


def possible_shapes(
    num_ranks: int, hidden_size: int, top_k: int, max_shared_memory: int, has_clusters: bool
) -> dict[int, ClusterShape]:
    """Clusters that hold a row of ``hidden_size``, by number of blocks.

    Warps that the columns leave idle take slots. ``top_k`` reduced rows lie in shared memory, those
    of two tokens where several warps read them; ``max_shared_memory`` is what a block can have, in
    bytes.
    """
    num_warps = -(-hidden_size // COLUMNS_PER_WARP)
    most = max_shared_memory - static_smem(has_clusters)
    shapes = {}
    for num_blocks in (1, 2, 4, MAX_CLUSTER) if has_clusters else (1,):
        if num_blocks > num_warps:
            break
        of_columns = 32 * -(-num_warps // num_blocks)
        rows = top_k * of_columns * VECTOR_BYTES
        groups = max_groups(num_ranks)
        while groups > 1 and (
            groups > top_k or of_columns * groups > MAX_THREADS or 2 * rows > most
        ):
            groups //= 2
        smem = rows if groups == 1 else 2 * rows
        if of_columns <= MAX_THREADS and smem <= most:
            shapes[num_blocks] = ClusterShape(num_blocks, of_columns * groups, groups, smem)
    return shapes


def choose_shape(
    shapes: Mapping[int, ClusterShape], num_tokens: int, sm_count: int
) -> ClusterShape:
    """Spread every token over as many blocks as there are multiprocessors for.

    The result of a token does not depend on it: pieces of 256 columns are added in a fixed order.
    """
    fitting = [blocks for blocks in shapes if blocks * num_tokens <= sm_count]
    return shapes[max(fitting, default=min(shapes))]
