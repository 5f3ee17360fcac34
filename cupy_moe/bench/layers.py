"""What every benchmarked layer provides: batches, its call, and its definition piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.workloads import Ids, Work, Workload, make_routings

__all__ = ["LARGEST_REL_L2", "Batch", "BenchLayer", "Tensor"]

Tensor = Any  # torch.Tensor

# How far right implementations may be from ours, and ours from the definition in torch. They round
# the intermediate and the output alike up to single codes, which are few bits but in BF16; a wrong
# layout, order or scale moves the output by a third of its norm and more.
LARGEST_REL_L2 = {"fp8": 0.1, "bf16": 0.02, "mxfp8": 0.05, "nvfp4": 0.1}


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens of a call, and the routings of all calls of a graph.

    Attributes
    ----------
    hidden : torch.Tensor or tuple of them
        T hidden states, as the layer's calls take them.
    routings : list of numpy.ndarray (T, K), int32
    weights : numpy.ndarray (T, K), float32
        The same in every call.
    work : Work
        Average of the calls.
    """

    hidden: Any
    routings: list[Ids]
    weights: NDArray[np.float32]
    work: Work

    @property
    def num_tokens(self) -> int:
        """Tokens of a call."""
        return int(self.weights.shape[0])


@dataclass(frozen=True, eq=False)
class BenchLayer(ABC):
    """A workload's random layer.

    Attributes
    ----------
    workload : Workload
    mode : str
        Number formats: ``fp8``, ``bf16``, ``mxfp8`` or ``nvfp4``.
    form : str
        ``whole``, or how two partitions of the GPU share it.
    """

    workload: Workload
    mode: str
    form: str

    @property
    def partition_sms(self) -> tuple[int, ...]:
        """Multiprocessors of each partition; none of a whole layer."""
        return ()

    @property
    def name(self) -> str:
        """For messages."""
        is_plain = (self.mode, self.form) == ("fp8", "whole")
        return self.workload.key if is_plain else f"{self.workload.key} {self.mode} {self.form}"

    def batch(self, num_tokens: int, seed: int = 0) -> Batch:
        """Make standard normal hidden states and uniform random routings of equal weights."""
        routings = make_routings(self.workload, num_tokens, seed)
        return Batch(
            hidden=self.make_hidden(num_tokens, seed),
            routings=routings,
            weights=np.full(routings[0].shape, 1 / self.workload.top_k, np.float32),
            work=self.work_of(routings),
        )

    @property
    def largest_rel_l2(self) -> float:
        """Largest relative L2 distance between two right outputs."""
        return LARGEST_REL_L2[self.mode]

    @abstractmethod
    def make_hidden(self, num_tokens: int, seed: int) -> Any:
        """Make standard normal hidden states."""

    @abstractmethod
    def work_of(self, routings: list[Ids]) -> Work:
        """Count what the calls with these routings read, write and multiply, on average."""

    @abstractmethod
    def call(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Tensor]:
        """Make our call, with an output of its own (T, H), bfloat16, that is NaN until it ran."""

    # --- the definition, for `cupy_moe.bench.torch_layer`: torch tensors, float32 ---

    @abstractmethod
    def hidden_values(self, hidden: Any, tokens: list[int]) -> Tensor:
        """Values (n, H) of some hidden states."""

    @abstractmethod
    def expert_values(self, expert: int) -> tuple[Tensor, Tensor]:
        """Weights of an expert in logical order, ``[up; gate]`` (2I, H) and (H, I)."""

    @abstractmethod
    def activated(self, expert: int, up: Tensor, gate: Tensor) -> Tensor:
        """SwiGLU of FC1 (n, I), rounded to what FC2 reads."""
