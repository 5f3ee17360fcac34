"""Launcher of ``add_rows.cu``: rows of FC2 from the partial sums of two partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout, bind

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["PARAMS", "AddRowsConfig", "all_add_rows_configs", "bind_add_rows"]

COLUMNS_PER_THREAD = 8

PARAMS = ParamLayout(("first", "ptr"), ("second", "ptr"), ("output", "ptr"), ("row_vectors", "i32"))


@dataclass(frozen=True)
class AddRowsConfig:
    """Specialization of the addition."""

    num_threads: int = 128

    def spec(self) -> KernelSpec:
        """Return the translation unit of this specialization."""
        return KernelSpec.from_config("add_rows", self, PARAMS)

    def grid(self, num_rows: int, hidden_size: int) -> tuple[int, int, int]:
        """One block a row and slab of columns."""
        columns = COLUMNS_PER_THREAD * self.num_threads
        return (num_rows, -(-hidden_size // columns), 1)


def all_add_rows_configs() -> list[AddRowsConfig]:
    """Every specialization a plan can ask for."""
    return [AddRowsConfig()]


def bind_add_rows(
    function: Function,
    config: AddRowsConfig,
    *,
    num_rows: int,
    first: int,
    second: int,
    output: int,
    hidden_size: int,
    stream: int,
    pdl: bool,
) -> BoundLaunch:
    """Prepare a launch of the loaded ``config``; addresses as in ``Params`` of the kernel."""
    params = PARAMS.pack(first, second, output, hidden_size // COLUMNS_PER_THREAD)
    grid = config.grid(num_rows, hidden_size)
    return bind(function, params, grid=grid, block=config.num_threads, stream=stream, pdl=pdl)
