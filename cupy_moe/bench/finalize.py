"""Start the ranks that time the tensor-parallel finalize, or take part as one that was started."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupy_moe.bench.finalize_contenders import no_multicast
from cupy_moe.bench.finalize_ranks import FinalizeJob, FinalizeRow, measure_rank
from cupy_moe.kernels.finalize_rmsnorm import RANKS

__all__ = ["measure_finalize"]

_TIMEOUT_S = 300
_POLL_S = 1.0


def measure_finalize(job: FinalizeJob, ranks: Sequence[int] | None = None) -> list[FinalizeRow]:
    """Measure ranks with a GPU each, or as one rank of ``torchrun``.

    Parameters
    ----------
    job : FinalizeJob
    ranks : sequence of int, optional
        Sizes of groups, one after another; default: as many as there are GPUs. Under ``torchrun``
        its world.

    Returns
    -------
    list of FinalizeRow
        Empty on ranks other than 0 of ``torchrun``.

    Raises
    ------
    RuntimeError
        There are fewer GPUs than ranks, or a rank failed.
    """
    no_multicast()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = int(os.environ.get("LOCAL_RANK", rank))
        rows = _run_rank(rank, size, device, "env://", job)
        return rows if rank == 0 else []
    import torch

    found = torch.cuda.device_count()
    sizes = ranks or [max((n for n in RANKS if n <= found), default=0)]
    if min(sizes) < 2 or max(sizes) > found:
        raise RuntimeError(
            f"bench finalize needs a GPU for each of {max(2, *sizes)} ranks, found {found}; "
            "several nodes are started by torchrun."
        )
    return [row for size in sizes for row in _launch(size, job)]


def _run_rank(rank: int, size: int, device: int, store: str, job: FinalizeJob) -> list[FinalizeRow]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(device)
    where = torch.device("cuda", device)
    dist.init_process_group("nccl", store, rank=rank, world_size=size, device_id=where)
    return measure_rank(job)


def _worker(rank: int, size: int, store: str, job: FinalizeJob, results: Any) -> None:
    try:
        rows = _run_rank(rank, size, rank, store, job)
        results.put((rank, rows, None))
    except BaseException as error:  # the parent must hear of it, whatever it is
        results.put((rank, [], f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)  # graphs with NCCL in them make an orderly end slow


def _launch(size: int, job: FinalizeJob) -> list[FinalizeRow]:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        processes = [
            context.Process(target=_worker, args=(rank, size, store, job, results))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes)
        finally:
            for process in processes:
                process.kill()


def _collect(results: Any, processes: Sequence[Any]) -> list[FinalizeRow]:
    """Rows of rank 0, once all ranks have answered."""
    found: list[FinalizeRow] = []
    missing = set(range(len(processes)))
    while missing:
        rank, rows, failure = _next_answer(results, processes, missing)
        if failure is not None:
            raise RuntimeError(f"bench finalize: rank {rank}: {failure}")
        missing.remove(rank)
        found = rows if rank == 0 else found
    return found


def _next_answer(results: Any, processes: Sequence[Any], missing: set[int]) -> Any:
    end = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end:
        # Before the look at the queue: what a process has sent is there when it ends.
        ended = [rank for rank in sorted(missing) if processes[rank].exitcode is not None]
        try:
            return results.get(timeout=_POLL_S)
        except queue.Empty:
            for rank in ended:
                code = processes[rank].exitcode
                raise RuntimeError(
                    f"bench finalize: rank {rank} ended without a result, exit code {code}."
                ) from None
    raise RuntimeError(f"bench finalize: no result of ranks {sorted(missing)} in {_TIMEOUT_S} s.")
