"""Launcher of ``grouped_gemm.cu``: FC1 and FC2 over all experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind
from cupy_moe.types import ActivationType

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = [
    "PARAMS",
    "SUPPORTED_ACTIVATIONS",
    "TILE_K",
    "TILE_SHAPES",
    "GemmConfig",
    "GemmStage",
    "MainloopKind",
    "all_gemm_configs",
    "bind_grouped_gemm",
    "gather_choices",
    "mainloop_for",
    "sort_choices",
]

PARAMS = ParamLayout(
    ("token_map", "tensor_map"),
    ("weight_map", "tensor_map"),
    ("weights", "ptr"),
    ("tokens", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("tile_info", "ptr"),
    ("num_n_tiles", "ptr"),
    ("tile_counter", "ptr"),
    ("output_scales", "ptr"),
    ("gate_scales", "ptr"),
    ("clamp_limits", "ptr"),
    ("token_scales", "ptr"),
    ("output", "ptr"),
    ("topk_ids", "ptr"),
    ("expert_weights", "ptr"),
    ("expanded_to_permuted", "ptr"),
    ("num_slots", "i32"),
    ("packed_ids", "i32"),
    ("local_num_experts", "i32"),
    ("local_expert_offset", "i32"),
    ("m", "i32"),
    ("k", "i32"),
    ("top_k", "i32"),
    ("token_scales_are_f32", "i32"),
    ("stream_weights", "i32"),
    ("prefetch_steps", "i32"),
)

TILE_K = 128

SUPPORTED_ACTIVATIONS = (
    ActivationType.Silu,
    ActivationType.Swiglu,
    ActivationType.Geglu,
    ActivationType.Relu2,
    ActivationType.SwigluStep,
    ActivationType.Identity,
    ActivationType.Situ,
)


class GemmStage(Enum):
    """The two GEMMs of a layer; mirrors ``GemmStage`` in ``common/types.cuh``."""

    Fc1 = 0
    Fc2 = 1


class MainloopKind(Enum):
    """How the tensor cores are fed; mirrors ``MainloopKind`` in ``common/types.cuh``."""

    Mma = 0
    Wgmma = 1


# Tiles of each main loop: weight rows x tokens.
TILE_SHAPES = {
    MainloopKind.Mma: tuple((128, tile_n) for tile_n in (8, 16, 32, 64, 128)),
    MainloopKind.Wgmma: (
        *((tile_m, tile_n) for tile_m in (64, 128) for tile_n in (8, 16, 32)),
        (128, 64),
        (128, 128),
        (256, 128),
    ),
}

# NOTE: 99 KiB is the most a block may use on sm_86, sm_89 and sm_120; one plan of the portable loop
# serves every architecture, and two such blocks fit an SM of sm_90 and sm_100.
_SMEM_LIMIT = {MainloopKind.Mma: 99 * 1024, MainloopKind.Wgmma: 227 * 1024}
_MAX_STAGES = {MainloopKind.Mma: 5, MainloopKind.Wgmma: 24}
_TILE_QUEUE_DEPTH = 4  # kDepth of gemm::TileQueue

# What gemm::SortedOrder sorts, a slot a lane of one warp, into tiles of so many tokens.
MAX_SORTED_SLOTS = 32
SORTED_TILE_N = 8
_SORTED_ORDER_BYTES = (16 + 4 * SORTED_TILE_N + 4) * MAX_SORTED_SLOTS + 4
_SMEM_ALIGNMENT = {MainloopKind.Mma: 128, MainloopKind.Wgmma: 1024}


def mainloop_for(arch: str) -> MainloopKind:
    """Best main loop that an architecture (``sm_90a``, ``compute_80``) can run."""
    return MainloopKind.Wgmma if arch.endswith("_90a") else MainloopKind.Mma


@dataclass(frozen=True)
class GemmConfig:
    """Specialization of the grouped GEMM: a tile of ``tile_m`` weight rows by ``tile_n`` tokens."""

    gemm_stage: GemmStage
    activation: ActivationType
    mainloop_kind: MainloopKind
    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    warps_m: int  # that multiply
    warps_n: int
    num_threads: int
    min_blocks: int
    gather_tokens: bool  # by permuted_to_expanded; else rows are in place
    sort_slots: bool  # itself; else a kernel before has made the maps
    staging_bytes: int  # of one group of threads that shares output rows
    smem_bytes: int

    @classmethod
    def make(
        cls,
        stage: GemmStage,
        activation: ActivationType,
        kind: MainloopKind,
        tile_m: int,
        tile_n: int,
        *,
        gather_tokens: bool,
        sort_slots: bool = False,
    ) -> GemmConfig:
        """Fill in what follows from the tile; FC2 has no activation of its own."""
        if (tile_m, tile_n) not in TILE_SHAPES[kind]:
            raise ValueError(
                f"tile_m, tile_n must be one of {TILE_SHAPES[kind]} for {kind.name}, "
                f"got {tile_m}, {tile_n}."
            )
        activation = activation if stage is GemmStage.Fc1 else ActivationType.Identity
        is_wgmma = kind is MainloopKind.Wgmma
        groups = 2 if is_wgmma and tile_m >= 128 else 1
        staged_tokens = min(tile_n, 32) if is_wgmma else tile_n
        row_bytes = _output_row_bytes(stage, activation, tile_m // groups)
        staging_bytes = staged_tokens * (row_bytes + 16)  # kPitch of epilogue::TileStore
        scaled_rows = groups * (tile_n if stage is GemmStage.Fc1 or not is_wgmma else 1)
        num_stages, smem_bytes = _shared_memory(
            kind, tile_m, tile_n, 2 * groups * staging_bytes, scaled_rows, sort_slots=sort_slots
        )
        warps_n = 2 if not is_wgmma and tile_n >= 32 else 1
        warps_m = 4 * groups
        producer_warps = 4 if is_wgmma else 0
        return cls(
            gemm_stage=stage,
            activation=activation,
            mainloop_kind=kind,
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=TILE_K,
            num_stages=num_stages,
            warps_m=warps_m,
            warps_n=warps_n,
            num_threads=32 * (warps_m * warps_n + producer_warps),
            # NOTE: a register cap of two blocks an SM makes larger token tiles spill (NVRTC 13.0).
            min_blocks=2 if not is_wgmma and tile_n <= 32 else 1,
            gather_tokens=gather_tokens,
            sort_slots=sort_slots,
            staging_bytes=staging_bytes,
            smem_bytes=smem_bytes,
        )

    @property
    def token_box(self) -> int:
        """Rows of one copy of tokens that are in place."""
        return min(self.tile_n, 32)

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("grouped_gemm", self, PARAMS)


def _output_row_bytes(stage: GemmStage, activation: ActivationType, weight_rows: int) -> int:
    """Bytes of one token's output behind so many weight rows."""
    if stage is GemmStage.Fc2:
        return 2 * weight_rows
    return weight_rows // 2 if activation.is_gated else weight_rows


def _shared_memory(
    kind: MainloopKind,
    tile_m: int,
    tile_n: int,
    staging_bytes: int,
    scaled_rows: int,
    *,
    sort_slots: bool,
) -> tuple[int, int]:
    """Stages that fit and bytes of ``Smem`` of the main loop."""
    stage_bytes = (tile_m + tile_n) * TILE_K
    alignment = _SMEM_ALIGNMENT[kind]
    fixed = 4 * scaled_rows  # token_scale
    if sort_slots:
        fixed += -(-_SORTED_ORDER_BYTES // alignment) * alignment
    if kind is MainloopKind.Mma:
        fixed += 8 * tile_n  # token_offset; the ring is also the staging memory
    else:
        fixed += staging_bytes + (4 + 16) * _TILE_QUEUE_DEPTH
        stage_bytes += 16  # full, empty
    num_stages = min(_MAX_STAGES[kind], (_SMEM_LIMIT[kind] - fixed) // stage_bytes)
    return num_stages, -(-(num_stages * stage_bytes + fixed) // alignment) * alignment


def all_gemm_configs(kind: MainloopKind) -> list[GemmConfig]:
    """Every specialization a plan can ask for."""
    fc1 = [
        GemmConfig.make(
            GemmStage.Fc1, activation, kind, *shape, gather_tokens=gather, sort_slots=sort
        )
        for activation in SUPPORTED_ACTIVATIONS
        for shape in TILE_SHAPES[kind]
        for gather in gather_choices(kind, *shape)
        for sort in sort_choices(shape[1])
    ]
    fc2 = [
        GemmConfig.make(
            GemmStage.Fc2,
            ActivationType.Identity,
            kind,
            *shape,
            gather_tokens=False,
            sort_slots=sort,
        )
        for shape in TILE_SHAPES[kind]
        for sort in sort_choices(shape[1])
    ]
    return fc1 + fc2


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


def bind_grouped_gemm(
    function: Function,
    config: GemmConfig,
    num_blocks: int,
    *,
    token_map: bytes,
    weight_map: bytes,
    weights: int,
    tokens: int,
    permuted_to_expanded: int,
    tile_info: int,
    num_n_tiles: int,
    tile_counter: int,
    output_scales: int,
    gate_scales: int,
    clamp_limits: int,
    token_scales: int,
    output: int,
    topk_ids: int,
    expert_weights: int,
    expanded_to_permuted: int,
    num_slots: int,
    packed_ids: bool,
    local_num_experts: int,
    local_expert_offset: int,
    m: int,
    k: int,
    top_k: int,
    token_scales_are_f32: bool,
    stream_weights: bool,
    prefetch_steps: int,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(
        token_map,
        weight_map,
        weights,
        tokens,
        permuted_to_expanded,
        tile_info,
        num_n_tiles,
        tile_counter,
        output_scales,
        gate_scales,
        clamp_limits,
        token_scales,
        output,
        topk_ids,
        expert_weights,
        expanded_to_permuted,
        num_slots,
        packed_ids,
        local_num_experts,
        local_expert_offset,
        m,
        k,
        top_k,
        token_scales_are_f32,
        stream_weights,
        prefetch_steps,
    )
    return bind(
        function,
        params,
        grid=(num_blocks, 1, 1),
        block=config.num_threads,
        smem=config.smem_bytes,
        stream=stream,
        pdl=pdl,
    )
