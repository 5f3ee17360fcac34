"""Making workspaces on emulated ranks: failures on one rank, the choice of the transport."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_moe.comm import launches, transport, workspace
from cupy_moe.comm.groups import Group, SingleRank, ThreadGroup
from cupy_moe.comm.rules import FinalizeArrays, check_arrays
from cupy_moe.comm.workspace import FinalizeWorkspace
from tests import emulated_ranks
from tests.emulated_ranks import MULTIPROCESSORS, emulate, run_ranks
from tests.finalize_cases import BF16, FinalizeCase, make_case

SIZES: dict[str, Any] = {"hidden_size": 64, "top_k": 2, "max_tokens": 8}


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Every allocation that is made; no kernel runs, so none is built."""
    emulate(monkeypatch, tmp_path)
    made: list[Any] = []

    class Memory(emulated_ranks._Memory):
        def __init__(self, device: int, num_bytes: int) -> None:
            if device == 13:
                raise RuntimeError("the GPU is full")
            super().__init__(device, num_bytes)
            made.append(self)

    for module in (workspace, transport):
        monkeypatch.setattr(module, "DeviceMemory", Memory)
    return made


@pytest.fixture
def no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(emulated_ranks._Mapping):
        def __init__(self, device: int, offer: Any) -> None:
            if device == 1:
                raise RuntimeError("no way to the other GPU")
            super().__init__(device, offer)

    monkeypatch.setattr(transport, "PeerMapping", Mapping)
    workspace._log_fallback.cache_clear()


@pytest.mark.parametrize("full_rank", [0, 1, 2, 3])
def test_no_memory_on_one_rank(full_rank: int, memories: list[Any]) -> None:
    def work(group: Group) -> None:
        device = 13 if group.rank == full_rank else group.rank
        with pytest.raises(RuntimeError, match=f"rank {full_rank}: RuntimeError: the GPU is full"):
            FinalizeWorkspace(group, device, **SIZES)
        group.barrier()  # nobody is left behind

    run_ranks(4, work)
    assert len(memories) == 3
    assert all(memory.address == 0 for memory in memories)


def test_memory_that_cannot_be_mapped(memories: list[Any], no_peer_access: None) -> None:
    def work(group: Group) -> None:
        with pytest.raises(RuntimeError, match="rank 1: RuntimeError: no way to the other GPU"):
            FinalizeWorkspace(group, group.rank, transport="ipc", **SIZES)

    run_ranks(2, work)
    assert all(memory.address == 0 for memory in memories)


def test_messages_where_memory_cannot_be_mapped(
    memories: list[Any], no_peer_access: None, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: Group) -> str:
        for _ in range(2):
            with FinalizeWorkspace(group, group.rank, **SIZES) as made:
                name = made.transport.name
        return name

    with caplog.at_level(logging.WARNING, "cupy_moe"):
        assert run_ranks(2, work) == ["nccl", "nccl"]
    messages = [record.message for record in caplog.records]
    assert len(set(messages)) == 1
    assert "using NCCL" in messages[0]
    assert "no way to the other GPU" in messages[0]
    assert all(memory.address == 0 for memory in memories)


def test_neither_memory_nor_messages(
    memories: list[Any], no_peer_access: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("NCCL is not installed")

    monkeypatch.setattr(transport, "_import_nccl", missing)

    def work(group: Group) -> None:
        with pytest.raises(RuntimeError, match="NCCL is not installed"):
            FinalizeWorkspace(group, group.rank, **SIZES)

    run_ranks(2, work)
    assert all(memory.address == 0 for memory in memories)


def test_memory_that_is_mapped_is_preferred(memories: list[Any]) -> None:
    def work(group: Group) -> str:
        with FinalizeWorkspace(group, group.rank, **SIZES) as made:
            assert made.is_open
        assert not made.is_open
        made.close()
        return made.transport.name

    assert run_ranks(2, work) == ["ipc", "ipc"]
    assert len(memories) == 2
    assert all(memory.address == 0 for memory in memories)


# --- what the ranks must agree on -----------------------------------------------------------------


@pytest.mark.parametrize(
    "others", [{"max_tokens": 16}, {"hidden_size": 72}, {"transport": "ipc"}, {"timeout_s": 1.0}]
)
def test_sizes_that_differ_between_ranks(others: dict[str, Any], memories: list[Any]) -> None:
    def work(group: Group) -> None:
        with pytest.raises(
            ValueError, match=r"every rank must pass the same, got rank 0: .*rank 1"
        ):
            FinalizeWorkspace(group, group.rank, **SIZES | (others if group.rank else {}))

    run_ranks(2, work)
    assert memories == []


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 68), ("top_k", 33), ("timeout_s", 0), ("transport", "mpi")]
)
def test_sizes_out_of_range(name: str, value: object, memories: list[Any]) -> None:
    with pytest.raises(ValueError, match=name):
        FinalizeWorkspace(SingleRank(), 0, **SIZES | {name: value})
    assert memories == []


def test_three_ranks(memories: list[Any]) -> None:
    def work(group: Group) -> None:
        with pytest.raises(ValueError, match=r"one of 1, 2, 4, 8 ranks, got 3\."):
            FinalizeWorkspace(group, group.rank, **SIZES)

    run_ranks(3, work)
    assert memories == []


# --- groups that fail -----------------------------------------------------------------------------


class FailingGroup(SingleRank):
    """Breaks down in exchange ``last``."""

    def __init__(self, last: int) -> None:
        self.left = last

    def all_gather(self, data: bytes) -> list[bytes]:
        if not self.left:
            raise ConnectionError("the network is down")
        self.left -= 1
        return [data]


def num_exchanges() -> int:
    group = FailingGroup(99)
    with FinalizeWorkspace(group, 0, **SIZES):
        return 99 - group.left


def test_a_group_that_fails_leaves_no_memory(memories: list[Any]) -> None:
    for last in range(num_exchanges() - 1):
        with pytest.raises(ConnectionError):
            FinalizeWorkspace(FailingGroup(last), 0, **SIZES)
    assert len(memories) > 1
    assert all(memory.address == 0 for memory in memories)
    assert launches.count_residents(0) == 0


def test_a_group_that_fails_in_the_last_exchange(
    memories: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Other ranks may have gone on to their first call."""
    with pytest.raises(ConnectionError):
        FinalizeWorkspace(FailingGroup(num_exchanges() - 1), 0, **SIZES)
    assert [bool(memory.address) for memory in memories] == [False, True]
    assert "stay allocated" in caplog.text


def test_a_group_that_fails_while_closing(
    memories: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    group = FailingGroup(99)
    made = FinalizeWorkspace(group, 0, **SIZES)
    group.left = 0
    made.close()
    assert "the network is down" in caplog.text
    assert memories[0].address != 0
    assert not made.is_open
    assert launches.count_residents(0) == 0


# --- calls ----------------------------------------------------------------------------------------


def arrays_of(case: FinalizeCase) -> FinalizeArrays:
    out = np.zeros((case.num_tokens, case.hidden_size), BF16)
    sizes = {"hidden_size": case.hidden_size, "top_k": case.top_k}
    return check_arrays(*case.arguments(0), out, device=-1, **sizes)


@pytest.mark.parametrize("granted", [8 * MULTIPROCESSORS, 4 * MULTIPROCESSORS])
def test_groups_on_one_device_divide_it(
    granted: int, memories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its green context."""
    monkeypatch.setattr(launches, "multiprocessors_of", lambda stream, device: granted)
    monkeypatch.setattr(launches, "bind", lambda *args, **launch: launch["grid"][0])
    num_blocks: list[int] = []
    monkeypatch.setattr(launches, "enqueue", num_blocks.extend)
    case = make_case(2, 64, hidden_size=64, top_k=2)
    pairs = [ThreadGroup(2), ThreadGroup(2)]

    def work(thread: Group) -> None:
        pair = pairs[thread.rank // 2]
        with FinalizeWorkspace(
            pair.ranks[thread.rank % 2], 0, **SIZES | {"max_tokens": 64}
        ) as made:
            thread.barrier()
            made.run(arrays_of(case), case.options, 0)
            thread.barrier()

    run_ranks(4, work)
    # Half of the device at most: what one rank leaves need not be where another one needs it.
    # A green context has no more.
    assert len(num_blocks) == 4
    assert sum(num_blocks) <= 8 * MULTIPROCESSORS // 2
    shared, num_blocks[:] = num_blocks[0], []
    run_ranks(2, work)
    assert num_blocks[0] > shared


def test_no_tokens(memories: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []
    monkeypatch.setattr(launches, "bind", lambda *args, **launch: bound.append(launch))
    rows, weights = np.zeros((0, 64), BF16), np.zeros((0, 2), np.float32)
    index, norm, out = np.zeros((0, 2), np.int32), np.zeros(64, BF16), np.zeros((0, 64), BF16)
    arrays = check_arrays(rows, weights, index, norm, out, device=-1, hidden_size=64, top_k=2)
    options = make_case(1, 1, hidden_size=64, top_k=2).options
    with FinalizeWorkspace(SingleRank(), 0, **SIZES) as made:
        made.run(arrays, options, 7)
        assert made._num_calls == 0
    assert bound == []
    with pytest.raises(RuntimeError, match="closed"):
        made.run(arrays, options, 7)


def test_closing_waits_for_a_call_of_another_thread(
    memories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, going_on = threading.Event(), threading.Event()

    def bind(*args: Any, **launch: Any) -> None:
        bound.set()
        assert going_on.wait(60)
        raise RuntimeError("bound")

    monkeypatch.setattr(launches, "bind", bind)
    case = make_case(1, 3, hidden_size=64, top_k=2)
    made, errors = FinalizeWorkspace(SingleRank(), 0, **SIZES), []

    def call() -> None:
        try:
            made.run(arrays_of(case), case.options, 7)
        except RuntimeError as error:
            errors.append(str(error))

    caller, closer = threading.Thread(target=call), threading.Thread(target=made.close)
    caller.start()
    assert bound.wait(60)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    assert made.is_open
    going_on.set()
    for thread in (caller, closer):
        thread.join(60)
    call()
    assert errors[0] == "bound"
    assert "the workspace is closed" in errors[1]
    assert memories[0].address == 0


def test_a_call_that_fails_is_waited_for(
    memories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = []

    class Order(emulated_ranks._OneStream):
        def after(self, stream: int) -> None:
            log.append(stream)

    def refuse(bound: object) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(workspace, "StreamOrder", Order)
    monkeypatch.setattr(launches, "bind", lambda *args, **launch: None)
    monkeypatch.setattr(launches, "enqueue", refuse)
    case = make_case(1, 3, hidden_size=64, top_k=2)
    with FinalizeWorkspace(SingleRank(), 0, **SIZES) as made:
        with pytest.raises(RuntimeError, match="refuses"):
            made.run(arrays_of(case), case.options, 7)
        assert log == [7]


def test_messages_that_wait_are_aborted_by_closing(
    memories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = threading.Event()
    communicator = emulated_ranks._Messages.NcclCommunicator
    runtime = emulated_ranks._Cuda.cuda.runtime
    monkeypatch.setattr(communicator, "abort", lambda self: aborted.set())
    monkeypatch.setattr(runtime, "deviceSynchronize", lambda: aborted.wait(60))
    monkeypatch.setattr(workspace, "GRACE_S", 0.1)
    made = FinalizeWorkspace(SingleRank(), 0, transport="nccl", timeout_s=0.1, **SIZES)
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 30
    assert aborted.is_set()
    assert all(memory.address == 0 for memory in memories)
