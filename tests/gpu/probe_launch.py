"""Launches of the test kernel ``tests/cuda/probe.cu``."""

from __future__ import annotations

from typing import Any

from cupy_moe.runtime.arrays import describe
from cupy_moe.runtime.jit import Function, load
from cupy_moe.runtime.launch import bind, enqueue
from tests.probe import PARAMS, ProbeConfig

__all__ = ["launch_probe", "probe_function"]

NUM_THREADS = 128


def probe_function(*, early_launch: bool = False, arch: str | None = None) -> Function:
    """The kernel on device 0; out = 2 * in + offset + 1."""
    config = ProbeConfig(num_threads=NUM_THREADS, early_launch=early_launch)
    return load(config.spec(), 0, arch=arch)


def launch_probe(
    function: Function,
    x: Any = None,
    out: Any = None,
    *,
    sm_ids: Any = None,
    cluster_size: Any = None,
    spin_cycles: int = 0,
    offset: float = 0.0,
    num_blocks: int | None = None,
    **options: Any,
) -> None:
    """Launch on as many blocks as `out` needs, or on `num_blocks`."""
    n = 0 if out is None else describe(out).size
    pointers = (0 if a is None else describe(a).ptr for a in (x, out, sm_ids, cluster_size))
    blocks = num_blocks if num_blocks is not None else -(-n // NUM_THREADS)
    params = PARAMS.pack(*pointers, spin_cycles, n, offset)
    enqueue([bind(function, params, grid=(blocks, 1, 1), block=NUM_THREADS, **options)])
