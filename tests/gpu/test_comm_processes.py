"""The finalize between processes with a GPU each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.finalize_ranks import assert_done, need_gpus, run_processes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    need_gpus(2)


@pytest.mark.parametrize("scenario", ["golden", "tricky", "random_calls", "no_memory"])
def test_two_processes(scenario: str, tmp_path: Path) -> None:
    assert_done(run_processes(scenario, tmp_path))


def test_nccl_gives_the_same_bits(tmp_path: Path) -> None:
    outputs = run_processes("nccl", tmp_path)
    if any("NCCL is not installed" in output for output in outputs):
        pytest.skip("NCCL is not installed")
    assert_done(outputs)


def test_a_killed_process(tmp_path: Path) -> None:
    alive, killed = run_processes("killed", tmp_path)
    assert_done([alive])
    assert "RANK DONE" not in killed


def test_a_process_that_raises_first(tmp_path: Path) -> None:
    assert_done(run_processes("raises_first", tmp_path))


def test_allocators_without_handles_to_share(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert_done(run_processes("allocators", tmp_path, **setting))


def test_two_groups_of_two_at_once(tmp_path: Path) -> None:
    assert_done(run_processes("two_groups", tmp_path, size=4))
