"""The finalize between processes with a GPU each."""

from __future__ import annotations

import pytest

from tests.gpu.finalize_ranks import assert_done, run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

# One after another in the same two processes: starting them takes longer than the calls.
SESSION = (
    "golden",
    "tricky",
    "random_calls",
    "two_groups",
    "no_memory",
    "layer",
    "allocators",
    "raises_first",
    "slow_producer",
    "nccl",
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the ranks of the session printed."""
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    folder = tmp_path_factory.mktemp("store")
    return run_processes(",".join(SESSION), folder, timeout_s=60.0, **setting)


@pytest.mark.parametrize("scenario", SESSION)
def test_two_processes(scenario: str, session: list[str]) -> None:
    assert_done(session, scenario)
