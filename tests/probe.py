"""The test kernel ``tests/cuda/probe.cu``: its specialization and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cupy_moe.runtime.jit import KernelSpec
from cupy_moe.runtime.launch import ParamLayout

__all__ = ["FOLDER", "PARAMS", "ProbeConfig"]

FOLDER = Path(__file__).resolve().parent / "cuda"

PARAMS = ParamLayout(
    ("in", "ptr"),
    ("out", "ptr"),
    ("sm_ids", "ptr"),
    ("cluster", "ptr"),
    ("spin_cycles", "i64"),
    ("n", "i32"),
    ("offset", "f32"),
)


@dataclass(frozen=True)
class ProbeConfig:
    """out = in * factor + offset + 1."""

    num_threads: int = 128
    factor: float = 2.0
    early_launch: bool = False

    def spec(self, *, params: ParamLayout = PARAMS, folder: Path = FOLDER) -> KernelSpec:
        """Translation unit."""
        return KernelSpec.from_config("probe", self, params, folder=folder)
