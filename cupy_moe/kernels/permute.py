"""Launcher of ``permute.cu``: expert-sorted, tile-padded order of the routed slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = [
    "MAX_LOCAL_EXPERTS",
    "PARAMS",
    "PermuteConfig",
    "all_permute_configs",
    "bind_permute",
]

MAX_LOCAL_EXPERTS = 2048

PARAMS = ParamLayout(
    ("topk_ids", "ptr"),
    ("expert_weights", "ptr"),
    ("expanded_to_permuted", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("tile_expert", "ptr"),
    ("tile_rows", "ptr"),
    ("num_n_tiles", "ptr"),
    ("num_slots", "i32"),
    ("local_num_experts", "i32"),
    ("local_expert_offset", "i32"),
    ("tile_n", "i32"),
)


@dataclass(frozen=True)
class PermuteConfig:
    """Specialization of the permutation kernel; the grid is one block a local expert."""

    packed_ids: bool
    num_threads: int = 512
    max_local_experts: int = MAX_LOCAL_EXPERTS

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("permute", self, PARAMS)


def all_permute_configs() -> list[PermuteConfig]:
    """Every specialization a plan can ask for."""
    return [PermuteConfig(packed_ids=packed) for packed in (False, True)]


def bind_permute(
    function: Function,
    config: PermuteConfig,
    *,
    topk_ids: int,
    expert_weights: int,
    expanded_to_permuted: int,
    permuted_to_expanded: int,
    tile_expert: int,
    tile_rows: int,
    num_n_tiles: int,
    num_slots: int,
    local_num_experts: int,
    local_expert_offset: int,
    tile_n: int,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(
        topk_ids,
        expert_weights,
        expanded_to_permuted,
        permuted_to_expanded,
        tile_expert,
        tile_rows,
        num_n_tiles,
        num_slots,
        local_num_experts,
        local_expert_offset,
        tile_n,
    )
    grid = (local_num_experts, 1, 1)
    return bind(function, params, grid=grid, block=config.num_threads, stream=stream, pdl=pdl)
