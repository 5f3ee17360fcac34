"""Making workspaces on emulated ranks: failures on one rank, the choice of the transport."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from cupy_moe.comm import transport, workspace
from cupy_moe.comm.groups import Group
from cupy_moe.comm.workspace import FinalizeWorkspace
from tests import emulated_ranks
from tests.emulated_ranks import emulate, run_ranks

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
