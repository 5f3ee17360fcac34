"""Start the ranks that time the tensor-parallel finalize, or take part as one that was started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupy_moe.bench.finalize_ranks import FinalizeRow, measure_rank, no_multicast
from cupy_moe.kernels.finalize_rmsnorm import RANKS

__all__ = ["measure_finalize"]

_TIMEOUT_S = 600


def measure_finalize(tokens: Sequence[int], replays: int) -> list[FinalizeRow]:
    """Measure on every GPU, one rank each, or as one rank of ``torchrun``.

    Parameters
    ----------
    tokens : sequence of int
    replays : int
        Of every graph; the median counts.

    Returns
    -------
    list of FinalizeRow
        Empty on ranks other than 0 of ``torchrun``.

    Raises
    ------
    RuntimeError
        There are not 2, 4 or 8 GPUs, or a rank failed.
    """
    no_multicast()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = int(os.environ.get("LOCAL_RANK", rank))
        rows = _run_rank(rank, size, device, "env://", tokens, replays)
        return rows if rank == 0 else []
    import torch

    size = max((n for n in RANKS if n <= torch.cuda.device_count()), default=0)
    if size < 2:
        raise RuntimeError(
            f"bench finalize needs two GPUs, found {torch.cuda.device_count()}; several nodes are "
            "started by torchrun."
        )
    return _launch(size, tokens, replays)


def _run_rank(
    rank: int, size: int, device: int, store: str, tokens: Sequence[int], replays: int
) -> list[FinalizeRow]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(device)
    where = torch.device("cuda", device)
    dist.init_process_group("nccl", store, rank=rank, world_size=size, device_id=where)
    return measure_rank(tokens, replays)


def _worker(rank: int, size: int, store: str, job: tuple[Any, ...], results: Any) -> None:
    try:
        rows = _run_rank(rank, size, rank, store, *job)
        results.put((rank, rows, None))
    except BaseException as error:  # the parent must hear of it, whatever it is
        results.put((rank, [], f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)  # graphs with NCCL in them make an orderly end slow


def _launch(size: int, tokens: Sequence[int], replays: int) -> list[FinalizeRow]:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        job = (tuple(tokens), replays)
        processes = [
            context.Process(target=_worker, args=(rank, size, store, job, results))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, size)
        finally:
            for process in processes:
                process.kill()


def _collect(results: Any, size: int) -> list[FinalizeRow]:
    found: list[FinalizeRow] = []
    for _ in range(size):
        rank, rows, failure = results.get(timeout=_TIMEOUT_S)
        if failure is not None:
            raise RuntimeError(f"bench finalize: rank {rank}: {failure}")
        found = rows if rank == 0 else found
    return found
