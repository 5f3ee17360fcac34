"""The finalize between processes with a GPU each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.finalize_ranks import assert_done, need_gpus, run_processes

pytestmark = pytest.mark.gpu

# One after another in the same two processes: starting them takes longer than the calls.
SESSION = ("golden", "tricky", "random_calls", "no_memory", "layer", "raises_first")


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    need_gpus(2)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the ranks of the session printed."""
    return run_processes(",".join(SESSION), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("scenario", SESSION)
def test_two_processes(scenario: str, session: list[str]) -> None:
    assert_done(session, scenario)


def test_nccl_gives_the_same_bits(tmp_path: Path) -> None:
    outputs = run_processes("nccl", tmp_path)
    if any("NCCL is not installed" in output for output in outputs):
        pytest.skip("NCCL is not installed")
    assert_done(outputs, "nccl")


def test_a_killed_process(tmp_path: Path) -> None:
    alive, killed = run_processes("killed", tmp_path)
    assert_done([alive], "killed")
    assert "DONE" not in killed


def test_allocators_without_handles_to_share(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert_done(run_processes("allocators", tmp_path, **setting), "allocators")


def test_two_groups_of_two_at_once(tmp_path: Path) -> None:
    assert_done(run_processes("two_groups", tmp_path, size=4), "two_groups")
