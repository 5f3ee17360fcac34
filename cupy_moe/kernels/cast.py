"""Launcher of ``cast.cu``: hidden states of FP4 layers as BF16 in the main loop's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind
from cupy_moe.types import MoeFormat

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["PARAMS", "CastConfig", "all_cast_configs", "bind_cast"]

COLUMNS_PER_THREAD = 8

PARAMS = ParamLayout(
    ("hidden_states", "ptr"),
    ("scales", "ptr"),
    ("output", "ptr"),
    ("topk_weights", "ptr"),
    ("expert_weights", "ptr"),
    ("hidden_size", "i32"),
    ("scale_pitch", "i32"),
    ("top_k", "i32"),
)


@dataclass(frozen=True)
class CastConfig:
    """Specialization of the cast; ``moe_format`` has block scales."""

    moe_format: MoeFormat
    num_threads: int = 128

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("cast", self, PARAMS)

    def grid(self, num_tokens: int, hidden_size: int) -> tuple[int, int, int]:
        """One block a token and slab of columns."""
        columns = COLUMNS_PER_THREAD * self.num_threads
        return (num_tokens, -(-hidden_size // columns), 1)


def all_cast_configs() -> list[CastConfig]:
    """Every specialization a plan can ask for."""
    return [CastConfig(f) for f in MoeFormat if f.has_block_scales]


def bind_cast(
    function: Function,
    config: CastConfig,
    *,
    num_tokens: int,
    hidden_states: int,
    scales: int,
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
        output,
        topk_weights,
        expert_weights,
        hidden_size,
        scale_pitch,
        top_k,
    )
    grid = config.grid(num_tokens, hidden_size)
    return bind(function, params, grid=grid, block=config.num_threads, stream=stream, pdl=pdl)
