"""Sizes and formats in; tiles, specializations, grids and buffer sizes out. Pure: no GPU.

A plan depends on nothing a kernel computes: grids and buffers are worst cases over all routings of
the given sizes, so that a captured CUDA graph replays with any routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from cupy_moe.kernels.expand import ExpandConfig, all_expand_configs
from cupy_moe.kernels.finalize import FinalizeConfig, all_finalize_configs
from cupy_moe.kernels.grouped_gemm import (
    TILE_K,
    TILE_SHAPES,
    GemmConfig,
    GemmStage,
    MainloopKind,
    all_gemm_configs,
    gather_choices,
    mainloop_for,
    sort_choices,
)
from cupy_moe.kernels.permute import PermuteConfig, all_permute_configs, permute_config
from cupy_moe.kernels.route import RouteConfig, all_route_configs, route_config
from cupy_moe.types import ActivationType, RoutingMethodType

if TYPE_CHECKING:
    from cupy_moe.runtime.arrays import ArrayRef
    from cupy_moe.runtime.jit import KernelSpec

__all__ = [
    "DeviceTraits",
    "KernelConfig",
    "MoeOperands",
    "MoePlan",
    "MoeProblem",
    "MoeResult",
    "RoutingSource",
    "ScratchLayout",
    "Tiling",
    "all_specializations",
    "choose_tiling",
    "plan_moe",
    "tile_candidates",
]

KernelConfig: TypeAlias = "RouteConfig | PermuteConfig | ExpandConfig | GemmConfig | FinalizeConfig"

# Every scratch buffer starts on its own 256 bytes, as allocators and 16-byte vectors want it.
SCRATCH_ALIGNMENT = 256


class RoutingSource(Enum):
    """Where expert ids and weights come from."""

    Packed = 0  # one int32 word a slot: (id << 16) | bf16 weight
    Unpacked = 1  # int32 ids and a weight tensor
    Logits = 2  # computed by the router kernel


@dataclass(frozen=True, slots=True)
class MoeProblem:
    """Everything a plan depends on; hashable, so plans are cached by it."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    local_num_experts: int
    local_expert_offset: int
    activation: ActivationType
    routing_source: RoutingSource
    expert_weights_dtype: str  # "bfloat16" or "float32"
    scale_input: bool
    do_finalize: bool
    routing_method: RoutingMethodType
    num_groups: int  # 0: ungrouped
    topk_group: int
    norm_topk_prob: bool
    logits_dtype: str | None
    bias_dtype: str | None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Hash once: every call looks its plan up."""
        values = (getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))

    def __hash__(self) -> int:
        """Hash of all sizes and choices."""
        return self._hash

    @property
    def num_slots(self) -> int:
        """Routed (token, slot) pairs."""
        return self.num_tokens * self.top_k

    @property
    def fc1_rows(self) -> int:
        """Rows of one expert's first weight matrix."""
        return self.intermediate_size * (2 if self.activation.is_gated else 1)


@dataclass(slots=True)
class MoeOperands:
    """The arrays of one call; ``None`` where the call has none."""

    hidden_states: ArrayRef
    gemm1_weights: ArrayRef
    gemm2_weights: ArrayRef
    output1_scales: ArrayRef
    output1_gate_scales: ArrayRef
    output2_scales: ArrayRef
    clamp_limit: ArrayRef | None = None
    topk_ids: ArrayRef | None = None  # packed words or ids
    topk_weights: ArrayRef | None = None
    routing_logits: ArrayRef | None = None
    routing_bias: ArrayRef | None = None
    routing_replay_out: ArrayRef | None = None
    output: ArrayRef | None = None
    workspace_buffer: ArrayRef | None = None
    routed_scaling_factor: float = 1.0
    enable_pdl: bool | None = None


@dataclass(slots=True)
class MoeResult:
    """What a call produced: ``output``, or the other three when it did not finalize."""

    output: ArrayRef | None = None
    gemm2_output: ArrayRef | None = None
    expert_weights: ArrayRef | None = None
    expanded_idx_to_permuted_idx: ArrayRef | None = None


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What a plan needs to know of a GPU."""

    arch: str
    num_sms: int


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


@dataclass(frozen=True, slots=True)
class Tiling:
    """Output tiles of the two GEMMs; both share the token tile, as rows are padded once."""

    tile_n: int
    fc1_tile_m: int
    fc2_tile_m: int
    gather: bool = True  # FC1 gathers token rows itself, else a permuted copy is made first
    sort: bool = False  # the GEMMs sort the slots themselves, else a kernel does it first

    def __str__(self) -> str:
        """Short form for tables: ``128|256 x 64``."""
        notes = ("" if self.gather else " copied") + (" sorting" if self.sort else "")
        return f"{self.fc1_tile_m}|{self.fc2_tile_m} x {self.tile_n}{notes}"


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
    prefetch_steps: int  # of K, of a block's most probable first tile, before the order is known
    finalize: FinalizeConfig | None
    scratch: ScratchLayout


def tile_candidates(problem: MoeProblem, device: DeviceTraits) -> list[Tiling]:
    """All tilings that divide the problem's weights; any of them gives the same bits."""
    kind = mainloop_for(device.arch)
    shapes = TILE_SHAPES[kind]
    return [
        Tiling(tile_n, fc1_tile_m, fc2_tile_m, gather, sort)
        for fc1_tile_m, tile_n in shapes
        for fc2_tile_m, other_tile_n in shapes
        for gather in gather_choices(kind, fc1_tile_m, tile_n)
        for sort in sort_choices(tile_n, problem.num_slots)
        if tile_n == other_tile_n
        and problem.fc1_rows % fc1_tile_m == 0
        and problem.hidden_size % fc2_tile_m == 0
    ]


# Largest average number of rows an expert for which a token tile is best: large enough that nearly
# every expert hit needs one tile, so that its weights are read once. Measured on an H200.
_WGMMA_SHARES = {8: 2.0, 16: 7.0, 32: 20.0, 64: 40.0}
_COMPUTE_BOUND_SHARE = 128.0  # from here on larger weight tiles win over finer waves
_TOLERATED_IDLE = 0.05  # of the multiprocessors, averaged over the waves
_UNEVEN_TILE_N = 64  # from here on the time of a tile follows its rows in use
_FEW_WAVES = 4.0  # up to here a fixed stride wins over taking tiles from a counter
_ALL_EXPERTS_SHARE = 4.0  # from here on nearly every expert is hit
_PREFETCH_BYTES = 24 << 20  # into L2, while the slots are sorted


def _share(problem: MoeProblem) -> float:
    """Average number of rows an expert."""
    return problem.num_slots / problem.num_experts


def _choose_tile_n(problem: MoeProblem, kind: MainloopKind) -> int:
    share = _share(problem)
    if kind is MainloopKind.Wgmma:
        return next((tile for tile, most in _WGMMA_SHARES.items() if share <= most), 128)
    tiles = sorted({tile_n for _, tile_n in TILE_SHAPES[kind]})
    return next((tile for tile in tiles if tile >= share), tiles[-1])


def _expected_waves(
    problem: MoeProblem, rows: int, tile_m: int, tile_n: int, num_sms: int
) -> float:
    """Output tiles a multiprocessor under uniform random routing."""
    hit = 1 - (1 - 1 / problem.num_experts) ** problem.num_slots
    token_tiles = problem.local_num_experts * max(hit, _share(problem) / tile_n)
    return rows // tile_m * token_tiles / num_sms


def _choose_tile_m(problem: MoeProblem, rows: int, tile_n: int, num_sms: int) -> int:
    """Largest tile whose last wave leaves few multiprocessors idle, else the least idle one."""
    largest = 256 if _share(problem) >= _COMPUTE_BOUND_SHARE else 128
    shapes = TILE_SHAPES[MainloopKind.Wgmma]
    sizes = [m for m, n in shapes if n == tile_n and m <= largest and rows % m == 0]

    def busy(tile_m: int) -> float:
        waves = _expected_waves(problem, rows, tile_m, tile_n, num_sms)
        return waves / math.ceil(waves)

    best = max(busy(m) for m in sizes)
    return max(m for m in sizes if busy(m) >= best - _TOLERATED_IDLE)


def choose_tiling(problem: MoeProblem, device: DeviceTraits) -> Tiling:
    """Tiling for the sizes and the device; a matter of speed only."""
    kind = mainloop_for(device.arch)
    tile_n = _choose_tile_n(problem, kind)
    sort = max(sort_choices(tile_n, problem.num_slots))
    if kind is MainloopKind.Mma:
        return Tiling(tile_n, 128, 128, sort=sort)
    return Tiling(
        tile_n,
        _choose_tile_m(problem, problem.fc1_rows, tile_n, device.num_sms),
        _choose_tile_m(problem, problem.hidden_size, tile_n, device.num_sms),
        gather=tile_n < 128,
        sort=sort,
    )


def _takes_tiles(problem: MoeProblem, fc1: GemmConfig, num_sms: int) -> bool:
    """Whether blocks take tiles from a counter: a trip to L2 each, which uneven or many repay.

    Without the permutation kernel nobody sets the counters to zero.
    """
    if fc1.sort_slots:
        return False
    waves = _expected_waves(problem, problem.fc1_rows, fc1.tile_m, fc1.tile_n, num_sms)
    return fc1.tile_n >= _UNEVEN_TILE_N or waves > _FEW_WAVES


def _prefetch_steps(problem: MoeProblem, fc1: GemmConfig, num_sms: int) -> int:
    """Count the steps of K of first weight tiles that arrive while the slots are sorted.

    The tiles are guessed: every expert is hit by so many slots, and has one token tile.
    """
    share = _share(problem)
    if fc1.sort_slots or not _ALL_EXPERTS_SHARE <= share <= _COMPUTE_BOUND_SHARE:
        return 0
    step_bytes = num_sms * fc1.tile_m * TILE_K
    return min(problem.hidden_size // TILE_K, _PREFETCH_BYTES // step_bytes)


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
    """Plan one layer of at least one token, with the given tiling or the best one known."""
    tiling = tiling or choose_tiling(problem, device)
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
        take_tiles=_takes_tiles(problem, fc1, device.num_sms),
        prefetch_steps=_prefetch_steps(problem, fc1, device.num_sms),
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
    ]
    return [config.spec() for config in configs]
