"""Tiles of the grouped GEMM: their shapes, and the shared memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cupy_moe.types import ActivationType, MoeFormat

__all__ = [
    "GemmStage",
    "MainloopKind",
    "TileShape",
    "gather_choices",
    "mainloop_for",
    "output_row_bytes",
    "shared_memory",
    "sort_choices",
    "staged_row_bytes",
    "tile_shape",
    "tile_shapes",
]


class GemmStage(Enum):
    """The two GEMMs of a layer; mirrors ``GemmStage`` in ``common/types.cuh``."""

    Fc1 = 0
    Fc2 = 1


class MainloopKind(Enum):
    """How the tensor cores are fed; mirrors ``MainloopKind`` in ``common/types.cuh``."""

    Mma = 0
    Wgmma = 1


@dataclass(frozen=True)
class TileShape:
    """A tile of the output, and how the threads that multiply share it."""

    tile_m: int  # weight rows
    tile_n: int  # tokens
    tile_k: int = 128  # a stage
    groups: int = 1  # warpgroups of the Hopper loop
    blocks: int = 1  # a multiprocessor
    cluster: int = 1  # blocks, of neighbouring weight tiles, that share tokens


def _portable_shapes(sizes: tuple[int, ...]) -> tuple[TileShape, ...]:
    # NOTE: a register cap of two blocks an SM makes larger token tiles spill (NVRTC 13.0).
    return tuple(TileShape(128, n, blocks=2 if n <= 32 else 1) for n in sizes)


_TILE_SHAPES = {
    MainloopKind.Mma: _portable_shapes((8, 16, 32, 64, 128)),
    MainloopKind.Wgmma: (
        *(TileShape(64, n) for n in (8, 16, 32)),
        *(TileShape(128, n, groups=2) for n in (8, 16, 32, 64, 128)),
        TileShape(256, 128, groups=2),
    ),
}
_FP4_TILE_SHAPES = {
    # NOTE: a stage of 128 BF16 tokens leaves no room for a third one on sm_86.
    MainloopKind.Mma: _portable_shapes((8, 16, 32, 64)),
    MainloopKind.Wgmma: (
        TileShape(64, 8, tile_k=256, blocks=3),
        TileShape(128, 8, tile_k=256, blocks=3),
        TileShape(128, 16, tile_k=256, blocks=3),
        TileShape(128, 24, blocks=3),
        TileShape(256, 24, groups=2, blocks=2),
        TileShape(128, 48, groups=2, blocks=2),
        TileShape(256, 48, groups=4),
        TileShape(128, 96, groups=2),
        TileShape(256, 96, groups=4, cluster=2),
        TileShape(128, 160, groups=2, cluster=2),
        TileShape(128, 192, groups=2, cluster=2),
    ),
}

# NOTE: 99 KiB is the most a block may use on sm_86, sm_89 and sm_120; one plan of the portable loop
# serves every architecture, and two such blocks fit an SM of sm_90 and sm_100.
_PORTABLE_SMEM = 99 * 1024
_HOPPER_SMEM = 227 * 1024  # of a block
_HOPPER_SM_SMEM = 228 * 1024  # of all blocks, of which each takes 1 KiB more
_MAX_STAGES = {MainloopKind.Mma: 5, MainloopKind.Wgmma: 24}
_MAX_FP4_STAGES = {MainloopKind.Mma: 8, MainloopKind.Wgmma: 24}  # of half the bytes
_TILE_QUEUE_DEPTH = 4  # kDepth of gemm::TileQueue
_EXPERT_SCALES = 5  # of epilogue::ExpertScales
_SCALE_TILE_ROWS = 128

# What gemm::SortedOrder sorts, a slot a lane of one warp, into tiles of so many tokens.
MAX_SORTED_SLOTS = 32
SORTED_TILE_N = 8
_SORTED_ORDER_BYTES = (16 + 4 * SORTED_TILE_N + 4) * MAX_SORTED_SLOTS + 4
_SMEM_ALIGNMENT = {MainloopKind.Mma: 128, MainloopKind.Wgmma: 1024}


def mainloop_for(arch: str) -> MainloopKind:
    """Best main loop that an architecture (``sm_90a``, ``compute_80``) can run."""
    return MainloopKind.Wgmma if arch.endswith("_90a") else MainloopKind.Mma


def tile_shapes(kind: MainloopKind, moe_format: MoeFormat) -> tuple[TileShape, ...]:
    """Tiles that a main loop has."""
    return (_FP4_TILE_SHAPES if moe_format.has_block_scales else _TILE_SHAPES)[kind]


def tile_shape(kind: MainloopKind, moe_format: MoeFormat, tile_m: int, tile_n: int) -> TileShape:
    """Find the tile of so many weight rows and tokens.

    Raises
    ------
    ValueError
        If the main loop has no such tile.
    """
    shapes = tile_shapes(kind, moe_format)
    for shape in shapes:
        if (shape.tile_m, shape.tile_n) == (tile_m, tile_n):
            return shape
    known = [(shape.tile_m, shape.tile_n) for shape in shapes]
    raise ValueError(
        f"tile_m, tile_n must be one of {known} for {kind.name} and {moe_format.name}, "
        f"got {tile_m}, {tile_n}."
    )


def sort_choices(tile_n: int, num_slots: int = 1) -> tuple[bool, ...]:
    """Whether the GEMMs may sort the slots themselves, too."""
    few = tile_n == SORTED_TILE_N and num_slots <= MAX_SORTED_SLOTS
    return (False, True) if few else (False,)


def gather_choices(kind: MainloopKind, moe_format: MoeFormat, tile_n: int) -> tuple[bool, ...]:
    """Whether FC1 may gather token rows itself, may read a permuted copy, or both."""
    if kind is MainloopKind.Mma or tile_n < 16:
        return (True,)
    # A copy of many rows costs less than what gathering them takes from the products.
    most = 24 if moe_format.has_block_scales else 64
    return (False,) if tile_n > most else (True, False)


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


def _stage_bytes(moe_format: MoeFormat, shape: TileShape) -> int:
    """Weights, their scales and tokens of one step of K."""
    tile_m, tile_n, tile_k = shape.tile_m, shape.tile_n, shape.tile_k
    if not moe_format.has_block_scales:
        return (tile_m + tile_n) * tile_k
    scaled_rows = -(-tile_m // _SCALE_TILE_ROWS) * _SCALE_TILE_ROWS
    scales = scaled_rows * tile_k // moe_format.scale_block
    return tile_m * tile_k // 2 + scales + tile_n * tile_k * 2


def _smem_limit(kind: MainloopKind, blocks: int) -> int:
    """Most bytes that a block may use beside so many of its kind."""
    if kind is MainloopKind.Mma:
        return _PORTABLE_SMEM
    return min(_HOPPER_SMEM, _HOPPER_SM_SMEM // blocks - 1024)


def shared_memory(
    kind: MainloopKind,
    moe_format: MoeFormat,
    shape: TileShape,
    staging_bytes: int,
    scaled_rows: int,
    *,
    sort_slots: bool,
) -> tuple[int, int]:
    """Stages that fit and bytes of ``Smem`` of the main loop."""
    stage_bytes = _stage_bytes(moe_format, shape)
    alignment = _SMEM_ALIGNMENT[kind]
    most = (_MAX_FP4_STAGES if moe_format.has_block_scales else _MAX_STAGES)[kind]
    fixed = 4 * scaled_rows  # token_scale
    if sort_slots:
        fixed += -(-_SORTED_ORDER_BYTES // alignment) * alignment
    if kind is MainloopKind.Mma:
        fixed += 8 * shape.tile_n  # token_offset; the ring is also the staging memory
    else:
        fixed += staging_bytes + (16 + 16) * _TILE_QUEUE_DEPTH
        fixed += 4 * _EXPERT_SCALES * shape.groups
        stage_bytes += 16  # full, empty
    room = _smem_limit(kind, shape.blocks) // alignment * alignment - fixed
    num_stages = min(most, room // stage_bytes)
    return num_stages, -(-(num_stages * stage_bytes + fixed) // alignment) * alignment
