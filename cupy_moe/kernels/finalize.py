"""Launcher of ``finalize.cu``: weighted sum over a token's slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["PARAMS", "FinalizeConfig", "all_finalize_configs", "bind_finalize"]

COLUMNS_PER_THREAD = 8

PARAMS = ParamLayout(
    ("gemm2_output", "ptr"),
    ("partial_output", "ptr"),
    ("expanded_to_permuted", "ptr"),
    ("expert_weights", "ptr"),
    ("output", "ptr"),
    ("hidden_size", "i32"),
    ("top_k", "i32"),
    ("weights_are_f32", "i32"),
)


@dataclass(frozen=True)
class FinalizeConfig:
    """Specialization of the finalize kernel."""

    num_threads: int = 128
    split_sums: bool = False  # rows come as two partial sums

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("finalize", self, PARAMS)

    def grid(self, num_tokens: int, hidden_size: int) -> tuple[int, int, int]:
        """One block a token and slab of columns."""
        columns = COLUMNS_PER_THREAD * self.num_threads
        return (num_tokens, -(-hidden_size // columns), 1)


def all_finalize_configs() -> list[FinalizeConfig]:
    """Every specialization a plan can ask for."""
    return [FinalizeConfig(split_sums=split) for split in (False, True)]


def bind_finalize(
    function: Function,
    config: FinalizeConfig,
    *,
    num_tokens: int,
    gemm2_output: int,
    partial_output: int,
    expanded_to_permuted: int,
    expert_weights: int,
    output: int,
    hidden_size: int,
    top_k: int,
    weights_are_f32: bool,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(
        gemm2_output,
        partial_output,
        expanded_to_permuted,
        expert_weights,
        output,
        hidden_size,
        top_k,
        weights_are_f32,
    )
    grid = config.grid(num_tokens, hidden_size)
    return bind(function, params, grid=grid, block=config.num_threads, stream=stream, pdl=pdl)
