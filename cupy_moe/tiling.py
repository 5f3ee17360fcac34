"""Which output tiles a problem gets, from figures measured on an H200; a matter of speed only.

`cupy_moe.bench.sweep` measures the candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_moe.kernels.gemm_tiles import (
    MainloopKind,
    TileShape,
    gather_choices,
    mainloop_for,
    sort_choices,
    tile_shape,
    tile_shapes,
)
from cupy_moe.kernels.grouped_gemm import GemmConfig
from cupy_moe.problem import DeviceTraits, MoeProblem

__all__ = [
    "Tiling",
    "choose_tiling",
    "multiprocessors",
    "prefetch_steps",
    "streams_weights",
    "takes_tiles",
    "tile_candidates",
]


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


def tile_candidates(problem: MoeProblem, device: DeviceTraits) -> list[Tiling]:
    """All tilings that divide the problem's weights; any of them gives the same bits."""
    kind = mainloop_for(device.arch)
    shapes = tile_shapes(kind, problem.moe_format)
    return [
        Tiling(fc1.tile_n, fc1.tile_m, fc2.tile_m, gather, sort)
        for fc1 in shapes
        for fc2 in shapes
        for gather in gather_choices(kind, problem.moe_format, fc1.tile_n)
        for sort in sort_choices(fc1.tile_n, problem.num_slots)
        if fc1.tile_n == fc2.tile_n
        and problem.fc1_part_rows % fc1.tile_m == 0
        and problem.fc2_part_rows % fc2.tile_m == 0
    ]


def multiprocessors(problem: MoeProblem, device: DeviceTraits) -> int:
    """Multiprocessors that a GEMM has: the device's, or the smaller partition's."""
    return device.num_sms if problem.strategy is None else min(problem.partition_sms)


# Largest average number of rows an expert for which a token tile is best: large enough that nearly
# every expert hit needs one tile, so that its weights are read once. Measured on an H200.
_WGMMA_SHARES = {8: 2.0, 16: 7.0, 32: 20.0, 64: 40.0}
# Of FP4 layers, whose weights are widened again for every token tile.
_FP4_WGMMA_SHARES = {8: 4.0, 16: 9.0, 24: 17.0, 48: 36.0, 96: 80.0, 160: 300.0}
_COMPUTE_BOUND_SHARE = 128.0  # from here on larger weight tiles win over finer waves
_TOLERATED_IDLE = 0.065  # of the multiprocessors, averaged over the waves
_UNEVEN_TILE_N = 64  # from here on the time of a tile follows its rows in use
# Up to here a fixed stride wins over taking tiles from a counter, which the permutation kernel sets
# to zero, and with few slots sorting them in the GEMMs wins over that kernel.
_FEW_WAVES = 4.0
_READ_ONCE = 0.75  # rows an expert by rows of a tile, up to here nearly all experts have one tile
_ALL_EXPERTS_SHARE = 4.0  # from here on nearly every expert is hit
_PREFETCH_BYTES = 48 << 20  # into L2, while the slots are sorted; H100 and H200 have 50 MB and 60


def _share(problem: MoeProblem) -> float:
    """Average number of rows an expert."""
    return problem.num_slots / problem.num_experts


def _choose_tile_n(problem: MoeProblem, kind: MainloopKind) -> int:
    share = _share(problem)
    has_blocks = problem.moe_format.has_block_scales
    tiles = sorted({shape.tile_n for shape in tile_shapes(kind, problem.moe_format)})
    if kind is MainloopKind.Wgmma:
        shares = _FP4_WGMMA_SHARES if has_blocks else _WGMMA_SHARES
        return next((tile for tile, most in shares.items() if share <= most), tiles[-1])
    if has_blocks:
        # A second tile of an expert widens its weights again: room for most of the spread, too.
        share += 2 * math.sqrt(share)
    return next((tile for tile in tiles if tile >= share), tiles[-1])


def _expected_waves(
    problem: MoeProblem, rows: int, tile_m: int, tile_n: int, num_blocks: int
) -> float:
    """Output tiles of each of so many blocks, under uniform random routing."""
    hit = 1 - (1 - 1 / problem.num_experts) ** problem.num_slots
    token_tiles = problem.local_num_experts * max(hit, _share(problem) / tile_n)
    return rows // tile_m * token_tiles / num_blocks


def _choose_tile_m(problem: MoeProblem, rows: int, tile_n: int, num_sms: int) -> int:
    """Largest tile whose last wave leaves few multiprocessors idle, else the least idle one."""
    shapes = [
        shape
        for shape in tile_shapes(MainloopKind.Wgmma, problem.moe_format)
        if shape.tile_n == tile_n and rows % shape.tile_m == 0
    ]

    def waves(shape: TileShape) -> float:
        return _expected_waves(problem, rows, shape.tile_m, tile_n, num_sms * shape.blocks)

    def busy(shape: TileShape) -> float:
        return waves(shape) / math.ceil(waves(shape))

    if problem.moe_format.has_block_scales:
        # 64 rows cost more instructions a weight: only where 128 leave blocks without a tile.
        tall = [shape for shape in shapes if shape.tile_m > 64]
        shapes = tall if tall and min(map(waves, tall)) >= 1 else shapes
    elif _share(problem) < _COMPUTE_BOUND_SHARE:
        shapes = [shape for shape in shapes if shape.tile_m <= 128] or shapes
    best = max(busy(shape) for shape in shapes)
    return max(shape.tile_m for shape in shapes if busy(shape) >= best - _TOLERATED_IDLE)


def choose_tiling(problem: MoeProblem, device: DeviceTraits) -> Tiling:
    """Tiling for the sizes and the device; a matter of speed only."""
    kind, num_sms = mainloop_for(device.arch), multiprocessors(problem, device)
    tile_n = _choose_tile_n(problem, kind)
    fc1_tile_m = fc2_tile_m = 128
    if kind is MainloopKind.Wgmma:
        fc1_tile_m = _choose_tile_m(problem, problem.fc1_part_rows, tile_n, num_sms)
        fc2_tile_m = _choose_tile_m(problem, problem.fc2_part_rows, tile_n, num_sms)
    num_blocks = num_sms * tile_shape(kind, problem.moe_format, fc1_tile_m, tile_n).blocks
    waves = _expected_waves(problem, problem.fc1_part_rows, fc1_tile_m, tile_n, num_blocks)
    return Tiling(
        tile_n,
        fc1_tile_m,
        fc2_tile_m,
        gather=True in gather_choices(kind, problem.moe_format, tile_n),
        sort=waves <= _FEW_WAVES and True in sort_choices(tile_n, problem.num_slots),
    )


def takes_tiles(problem: MoeProblem, fc1: GemmConfig, num_sms: int) -> bool:
    """Whether blocks take tiles from a counter: a trip to L2 each, which uneven or many repay.

    The portable loop does not. Without the permutation kernel nobody sets the counters to zero.
    """
    if fc1.sort_slots or fc1.mainloop_kind is MainloopKind.Mma:
        return False
    num_blocks = num_sms * fc1.min_blocks
    waves = _expected_waves(problem, problem.fc1_part_rows, fc1.tile_m, fc1.tile_n, num_blocks)
    return fc1.tile_n >= _UNEVEN_TILE_N or waves > _FEW_WAVES


def streams_weights(problem: MoeProblem, tile_n: int) -> bool:
    """Whether most weights are read once, so that L2 is better used for rows."""
    return _share(problem) <= _READ_ONCE * tile_n


def prefetch_steps(problem: MoeProblem, fc1: GemmConfig, num_sms: int) -> int:
    """Count the steps of K of first weight tiles that arrive while the slots are sorted.

    The tiles are guessed: every expert is hit by so many slots, and has one token tile.
    """
    share = _share(problem)
    is_portable = fc1.mainloop_kind is MainloopKind.Mma
    if is_portable or fc1.sort_slots or not fc1.gather_tokens or share < _ALL_EXPERTS_SHARE:
        return 0
    step_bytes = num_sms * fc1.min_blocks * fc1.tile_m * fc1.tile_k
    if problem.moe_format.has_block_scales:
        step_bytes //= 2
    return min(-(-problem.hidden_size // fc1.tile_k), _PREFETCH_BYTES // step_bytes)
