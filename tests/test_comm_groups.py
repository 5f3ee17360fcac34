"""Groups of ranks: threads, files, torch.distributed, communicators like mpi4py's; votes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cupy_moe.comm.groups import (
    FileStore,
    Group,
    MpiGroup,
    SingleRank,
    StoreGroup,
    ThreadGroup,
    as_group,
    vote,
)
from tests.emulated_ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]


def exchange(group: Group) -> list[list[bytes]]:
    """Two exchanges of different lengths, to see that they do not mix."""
    first = group.all_gather(bytes([group.rank]) * (group.rank + 1))
    group.barrier()
    return [first, group.all_gather(b"x" * (10 - group.rank))]


def expected(size: int) -> list[list[bytes]]:
    return [
        [bytes([q]) * (q + 1) for q in range(size)],
        [b"x" * (10 - q) for q in range(size)],
    ]


def test_one_rank() -> None:
    assert exchange(SingleRank()) == expected(1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads(size: int) -> None:
    assert run_ranks(size, exchange) == [expected(size)] * size


def test_a_thread_that_does_not_come() -> None:
    group = ThreadGroup(2, timeout_s=0.1)
    with pytest.raises(threading.BrokenBarrierError):
        group.ranks[0].barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_files(size: int, tmp_path: Path) -> None:
    def work(thread: Group) -> list[list[bytes]]:
        return exchange(StoreGroup(thread.rank, size, FileStore(tmp_path)))

    assert run_ranks(size, work) == [expected(size)] * size


def test_two_groups_share_a_store(tmp_path: Path) -> None:
    def work(thread: Group) -> list[list[bytes]]:
        name = f"pair{thread.rank // 2}"
        return exchange(StoreGroup(thread.rank % 2, 2, FileStore(tmp_path), name))

    assert run_ranks(4, work) == [expected(2)] * 4


def test_a_file_that_does_not_come(tmp_path: Path) -> None:
    group = StoreGroup(0, 2, FileStore(tmp_path, timeout_s=0.1))
    with pytest.raises(TimeoutError, match=r"nobody has set cupy_moe\.0\.1"):
        group.barrier()


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_of_the_group(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank must be in"):
        StoreGroup(rank, 2, FileStore(tmp_path))


class Communicator:
    """The calls of mpi4py that are used, between threads."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def Get_rank(self) -> int:  # noqa: N802
        return self._group.rank

    def Get_size(self) -> int:  # noqa: N802
        return self._group.size

    def allgather(self, data: Any) -> list[Any]:
        return self._group.all_gather(data)


def test_communicator() -> None:
    def work(thread: Group) -> list[list[bytes]]:
        group = as_group(Communicator(thread))
        assert isinstance(group, MpiGroup)
        return exchange(group)

    assert run_ranks(3, work) == [expected(3)] * 3


def test_no_group() -> None:
    with pytest.raises(TypeError, match="group must be a torch"):
        as_group("world")


TORCH = """
import random, sys
random.seed(0)
rank, folder = int(sys.argv[1]), sys.argv[2]
import torch.distributed as dist
from cupy_moe.comm.groups import as_group
from tests.test_comm_groups import exchange, expected
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
assert as_group(None).key is dist.group.WORLD
assert exchange(as_group(None)) == expected(4)
for ranks in ([0, 1], [2, 3], [1, 3]):
    group = dist.new_group(ranks)
    if rank in ranks:
        own = as_group(group)
        assert (own.rank, own.size) == (ranks.index(rank), 2)
        assert exchange(own) == expected(2)
dist.destroy_process_group()
print("RANK DONE")
"""


def test_torch_sub_groups(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TORCH, str(rank), str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert "RANK DONE" in output, output


def test_store_of_torch() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()

    def work(thread: Group) -> list[list[bytes]]:
        return exchange(StoreGroup(thread.rank, 2, store))

    assert run_ranks(2, work) == [expected(2)] * 2


def test_every_rank_hears_of_every_failure() -> None:
    def work(group: Group) -> list[str]:
        return vote(group, f"broken {group.rank}" if group.rank % 2 else None)

    assert run_ranks(4, work) == [["rank 1: broken 1", "rank 3: broken 3"]] * 4
