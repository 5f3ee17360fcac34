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
    "TILE_M",
    "TILE_N_CHOICES",
    "GemmConfig",
    "GemmStage",
    "all_gemm_configs",
    "launch_grouped_gemm",
]

PARAMS = ParamLayout(
    ("weights", "ptr"),
    ("tokens", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("tile_expert", "ptr"),
    ("num_n_tiles", "ptr"),
    ("output_scales", "ptr"),
    ("gate_scales", "ptr"),
    ("clamp_limits", "ptr"),
    ("token_scales", "ptr"),
    ("output", "ptr"),
    ("m", "i32"),
    ("k", "i32"),
    ("top_k", "i32"),
    ("token_scales_are_f32", "i32"),
)

TILE_M = 128
TILE_K = 128
TILE_N_CHOICES = (8, 16, 32, 64, 128)

SUPPORTED_ACTIVATIONS = (
    ActivationType.Silu,
    ActivationType.Swiglu,
    ActivationType.Geglu,
    ActivationType.Relu2,
    ActivationType.SwigluStep,
    ActivationType.Identity,
    ActivationType.Situ,
)

# NOTE: 99 KiB is the most a block may use on sm_86, sm_89 and sm_120; one plan serves every
# architecture, and two such blocks fit an SM of sm_90 and sm_100.
_SMEM_LIMIT = 99 * 1024
_MAX_STAGES = 5


class GemmStage(Enum):
    """The two GEMMs of a layer; mirrors ``GemmStage`` in ``common/types.cuh``."""

    Fc1 = 0
    Fc2 = 1


@dataclass(frozen=True)
class GemmConfig:
    """Specialization of the grouped GEMM: a tile of ``tile_m`` weight rows by ``tile_n`` tokens."""

    gemm_stage: GemmStage
    activation: ActivationType
    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    warps_m: int
    warps_n: int
    min_blocks: int
    smem_bytes: int

    @classmethod
    def make(cls, stage: GemmStage, activation: ActivationType, tile_n: int) -> GemmConfig:
        """Fill in what follows from the token tile; FC2 has no activation of its own."""
        if tile_n not in TILE_N_CHOICES:
            raise ValueError(f"tile_n must be one of {TILE_N_CHOICES}, got {tile_n}.")
        stage_bytes = (TILE_M + tile_n) * TILE_K
        row_bytes = (8 + 4) * tile_n  # token_offset and token_scale of gemm::SmemPlan
        num_stages = min(_MAX_STAGES, (_SMEM_LIMIT - row_bytes) // stage_bytes)
        smem_bytes = -(-(num_stages * stage_bytes + row_bytes) // 128) * 128
        return cls(
            gemm_stage=stage,
            activation=activation if stage is GemmStage.Fc1 else ActivationType.Identity,
            tile_m=TILE_M,
            tile_n=tile_n,
            tile_k=TILE_K,
            num_stages=num_stages,
            warps_m=4,
            warps_n=2 if tile_n >= 32 else 1,
            # NOTE: a register cap of two blocks an SM makes larger token tiles spill (NVRTC 13.0).
            min_blocks=2 if tile_n <= 32 else 1,
            smem_bytes=smem_bytes,
        )

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("grouped_gemm", self, PARAMS)


def all_gemm_configs() -> list[GemmConfig]:
    """Every specialization a plan can ask for."""
    fc1 = [
        GemmConfig.make(GemmStage.Fc1, activation, tile_n)
        for activation in SUPPORTED_ACTIVATIONS
        for tile_n in TILE_N_CHOICES
    ]
    fc2 = [
        GemmConfig.make(GemmStage.Fc2, ActivationType.Identity, tile_n) for tile_n in TILE_N_CHOICES
    ]
    return fc1 + fc2


def launch_grouped_gemm(
    function: Function,
    config: GemmConfig,
    num_blocks: int,
    *,
    weights: int,
    tokens: int,
    permuted_to_expanded: int,
    tile_expert: int,
    num_n_tiles: int,
    output_scales: int,
    gate_scales: int,
    clamp_limits: int,
    token_scales: int,
    output: int,
    m: int,
    k: int,
    top_k: int,
    token_scales_are_f32: bool,
    stream: int,
    pdl: bool,
) -> None:
    """Launch the loaded ``config``; addresses as in ``Params`` of ``grouped_gemm.cu``."""
    params = PARAMS.pack(
        weights,
        tokens,
        permuted_to_expanded,
        tile_expert,
        num_n_tiles,
        output_scales,
        gate_scales,
        clamp_limits,
        token_scales,
        output,
        m,
        k,
        top_k,
        token_scales_are_f32,
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
