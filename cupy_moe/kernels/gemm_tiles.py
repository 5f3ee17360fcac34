"""Tiles of the grouped GEMM: their shapes, and the shared memory that they take."""

from __future__ import annotations

from enum import Enum

from cupy_moe.types import ActivationType, MoeFormat

__all__ = [
    "TILE_K",
    "GemmStage",
    "MainloopKind",
    "gather_choices",
    "mainloop_for",
    "output_row_bytes",
    "shared_memory",
    "sort_choices",
    "staged_row_bytes",
    "tile_shapes",
]

TILE_K = 128


class GemmStage(Enum):
    """The two GEMMs of a layer; mirrors ``GemmStage`` in ``common/types.cuh``."""

    Fc1 = 0
    Fc2 = 1


class MainloopKind(Enum):
    """How the tensor cores are fed; mirrors ``MainloopKind`` in ``common/types.cuh``."""

    Mma = 0
    Wgmma = 1


# Weight rows x tokens.
_TILE_SHAPES = {
    MainloopKind.Mma: tuple((128, tile_n) for tile_n in (8, 16, 32, 64, 128)),
    MainloopKind.Wgmma: (
        *((tile_m, tile_n) for tile_m in (64, 128) for tile_n in (8, 16, 32)),
        (128, 64),
        (128, 128),
        (256, 128),
    ),
}
# NOTE: a stage of 128 BF16 tokens leaves no room for a third one on sm_86.
_FP4_TILE_SHAPES = {
    MainloopKind.Mma: tuple((128, tile_n) for tile_n in (8, 16, 32, 64)),
}

# NOTE: 99 KiB is the most a block may use on sm_86, sm_89 and sm_120; one plan of the portable loop
# serves every architecture, and two such blocks fit an SM of sm_90 and sm_100.
_SMEM_LIMIT = {MainloopKind.Mma: 99 * 1024, MainloopKind.Wgmma: 227 * 1024}
_MAX_STAGES = {MainloopKind.Mma: 5, MainloopKind.Wgmma: 24}
_MAX_FP4_STAGES = 8  # of half the bytes
_TILE_QUEUE_DEPTH = 4  # kDepth of gemm::TileQueue

# What gemm::SortedOrder sorts, a slot a lane of one warp, into tiles of so many tokens.
MAX_SORTED_SLOTS = 32
SORTED_TILE_N = 8
_SORTED_ORDER_BYTES = (16 + 4 * SORTED_TILE_N + 4) * MAX_SORTED_SLOTS + 4
_SMEM_ALIGNMENT = {MainloopKind.Mma: 128, MainloopKind.Wgmma: 1024}


def mainloop_for(arch: str, moe_format: MoeFormat = MoeFormat.Fp8) -> MainloopKind:
    """Best main loop that an architecture (``sm_90a``, ``compute_80``) can run."""
    has_wgmma = arch.endswith("_90a") and not moe_format.has_block_scales
    return MainloopKind.Wgmma if has_wgmma else MainloopKind.Mma


def tile_shapes(kind: MainloopKind, moe_format: MoeFormat) -> tuple[tuple[int, int], ...]:
    """Tiles that a main loop has: weight rows, tokens."""
    return (_FP4_TILE_SHAPES if moe_format.has_block_scales else _TILE_SHAPES)[kind]


def sort_choices(tile_n: int, num_slots: int = 1) -> tuple[bool, ...]:
    """Whether the GEMMs may sort the slots themselves, too."""
    few = tile_n == SORTED_TILE_N and num_slots <= MAX_SORTED_SLOTS
    return (False, True) if few else (False,)


def gather_choices(kind: MainloopKind, tile_m: int, tile_n: int) -> tuple[bool, ...]:
    """Whether FC1 may gather token rows itself, may read a permuted copy, or both."""
    if kind is MainloopKind.Mma or tile_n < 16:
        return (True,)
    # NOTE: beside the accumulators of the largest tile no registers are left to gather with.
    return (False,) if tile_m == 256 else (True, False)


def _features(stage: GemmStage, activation: ActivationType, weight_rows: int) -> int:
    is_gated = stage is GemmStage.Fc1 and activation.is_gated
    return weight_rows // 2 if is_gated else weight_rows


def output_row_bytes(
    stage: GemmStage, moe_format: MoeFormat, activation: ActivationType, weight_rows: int
) -> int:
    """Bytes of one token's output behind so many weight rows."""
    is_e4m3 = stage is GemmStage.Fc1 and not moe_format.has_block_scales
    return _features(stage, activation, weight_rows) * (1 if is_e4m3 else 2)


def staged_row_bytes(
    stage: GemmStage, moe_format: MoeFormat, activation: ActivationType, weight_rows: int
) -> int:
    """Bytes that a token's output takes on its way through shared memory, padding included."""
    if stage is GemmStage.Fc1 and moe_format.has_block_scales:
        num_bytes = 4 * _features(stage, activation, weight_rows)  # FP32 until blocks are complete
    else:
        num_bytes = output_row_bytes(stage, moe_format, activation, weight_rows)
    return num_bytes + 16  # kPitch of epilogue::TileStore


def _stage_bytes(moe_format: MoeFormat, tile_m: int, tile_n: int) -> int:
    """Weights, their scales and tokens of one step of K."""
    if not moe_format.has_block_scales:
        return (tile_m + tile_n) * TILE_K
    return tile_m * TILE_K // 2 + tile_m * TILE_K // moe_format.scale_block + tile_n * TILE_K * 2


def shared_memory(
    kind: MainloopKind,
    moe_format: MoeFormat,
    tile_m: int,
    tile_n: int,
    staging_bytes: int,
    scaled_rows: int,
    *,
    sort_slots: bool,
) -> tuple[int, int]:
    """Stages that fit and bytes of ``Smem`` of the main loop."""
    stage_bytes = _stage_bytes(moe_format, tile_m, tile_n)
    alignment = _SMEM_ALIGNMENT[kind]
    most = _MAX_FP4_STAGES if moe_format.has_block_scales else _MAX_STAGES[kind]
    fixed = 4 * scaled_rows  # token_scale
    if sort_slots:
        fixed += -(-_SORTED_ORDER_BYTES // alignment) * alignment
    if kind is MainloopKind.Mma:
        fixed += 8 * tile_n  # token_offset; the ring is also the staging memory
    else:
        fixed += staging_bytes + (4 + 16) * _TILE_QUEUE_DEPTH
        stage_bytes += 16  # full, empty
    num_stages = min(most, (_SMEM_LIMIT[kind] - fixed) // stage_bytes)
    return num_stages, -(-(num_stages * stage_bytes + fixed) // alignment) * alignment
