"""Sizes and formats in; tiles, specializations, grids and buffer sizes out. Pure: no GPU.

A plan depends on nothing a kernel computes: grids and buffers are worst cases over all routings of
the given sizes, so that a captured CUDA graph replays with any routing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from cupy_moe.kernels.expand import ExpandConfig, all_expand_configs
from cupy_moe.kernels.finalize import FinalizeConfig, all_finalize_configs
from cupy_moe.kernels.finalize_rmsnorm import (
    FinalizeRmsnormConfig,
    all_finalize_rmsnorm_configs,
)
from cupy_moe.kernels.grouped_gemm import (
    GemmConfig,
    GemmStage,
    MainloopKind,
    all_gemm_configs,
    mainloop_for,
)
from cupy_moe.kernels.permute import PermuteConfig, all_permute_configs, permute_config
from cupy_moe.kernels.route import RouteConfig, all_route_configs, route_config
from cupy_moe.problem import DeviceTraits, MoeProblem, RoutingSource
from cupy_moe.tiling import (
    Tiling,
    choose_tiling,
    prefetch_steps,
    streams_weights,
    takes_tiles,
    tile_candidates,
)

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import KernelSpec

__all__ = ["KernelConfig", "MoePlan", "ScratchLayout", "all_specializations", "plan_moe"]

KernelConfig: TypeAlias = (
    "RouteConfig | PermuteConfig | ExpandConfig | GemmConfig | FinalizeConfig"
    " | FinalizeRmsnormConfig"
)

# Every scratch buffer starts on its own 256 bytes, as allocators and 16-byte vectors want it.
SCRATCH_ALIGNMENT = 256


@dataclass(frozen=True)
class ScratchLayout:
    """Offsets in bytes of named buffers inside one allocation."""

    offsets: dict[str, int]
    num_bytes: int

    @classmethod
    def pack(cls, buffers: Iterable[tuple[str, int]]) -> ScratchLayout:
        """Lay the buffers out one after the other, each aligned."""
        offsets = {}
        end = 0
        for name, size in buffers:
            offsets[name] = end
            end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return cls(offsets, end)


@dataclass(frozen=True)
class MoePlan:
    """Specializations, grids and buffers of one problem on one device."""

    arch: str
    tile_n: int
    capacity: int  # rows of the permuted buffers
    route: RouteConfig | None
    permute: PermuteConfig | None  # None: the GEMMs sort the slots themselves
    expand: ExpandConfig | None
    expand_grid: int
    fc1: GemmConfig
    fc2: GemmConfig
    fc1_grid: int
    fc2_grid: int
    take_tiles: bool  # blocks take tiles from a counter instead of walking in a fixed stride
    stream_weights: bool  # they leave L2 first
    prefetch_steps: int  # of K, of a block's most probable first tile, before the order is known
    finalize: FinalizeConfig | None
    scratch: ScratchLayout


def max_token_tiles(num_slots: int, local_num_experts: int, tile_n: int) -> int:
    """Most token tiles any routing can need: one an expert hit, and full ones for the rest."""
    experts_hit = min(num_slots, local_num_experts)
    return experts_hit + (num_slots - experts_hit) // tile_n


def _persistent_grid(config: GemmConfig, rows: int, token_tiles: int, num_sms: int) -> int:
    return max(1, min(num_sms * config.min_blocks, rows // config.tile_m * token_tiles))


def _scratch_buffers(
    problem: MoeProblem, capacity: int, token_tiles: int, *, sort: bool
) -> list[tuple[str, int]]:
    """Buffers of a plan; what the caller receives is not among them."""
    buffers = [("intermediate", capacity * problem.intermediate_size)]
    if not sort:
        buffers += [
            ("permuted_to_expanded", 4 * capacity),
            ("tile_info", 16 * token_tiles),
            ("schedule", 4 * (1 + len(GemmStage))),
        ]
    if problem.routing_source is RoutingSource.Logits:
        buffers.append(("topk_ids", 4 * problem.num_slots))
    if problem.do_finalize:
        buffers.append(("expanded_to_permuted", 4 * problem.num_slots))
        buffers.append(("gemm2_output", 2 * capacity * problem.hidden_size))
        if problem.routing_source is not RoutingSource.Unpacked:
            buffers.append(("expert_weights", 2 * problem.num_slots))
    return buffers


@lru_cache(maxsize=4096)
def plan_moe(problem: MoeProblem, device: DeviceTraits, tiling: Tiling | None = None) -> MoePlan:
    """Plan one layer of at least one token, with the given tiling or the best one known.

    Raises
    ------
    ValueError
        If the tiling is none of `cupy_moe.tiling.tile_candidates`.
    """
    tiling = tiling or choose_tiling(problem, device)
    if tiling not in tile_candidates(problem, device):
        raise ValueError(f"tiling {tiling} does not fit {problem} on {device.arch}.")
    kind, tile_n = mainloop_for(device.arch), tiling.tile_n
    token_tiles = max_token_tiles(problem.num_slots, problem.local_num_experts, tile_n)
    capacity = token_tiles * tile_n
    fc1 = GemmConfig.make(
        GemmStage.Fc1,
        problem.activation,
        kind,
        tiling.fc1_tile_m,
        tile_n,
        gather_tokens=tiling.gather,
        sort_slots=tiling.sort,
    )
    fc2 = GemmConfig.make(
        GemmStage.Fc2,
        problem.activation,
        kind,
        tiling.fc2_tile_m,
        tile_n,
        gather_tokens=False,
        sort_slots=tiling.sort,
    )
    expand = None if tiling.gather else ExpandConfig()
    from_logits = problem.routing_source is RoutingSource.Logits
    permute = permute_config(
        packed_ids=problem.routing_source is RoutingSource.Packed,
        num_slots=problem.num_slots,
        local_num_experts=problem.local_num_experts,
        arch=device.arch,
    )
    return MoePlan(
        arch=device.arch,
        tile_n=tile_n,
        capacity=capacity,
        route=route_config(problem) if from_logits else None,
        permute=None if tiling.sort else permute,
        expand=expand,
        expand_grid=expand.grid(capacity, device.num_sms) if expand else 0,
        fc1=fc1,
        fc2=fc2,
        fc1_grid=_persistent_grid(fc1, problem.fc1_rows, token_tiles, device.num_sms),
        take_tiles=takes_tiles(problem, fc1, device.num_sms),
        stream_weights=streams_weights(problem, tile_n),
        prefetch_steps=prefetch_steps(problem, fc1, device.num_sms),
        fc2_grid=_persistent_grid(fc2, problem.hidden_size, token_tiles, device.num_sms),
        finalize=FinalizeConfig() if problem.do_finalize else None,
        scratch=ScratchLayout.pack(
            _scratch_buffers(problem, capacity, token_tiles, sort=tiling.sort)
        ),
    )


def all_specializations(arch: str) -> list[KernelSpec]:
    """Every translation unit any plan for an architecture can ask for."""
    configs: list[KernelConfig] = [
        *all_route_configs(),
        *all_permute_configs(arch),
        *(all_expand_configs() if mainloop_for(arch) is MainloopKind.Wgmma else []),
        *all_gemm_configs(mainloop_for(arch)),
        *all_finalize_configs(),
        *all_finalize_rmsnorm_configs(),
    ]
    return [config.spec() for config in configs]
