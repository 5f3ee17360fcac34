"""Launcher of ``expand.cu``: token rows in permuted order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["PARAMS", "ExpandConfig", "all_expand_configs", "bind_expand"]

BYTES_PER_VECTOR = 16
_BLOCKS_PER_SM = 8

PARAMS = ParamLayout(
    ("hidden_states", "ptr"),
    ("permuted_to_expanded", "ptr"),
    ("num_n_tiles", "ptr"),
    ("output", "ptr"),
    ("row_vectors", "i32"),
    ("top_k", "i32"),
    ("tile_n", "i32"),
)


@dataclass(frozen=True)
class ExpandConfig:
    """Specialization of the row copy."""

    num_threads: int = 256

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("expand", self, PARAMS)

    def grid(self, capacity: int, num_sms: int) -> int:
        """Blocks that walk the rows, one row a warp."""
        rows_per_block = self.num_threads // 32
        return min(num_sms * _BLOCKS_PER_SM, -(-capacity // rows_per_block))


def all_expand_configs() -> list[ExpandConfig]:
    """Every specialization a plan can ask for."""
    return [ExpandConfig()]


def bind_expand(
    function: Function,
    config: ExpandConfig,
    num_blocks: int,
    *,
    hidden_states: int,
    permuted_to_expanded: int,
    num_n_tiles: int,
    output: int,
    row_bytes: int,
    top_k: int,
    tile_n: int,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(
        hidden_states,
        permuted_to_expanded,
        num_n_tiles,
        output,
        row_bytes // BYTES_PER_VECTOR,
        top_k,
        tile_n,
    )
    grid = (num_blocks, 1, 1)
    return bind(function, params, grid=grid, block=config.num_threads, stream=stream, pdl=pdl)
