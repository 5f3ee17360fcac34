"""Sizes and formats in; tiles, specializations, grids and buffer sizes out. Pure: no GPU.

A plan depends on nothing a kernel computes: grids and buffers are worst cases over all routings of
the given sizes, so that a captured CUDA graph replays with any routing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from cupy_moe.kernels.add_rows import AddRowsConfig, all_add_rows_configs
from cupy_moe.kernels.finalize import FinalizeConfig, all_finalize_configs
from cupy_moe.kernels.finalize_rmsnorm import (
    FinalizeRmsnormConfig,
    all_finalize_rmsnorm_configs,
)
from cupy_moe.kernels.gemm_tiles import GemmStage, mainloop_for
from cupy_moe.kernels.grouped_gemm import GemmConfig, all_gemm_configs
from cupy_moe.kernels.permute import (
    SCHEDULE_WORDS,
    PermuteConfig,
    all_permute_configs,
    permute_config,
)
from cupy_moe.kernels.place_tokens import PlaceTokensConfig, all_place_tokens_configs
from cupy_moe.kernels.route import RouteConfig, all_route_configs, route_config
from cupy_moe.problem import DeviceTraits, MoeProblem, RoutingSource
from cupy_moe.tiling import (
    Tiling,
    choose_tiling,
    multiprocessors,
    prefetch_steps,
    streams_weights,
    takes_tiles,
    tile_candidates,
)

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import KernelSpec

__all__ = [
    "GemmPart",
    "KernelConfig",
    "MoePlan",
    "ScratchLayout",
    "all_specializations",
    "plan_moe",
]

KernelConfig: TypeAlias = (
    "RouteConfig | PermuteConfig | PlaceTokensConfig | GemmConfig | AddRowsConfig "
    "| FinalizeConfig | FinalizeRmsnormConfig"
)

# Every scratch buffer starts on its own 256 bytes, as allocators and 16-byte vectors want it.
SCRATCH_ALIGNMENT = 256

# Buffers of FC2's output where every partition has a part of K.
PARTIAL_SUMS = ("partial_sums_0", "partial_sums_1")


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
class GemmPart:
    """What one partition computes of a GEMM; without partitions, all of it."""

    rows: int  # of the weights
    k: int
    grid: int
    token_offset: int = 0  # bytes to the first column of K
    first_feature: int = 0  # of the output's rows
    output_buffer: str = ""  # of partial sums, in the scratch


@dataclass(frozen=True)
class MoePlan:
    """Specializations, grids and buffers of one problem on one device."""

    arch: str
    tile_n: int
    capacity: int  # rows of the permuted buffers
    route: RouteConfig | None
    permute: PermuteConfig | None  # None: the GEMMs sort the slots themselves
    place: PlaceTokensConfig | None  # None: FC1 gathers E4M3 rows from the caller's array
    fc1: GemmConfig
    fc2: GemmConfig
    fc1_parts: tuple[GemmPart, ...]  # one per partition
    fc2_parts: tuple[GemmPart, ...]
    take_tiles: bool  # blocks take tiles from a counter instead of walking in a fixed stride
    stream_weights: bool  # they leave L2 first
    prefetch_steps: int  # of K, of a block's most probable first tile, before the order is known
    add_rows: AddRowsConfig | None  # of partial sums that are handed out
    finalize: FinalizeConfig | None
    scratch: ScratchLayout


def max_token_tiles(num_slots: int, local_num_experts: int, tile_n: int) -> int:
    """Most token tiles any routing can need: one an expert hit, and full ones for the rest."""
    experts_hit = min(num_slots, local_num_experts)
    return experts_hit + (num_slots - experts_hit) // tile_n


def _persistent_grid(config: GemmConfig, rows: int, token_tiles: int, num_sms: int) -> int:
    cluster = config.cluster
    most = num_sms * config.min_blocks // cluster
    return cluster * max(1, min(most, -(-rows // (cluster * config.tile_m)) * token_tiles))


def _parts(
    problem: MoeProblem, fc1: GemmConfig, fc2: GemmConfig, token_tiles: int, num_sms: int
) -> tuple[tuple[GemmPart, ...], tuple[GemmPart, ...]]:
    """Shares of the partitions in FC1 and FC2."""

    def part(config: GemmConfig, rows: int, k: int, sms: int, *place: int | str) -> GemmPart:
        token_offset, first_feature, buffer = place or (0, 0, "")
        grid = _persistent_grid(config, rows, token_tiles, sms)
        return GemmPart(rows, k, grid, int(token_offset), int(first_feature), str(buffer))

    hidden, inter = problem.hidden_size, problem.intermediate_size
    if problem.strategy is None:
        return (
            (part(fc1, problem.fc1_rows, hidden, num_sms),),
            (part(fc2, hidden, inter, num_sms),),
        )
    sms = list(enumerate(problem.partition_sms))
    fc1_rows, fc2_rows = problem.fc1_part_rows, problem.fc2_part_rows
    fc1_parts = (part(fc1, fc1_rows, hidden, n, 0, p * inter // 2, "") for p, n in sms)
    if problem.strategy == "tp_n_tp_n":
        fc2_parts = (part(fc2, fc2_rows, inter, n, 0, p * hidden // 2, "") for p, n in sms)
    else:
        fc2_parts = (
            part(fc2, fc2_rows, inter // 2, n, p * inter, 0, PARTIAL_SUMS[p]) for p, n in sms
        )
    return tuple(fc1_parts), tuple(fc2_parts)


def _scratch_buffers(
    problem: MoeProblem, capacity: int, token_tiles: int, tiling: Tiling
) -> list[tuple[str, int]]:
    """Buffers of a plan; what the caller receives is not among them."""
    has_blocks = problem.moe_format.has_block_scales
    element = 2 if has_blocks else 1
    buffers = [("intermediate", element * capacity * problem.intermediate_size)]
    if has_blocks and tiling.gather:
        buffers.append(("tokens", element * problem.num_tokens * problem.hidden_size))
    if not tiling.sort:
        buffers += [
            ("permuted_to_expanded", 4 * capacity),
            ("tile_info", 16 * token_tiles),
            ("schedule", 4 * SCHEDULE_WORDS),
        ]
    if problem.routing_source is RoutingSource.Logits:
        buffers.append(("topk_ids", 4 * problem.num_slots))
    row_bytes = 2 * capacity * problem.hidden_size
    if problem.strategy == "tp_n_tp_k":
        buffers += [(name, row_bytes) for name in PARTIAL_SUMS]
        if not tiling.gather:
            buffers.append(("permuted_tokens", row_bytes))
    elif problem.do_finalize:
        buffers.append(("gemm2_output", row_bytes))
    if problem.do_finalize:
        buffers.append(("expanded_to_permuted", 4 * problem.num_slots))
        if problem.routing_source is not RoutingSource.Unpacked or problem.rounds_weights:
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
    kind = mainloop_for(device.arch)
    tile_n = tiling.tile_n
    token_tiles = max_token_tiles(problem.num_slots, problem.local_num_experts, tile_n)
    capacity = token_tiles * tile_n
    fc1 = GemmConfig.make(
        GemmStage.Fc1,
        problem.activation,
        kind,
        tiling.fc1_tile_m,
        tile_n,
        moe_format=problem.moe_format,
        gather_tokens=tiling.gather,
        sort_slots=tiling.sort,
    )
    fc2 = GemmConfig.make(
        GemmStage.Fc2,
        problem.activation,
        kind,
        tiling.fc2_tile_m,
        tile_n,
        moe_format=problem.moe_format,
        gather_tokens=False,
        sort_slots=tiling.sort,
    )
    fc1_parts, fc2_parts = _parts(problem, fc1, fc2, token_tiles, device.num_sms)
    num_sms = multiprocessors(problem, device)
    adds_rows = problem.strategy == "tp_n_tp_k" and not problem.do_finalize
    places = problem.moe_format.has_block_scales or not tiling.gather
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
        place=PlaceTokensConfig(problem.moe_format) if places else None,
        fc1=fc1,
        fc2=fc2,
        fc1_parts=fc1_parts,
        fc2_parts=fc2_parts,
        take_tiles=takes_tiles(problem, fc1, num_sms),
        stream_weights=streams_weights(problem, tile_n),
        prefetch_steps=prefetch_steps(problem, fc1, num_sms),
        add_rows=AddRowsConfig() if adds_rows else None,
        finalize=FinalizeConfig(split_sums=problem.strategy == "tp_n_tp_k")
        if problem.do_finalize
        else None,
        scratch=ScratchLayout.pack(_scratch_buffers(problem, capacity, token_tiles, tiling)),
    )


def all_specializations(arch: str) -> list[KernelSpec]:
    """Every translation unit any plan for an architecture can ask for."""
    configs: list[KernelConfig] = [
        *all_route_configs(),
        *all_permute_configs(arch),
        *all_place_tokens_configs(),
        *all_gemm_configs(arch),
        *all_add_rows_configs(),
        *all_finalize_configs(),
        *all_finalize_rmsnorm_configs(),
    ]
    return [config.spec() for config in configs]
