"""Launcher of ``place_tokens.cu``: token rows as FC1 reads them, where it looks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind
from cupy_moe.types import MoeFormat

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["PARAMS", "PlaceTokensConfig", "all_place_tokens_configs", "bind_place_tokens"]

BYTES_PER_THREAD = 16  # of a row as FC1 reads it

PARAMS = ParamLayout(
    ("hidden_states", "ptr"),
    ("scales", "ptr"),
    ("expanded_to_permuted", "ptr"),
    ("output", "ptr"),
    ("topk_weights", "ptr"),
    ("expert_weights", "ptr"),
    ("hidden_size", "i32"),
    ("scale_pitch", "i32"),
    ("top_k", "i32"),
)


@dataclass(frozen=True)
class PlaceTokensConfig:
    """Specialization of the kernel that places token rows."""

    moe_format: MoeFormat
    num_threads: int = 128

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("place_tokens", self, PARAMS)

    def grid(self, num_tokens: int, hidden_size: int) -> tuple[int, int, int]:
        """One block a token and slab of columns."""
        row_bytes = hidden_size * (2 if self.moe_format.has_block_scales else 1)
        return (num_tokens, -(-row_bytes // (BYTES_PER_THREAD * self.num_threads)), 1)


def all_place_tokens_configs() -> list[PlaceTokensConfig]:
    """Every specialization a plan can ask for."""
    return [PlaceTokensConfig(moe_format) for moe_format in MoeFormat]


def bind_place_tokens(
    function: Function,
    config: PlaceTokensConfig,
    *,
    num_tokens: int,
    hidden_states: int,
    scales: int,
    expanded_to_permuted: int,
    output: int,
    topk_weights: int,
    expert_weights: int,
    hidden_size: int,
    scale_pitch: int,
    top_k: int,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(
        hidden_states,
        scales,
        expanded_to_permuted,
        output,
        topk_weights,
        expert_weights,
        hidden_size,
        scale_pitch,
        top_k,
    )
    grid = config.grid(num_tokens, hidden_size)
    return bind(function, params, grid=grid, block=config.num_threads, stream=stream, pdl=pdl)
