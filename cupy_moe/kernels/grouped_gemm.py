"""Launcher of ``grouped_gemm.cu``: FC1 and FC2 over all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.kernels.gemm_tiles import (
    GemmStage,
    MainloopKind,
    gather_choices,
    mainloop_for,
    shared_memory,
    sort_choices,
    staged_row_bytes,
    tile_shape,
    tile_shapes,
)
from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind
from cupy_moe.types import ActivationType, MoeFormat

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = [
    "FP4_ACTIVATIONS",
    "PARAMS",
    "SUPPORTED_ACTIVATIONS",
    "GemmConfig",
    "all_gemm_configs",
    "bind_grouped_gemm",
    "default_alpha_beta",
]

PARAMS = ParamLayout(
    ("token_map", "tensor_map"),
    ("weight_map", "tensor_map"),
    ("weights", "ptr"),
    ("weight_scales", "ptr"),
    ("tokens", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("tile_info", "ptr"),
    ("num_n_tiles", "ptr"),
    ("tile_counter", "ptr"),
    ("output_scales", "ptr"),
    ("gate_scales", "ptr"),
    ("clamp_limits", "ptr"),
    ("alphas", "ptr"),
    ("betas", "ptr"),
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
    ("token_pitch", "i32"),
    ("output_pitch", "i32"),
    ("first_feature", "i32"),
    ("weight_block_shift", "i32"),
    ("top_k", "i32"),
    ("token_scales_are_f32", "i32"),
    ("stream_weights", "i32"),
    ("prefetch_steps", "i32"),
    ("default_alpha", "f32"),
    ("default_beta", "f32"),
)

SUPPORTED_ACTIVATIONS = (
    ActivationType.Silu,
    ActivationType.Swiglu,
    ActivationType.Geglu,
    ActivationType.Relu2,
    ActivationType.SwigluStep,
    ActivationType.Identity,
    ActivationType.Situ,
)

# Those that FP4 layers are specialized for: their Geglu is a Swiglu of another alpha.
FP4_ACTIVATIONS = (ActivationType.Swiglu, ActivationType.Situ)
NVFP4_ACTIVATIONS = (*FP4_ACTIVATIONS, ActivationType.SwigluStep)
_ACTIVATIONS = {
    MoeFormat.Fp8: SUPPORTED_ACTIVATIONS,
    MoeFormat.Nvfp4: NVFP4_ACTIVATIONS,
    MoeFormat.Mxfp8: FP4_ACTIVATIONS,
    MoeFormat.Bf16: FP4_ACTIVATIONS,
}
_ALPHA_BETA = {
    ActivationType.Swiglu: (1.0, 0.0),
    ActivationType.Geglu: (1.702, 0.0),
    ActivationType.Situ: (1.0, 1.0),
}


def default_alpha_beta(activation: ActivationType) -> tuple[float, float]:
    """Alpha and beta of an FP4 layer's activation where the caller gives none."""
    return _ALPHA_BETA.get(activation, (1.0, 0.0))


@dataclass(frozen=True)
class GemmConfig:
    """Specialization of the grouped GEMM: a tile of ``tile_m`` weight rows by ``tile_n`` tokens."""

    gemm_stage: GemmStage
    moe_format: MoeFormat
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
    cluster: int  # blocks that share tokens
    gather_tokens: bool  # by permuted_to_expanded; else rows are in place
    sort_slots: bool  # itself; else a kernel before has made the maps
    token_box: int  # rows of one copy of tokens that are in place
    staging_bytes: int  # of a buffer of one group of threads that shares output rows
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
        moe_format: MoeFormat = MoeFormat.Fp8,
        gather_tokens: bool,
        sort_slots: bool = False,
    ) -> GemmConfig:
        """Fill in what follows from the tile; FC2 has no activation of its own."""
        shape = tile_shape(kind, moe_format, tile_m, tile_n)
        moe_format, activation = _distinct(stage, moe_format, activation)
        is_wgmma, has_blocks = kind is MainloopKind.Wgmma, moe_format.has_block_scales
        staged_tokens = min(tile_n, 32) if is_wgmma else tile_n
        staging_buffers = 2 if tile_n > staged_tokens else 1
        rows = tile_m // shape.groups
        staging_bytes = staged_tokens * staged_row_bytes(stage, moe_format, activation, rows)
        scales_rows = stage is GemmStage.Fc1 and not has_blocks
        scaled_rows = shape.groups * (tile_n if scales_rows else 1)
        num_stages, smem_bytes = shared_memory(
            kind,
            moe_format,
            shape,
            staging_buffers * shape.groups * staging_bytes,
            scaled_rows,
            sort_slots=sort_slots,
        )
        warps_n = 2 if not is_wgmma and not has_blocks and tile_n >= 32 else 1
        # No FP4 weight is widened by two warps.
        warps_m = 8 if has_blocks and not is_wgmma else 4 * shape.groups
        producer_warps = 4 if is_wgmma else 0
        return cls(
            gemm_stage=stage,
            moe_format=moe_format,
            activation=activation,
            mainloop_kind=kind,
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=shape.tile_k,
            num_stages=num_stages,
            warps_m=warps_m,
            warps_n=warps_n,
            num_threads=32 * (warps_m * warps_n + producer_warps),
            min_blocks=shape.blocks,
            cluster=shape.cluster,
            gather_tokens=gather_tokens,
            sort_slots=sort_slots,
            token_box=tile_n if tile_n <= 48 else 32,
            staging_bytes=staging_bytes,
            smem_bytes=smem_bytes,
        )

    @property
    def token_box_windows(self) -> int:
        """128 bytes of K of one copy of tokens that are in place: a whole stage if it can be."""
        element_bytes = 2 if self.moe_format.has_block_scales else 1
        return self.tile_k * element_bytes // 128 if self.token_box == self.tile_n else 1

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("grouped_gemm", self, PARAMS)


def _distinct(
    stage: GemmStage, moe_format: MoeFormat, activation: ActivationType
) -> tuple[MoeFormat, ActivationType]:
    """Fold what gives the same code: FC2 has no activation and reads MXFP8 as BF16."""
    if stage is GemmStage.Fc2:
        is_mx = moe_format is MoeFormat.Mxfp8
        return MoeFormat.Bf16 if is_mx else moe_format, ActivationType.Identity
    if moe_format.has_block_scales and activation is ActivationType.Geglu:
        return moe_format, ActivationType.Swiglu
    return moe_format, activation


def all_gemm_configs(arch: str) -> list[GemmConfig]:
    """Every specialization a plan for an architecture can ask for."""
    kind = mainloop_for(arch)
    return [config for moe_format in MoeFormat for config in _configs_of(kind, moe_format)]


def _configs_of(kind: MainloopKind, moe_format: MoeFormat) -> list[GemmConfig]:
    fc1 = [
        GemmConfig.make(
            GemmStage.Fc1,
            activation,
            kind,
            shape.tile_m,
            shape.tile_n,
            moe_format=moe_format,
            gather_tokens=gather,
            sort_slots=sort,
        )
        for activation in _ACTIVATIONS[moe_format]
        for shape in tile_shapes(kind, moe_format)
        for gather in gather_choices(kind, moe_format, shape.tile_n)
        for sort in sort_choices(shape.tile_n)
    ]
    if moe_format is MoeFormat.Mxfp8:
        return fc1  # its FC2 is that of BF16
    fc2 = [
        GemmConfig.make(
            GemmStage.Fc2,
            ActivationType.Identity,
            kind,
            shape.tile_m,
            shape.tile_n,
            moe_format=moe_format,
            gather_tokens=False,
            sort_slots=sort,
        )
        for shape in tile_shapes(kind, moe_format)
        for sort in sort_choices(shape.tile_n)
    ]
    return fc1 + fc2


def bind_grouped_gemm(
    function: Function,
    config: GemmConfig,
    num_blocks: int,
    *,
    stream: int,
    pdl: bool,
    **params: int | float | bytes,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``.

    Parameters
    ----------
    function : Function
        ``config.spec()``, loaded.
    config : GemmConfig
    num_blocks : int
        Persistent blocks.
    stream : int
    pdl : bool
    **params
        Every field of ``Params`` of the kernel, by name.
    """
    names = [field.name for field in PARAMS.fields]
    assert params.keys() == set(names)
    return bind(
        function,
        PARAMS.pack(*(params[name] for name in names)),
        grid=(num_blocks, 1, 1),
        block=config.num_threads,
        smem=config.smem_bytes,
        stream=stream,
        pdl=pdl,
        cluster=config.cluster,
    )
