"""Launcher of ``grouped_gemm.cu``: FC1 and FC2 over all experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import ParamLayout, launch
from cupy_moe.types import ActivationType

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = [
    "PARAMS",
    "SUPPORTED_ACTIVATIONS",
    "TILE_SHAPES",
    "GemmConfig",
    "GemmStage",
    "MainloopKind",
    "all_gemm_configs",
    "launch_grouped_gemm",
    "mainloop_for",
]

PARAMS = ParamLayout(
    ("weight_map", "tensor_map"),
    ("weights", "ptr"),
    ("tokens", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("tile_expert", "ptr"),
    ("tile_rows", "ptr"),
    ("expert_first_tile", "ptr"),
    ("output_scales", "ptr"),
    ("gate_scales", "ptr"),
    ("clamp_limits", "ptr"),
    ("token_scales", "ptr"),
    ("output", "ptr"),
    ("m", "i32"),
    ("k", "i32"),
    ("top_k", "i32"),
    ("token_scales_are_f32", "i32"),
    ("local_num_experts", "i32"),
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
    stream_weights: bool  # weights leave the L2 cache first
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
        num_stages, smem_bytes = _shared_memory(kind, tile_m, tile_n, groups, staging_bytes)
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
            stream_weights=tile_n < 128,
            staging_bytes=staging_bytes,
            smem_bytes=smem_bytes,
        )

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("grouped_gemm", self, PARAMS)


def _output_row_bytes(stage: GemmStage, activation: ActivationType, weight_rows: int) -> int:
    """Bytes of one token's output behind so many weight rows."""
    if stage is GemmStage.Fc2:
        return 2 * weight_rows
    return weight_rows // 2 if activation.is_gated else weight_rows


def _shared_memory(
    kind: MainloopKind, tile_m: int, tile_n: int, groups: int, staging_bytes: int
) -> tuple[int, int]:
    """Stages that fit and bytes of ``Smem`` of the main loop."""
    stage_bytes = (tile_m + tile_n) * TILE_K
    if kind is MainloopKind.Mma:
        fixed = (8 + 4) * tile_n  # token_offset, token_scale; the ring is also the staging memory
    else:
        fixed = groups * (staging_bytes + 4 * tile_n)  # staging, token_scale
        stage_bytes += 16  # full, empty
    num_stages = min(_MAX_STAGES[kind], (_SMEM_LIMIT[kind] - fixed) // stage_bytes)
    alignment = _SMEM_ALIGNMENT[kind]
    return num_stages, -(-(num_stages * stage_bytes + fixed) // alignment) * alignment


def all_gemm_configs(kind: MainloopKind) -> list[GemmConfig]:
    """Every specialization a plan can ask for."""
    activations = {
        GemmStage.Fc1: SUPPORTED_ACTIVATIONS,
        GemmStage.Fc2: (ActivationType.Identity,),
    }
    return [
        GemmConfig.make(stage, activation, kind, *shape)
        for stage in GemmStage
        for activation in activations[stage]
        for shape in TILE_SHAPES[kind]
    ]


def launch_grouped_gemm(
    function: Function,
    config: GemmConfig,
    num_blocks: int,
    *,
    weight_map: bytes,
    weights: int,
    tokens: int,
    permuted_to_expanded: int,
    tile_expert: int,
    tile_rows: int,
    expert_first_tile: int,
    output_scales: int,
    gate_scales: int,
    clamp_limits: int,
    token_scales: int,
    output: int,
    m: int,
    k: int,
    top_k: int,
    token_scales_are_f32: bool,
    local_num_experts: int,
    stream: int,
    pdl: bool,
) -> None:
    """Launch the loaded ``config``; addresses as in ``Params`` of ``grouped_gemm.cu``."""
    params = PARAMS.pack(
        weight_map,
        weights,
        tokens,
        permuted_to_expanded,
        tile_expert,
        tile_rows,
        expert_first_tile,
        output_scales,
        gate_scales,
        clamp_limits,
        token_scales,
        output,
        m,
        k,
        top_k,
        token_scales_are_f32,
        local_num_experts,
    )
    launch(
        function,
        params,
        grid=(num_blocks, 1, 1),
        block=config.num_threads,
        smem=config.smem_bytes,
        stream=stream,
        pdl=pdl,
    )
