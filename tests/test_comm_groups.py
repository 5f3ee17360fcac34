"""Groups of ranks: threads, files, torch.distributed, communicators like mpi4py's; votes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe.comm.agreement import agree, vote
from cupy_moe.comm.groups import (
    FileStore,
    Group,
    MpiGroup,
    SingleRank,
    StoreGroup,
    ThreadGroup,
    as_group,
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


def test_rendezvous_of_threads_that_do_not_come() -> None:
    ranks = ThreadGroup(2).ranks
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        ranks[0].rendezvous(0.1)
    with pytest.raises(TimeoutError):
        ranks[1].rendezvous(30.0)  # at once: the other one has gone


def test_rendezvous_of_files_stays_in_step(tmp_path: Path) -> None:
    def work(thread: Group) -> list[bytes]:
        group = StoreGroup(thread.rank, 2, FileStore(tmp_path))
        group.rendezvous(30.0)
        if group.rank == 0:
            with pytest.raises(TimeoutError):
                group.rendezvous(0.1)
        thread.barrier()
        if group.rank == 1:
            group.rendezvous(30.0)  # late
        return group.all_gather(bytes([group.rank]))

    assert run_ranks(2, work) == [[b"\0", b"\1"]] * 2


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

    def Ibarrier(self) -> Any:  # noqa: N802
        waiting = threading.Thread(target=self._group.barrier)
        waiting.start()
        return SimpleNamespace(Test=lambda: not waiting.is_alive())


def test_communicator() -> None:
    def work(thread: Group) -> list[list[bytes]]:
        group = as_group(Communicator(thread))
        assert isinstance(group, MpiGroup)
        return exchange(group)

    assert run_ranks(3, work) == [expected(3)] * 3


def test_rendezvous_of_a_communicator() -> None:
    def work(thread: Group) -> None:
        group = as_group(Communicator(thread))
        group.rendezvous(30.0)
        if group.rank == 0:
            with pytest.raises(TimeoutError, match=r"a rank has not come within 0\.1 s"):
                group.rendezvous(0.1)
        else:
            time.sleep(0.5)
            group.rendezvous(30.0)

    run_ranks(2, work)


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
world = as_group(None)
assert exchange(world) == expected(4)
world.rendezvous(60.0)
if rank == 0:
    try:
        world.rendezvous(0.2)
    except TimeoutError:
        pass
    else:
        raise AssertionError("nobody has come")
else:
    import time
    time.sleep(1)
    world.rendezvous(60.0)
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


def test_torch_uses_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    entered = []

    class Device(contextlib.nullcontext):
        def __init__(self, device: int) -> None:
            super().__init__()
            entered.append(device)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        as_group(None).barrier()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", Device)
        group = as_group(dist.group.WORLD, 3)
        group.barrier()
        group.rendezvous(30.0)
        assert entered == [3, 3]
    finally:
        dist.destroy_process_group()


def test_store_of_torch() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()

    def work(thread: Group) -> list[list[bytes]]:
        group = StoreGroup(thread.rank, 2, store)
        found = exchange(group)
        group.rendezvous(30.0)
        return found

    assert run_ranks(2, work) == [expected(2)] * 2


def test_every_rank_hears_of_every_failure() -> None:
    def work(group: Group) -> list[str]:
        return vote(group, f"broken {group.rank}" if group.rank % 2 else None)

    assert run_ranks(4, work) == [["rank 1: broken 1", "rank 3: broken 3"]] * 4


def test_ranks_that_do_not_agree() -> None:
    def work(group: Group) -> None:
        agree(group, "op", (1, "a"))
        with pytest.raises(ValueError, match="rank 0: 0; rank 1: 1; rank 2: 0"):
            agree(group, "op", group.rank % 2)

    run_ranks(3, work)
