"""Emulated ranks of the finalize that do not come, come late, or close alone."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cupy_moe.comm import FileStore, Group, PeerTimeoutError, StoreGroup, check_arrays
from cupy_moe.comm import workspace as workspace_module
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from tests import emulated_ranks
from tests.emulated_calls import LIMITS, SCHEMES, call, open_workspace
from tests.emulated_ranks import emulate, run_ranks
from tests.finalize_cases import BF16, make_case

pytestmark = pytest.mark.skipif(emulated_ranks.COMPILER is None, reason="no C++ compiler")

PEER_SCHEMES = [s for s in FinalizeScheme if s is not FinalizeScheme.EveryRank]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(autouse=True)
def _emulator(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    emulate(monkeypatch, built)


@SCHEMES
def test_a_peer_that_does_not_come(scheme: FinalizeScheme) -> None:
    case = make_case(2, 3, hidden_size=64)

    def work(group: Group) -> None:
        workspace = open_workspace(group, case, limits=LIMITS[scheme], timeout_s=0.5)
        case.check(call(workspace, case))
        group.barrier()
        if group.rank == 0:
            with pytest.raises(PeerTimeoutError, match=r"0\.5 s for rank 1 in call 2"):
                call(workspace, case)
            with pytest.raises(PeerTimeoutError) as caught:
                workspace.check()
            assert (caught.value.peer, caught.value.num_tokens) == (1, 3)
        workspace.close()
        assert workspace._memory.address == 0
        with pytest.raises(RuntimeError, match="closed"):
            call(workspace, case)
        with open_workspace(group, case, limits=LIMITS[scheme]) as another:
            case.check(call(another, case))

    run_ranks(2, work)


def test_close_and_open_again_after_one_rank_was_late(tmp_path: Path) -> None:
    case, store = make_case(2, 3, hidden_size=64), FileStore(tmp_path, timeout_s=30.0)

    def work(thread: Group) -> None:
        group = StoreGroup(thread.rank, 2, store)
        workspace = open_workspace(group, case, timeout_s=0.5)
        case.check(call(workspace, case))
        thread.barrier()
        if group.rank == 1:
            with pytest.raises(PeerTimeoutError):
                call(workspace, case)
        thread.barrier()
        if group.rank == 0:  # all rows of the other rank are there
            case.check(call(workspace, case))
        workspace.close()
        with open_workspace(group, case) as another:
            case.check(call(another, case))

    run_ranks(2, work)


def test_a_rank_that_does_not_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its peer gives up waiting and leaves the memory that it could still write into."""
    monkeypatch.setattr(workspace_module, "GRACE_S", 0.2)
    case, store = make_case(2, 3, hidden_size=64), FileStore(tmp_path, timeout_s=30.0)

    def work(thread: Group) -> bool:
        workspace = open_workspace(StoreGroup(thread.rank, 2, store), case, timeout_s=0.2)
        if thread.rank == 0:
            workspace.close()
        thread.barrier()
        if thread.rank == 1:
            with contextlib.suppress(PeerTimeoutError):
                call(workspace, case)
            start = time.monotonic()
            workspace.close()  # late, but it finds that the other rank has come
            assert time.monotonic() - start < 10
        return workspace._memory.address != 0

    assert run_ranks(2, work) == [True, False]
    assert "closing without all ranks" in caplog.text
    assert "stay allocated" in caplog.text


@pytest.mark.parametrize("scheme", PEER_SCHEMES, ids=lambda scheme: scheme.name)
def test_a_late_rank_hears_that_the_other_has_given_up(scheme: FinalizeScheme) -> None:
    case = make_case(2, 4, hidden_size=520)

    def work(group: Group) -> None:
        workspace = open_workspace(group, case, limits=LIMITS[scheme], timeout_s=0.5)
        case.check(call(workspace, case))
        for rank in (1, 0):  # one after the other
            group.barrier()
            if rank == group.rank:
                with pytest.raises(PeerTimeoutError):
                    call(workspace, case)
        workspace.close()

    run_ranks(2, work)


def test_one_thread_that_gives_up_ends_the_waits_of_all() -> None:
    """As if the patience of another thread had ended, long before that of those that wait."""
    case = make_case(2, 3, hidden_size=520)

    def work(group: Group) -> None:
        workspace = open_workspace(group, case, timeout_s=600.0)
        case.check(call(workspace, case))
        group.barrier()
        if group.rank == 0:
            failed = workspace._memory.bytes[workspace.layout.failed_offset :].view(np.int32)
            threading.Timer(0.5, failed.__setitem__, (0, 1)).start()
            out = call(workspace, case)
            assert np.isnan(out.view(BF16).astype(np.float32)).all()
        group.barrier()
        workspace.close()

    run_ranks(2, work, timeout_s=60.0)


@SCHEMES
def test_a_rank_that_has_given_up_sends_nothing_more(scheme: FinalizeScheme) -> None:
    """Replays of graphs are not stopped by the host."""
    case, late, others = (make_case(2, 3, hidden_size=64, seed=seed) for seed in range(3))

    def work(group: Group) -> None:
        workspace = open_workspace(group, case, limits=LIMITS[scheme], timeout_s=0.5)
        case.check(call(workspace, case))
        group.barrier()
        if group.rank == 0:
            with pytest.raises(PeerTimeoutError):
                call(workspace, late)
            workspace._report.words[0] = 0
            for _ in range(3):
                out = call(workspace, others)
                assert np.isnan(out.view(BF16).astype(np.float32)).all()
        group.barrier()
        if group.rank == 1:
            with contextlib.suppress(PeerTimeoutError):
                late.check(call(workspace, late))
            with pytest.raises(PeerTimeoutError):
                call(workspace, others)
        workspace.close()

    run_ranks(2, work)


@pytest.mark.parametrize("scheme", PEER_SCHEMES, ids=lambda scheme: scheme.name)
def test_a_thread_sends_nothing_if_another_one_gave_up(scheme: FinalizeScheme) -> None:
    """Half of the columns of the rows arrive, but the norm takes all of them."""
    case = make_case(2, 1, hidden_size=512, top_k=4)

    def work(group: Group) -> None:
        workspace = open_workspace(group, case, limits=LIMITS[scheme], timeout_s=0.5)
        memory, b = workspace._memory.bytes, workspace.layout.buffers()[scheme]
        if group.rank == 0:
            rows = memory[b.rows_offset :][: b.row_group_bytes].view(np.uint16).reshape(-1, 512)
            rows[:, :256] = 0x3F80
            with pytest.raises(PeerTimeoutError):
                call(workspace, case)
        group.barrier()
        results = memory[b.results_offset : b.generations_offset].view(np.uint32)
        assert (results == b.results_sentinel).all()
        group.barrier()
        workspace.close()

    run_ranks(2, work)


@SCHEMES
def test_what_was_given_up_is_nan(scheme: FinalizeScheme) -> None:
    case = make_case(2, 3, hidden_size=520)

    def work(group: Group) -> None:
        workspace = open_workspace(group, case, limits=LIMITS[scheme], timeout_s=0.2)
        if group.rank == 0:
            for _ in range(2):  # the second one does not wait again
                out = np.full((3, 520), 0, np.uint16)
                arrays = check_arrays(
                    *case.arguments(0), out.view(BF16), device=-1, hidden_size=520, top_k=8
                )
                workspace._report.words[0] = 0
                start = time.monotonic()
                workspace.run(arrays, case.options, 0)
                assert time.monotonic() - start < 20
                assert np.isnan(out.view(BF16).astype(np.float32)).all()
        workspace.close()

    run_ranks(2, work)
