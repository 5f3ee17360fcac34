"""The finalize with up to eight ranks on as many GPUs, or fewer: processes, and threads.

With a GPU for each rank, processes run all that two do. With fewer GPUs, one is enough, they share
them, and the driver gives them the GPU in turns: a launch then waits for other launches' time
slices, which takes milliseconds a call, so these make few calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupy_moe.comm.groups import Group
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from tests.finalize_cases import golden_case, make_case
from tests.gpu.finalize_ranks import (
    LIMITS,
    GpuRank,
    assert_done,
    check_all,
    need_gpus,
    num_gpus,
    run_on_gpu,
    run_processes,
    to_bits,
)

pytestmark = pytest.mark.gpu

SCHEMES = pytest.mark.parametrize("scheme", FinalizeScheme, ids=lambda scheme: scheme.name)
GROUP_SIZES = (4, 8)
ALONE = (
    "golden",
    "tricky",
    "random_calls",
    "pairs",
    "layer",
    "raises_first",
    "slow_producer",
    "nccl",
)
IN_TURNS = ("golden", "tricky", "few_calls", "pairs", "layer")


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=GROUP_SIZES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What ranks with a GPU each have printed."""
    need_gpus(request.param)
    folder = tmp_path_factory.mktemp("alone")
    return run_processes(",".join(ALONE), folder, size=request.param, timeout_s=240.0)


@pytest.mark.parametrize("scenario", ALONE)
def test_processes_with_a_gpu_each(scenario: str, alone: list[str]) -> None:
    assert_done(alone, scenario)


@pytest.fixture(scope="module", params=[2, *GROUP_SIZES])
def in_turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What ranks have printed of which several are on each GPU."""
    if num_gpus() >= request.param:
        pytest.skip(f"each of {request.param} ranks has a GPU of its own here")
    folder = tmp_path_factory.mktemp("in_turns")
    return run_processes(",".join(IN_TURNS), folder, size=request.param, timeout_s=90.0)


@pytest.mark.parametrize("scenario", IN_TURNS)
def test_processes_that_share_gpus(scenario: str, in_turns: list[str]) -> None:
    assert_done(in_turns, scenario)


# --- threads --------------------------------------------------------------------------------------


@SCHEMES
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("num_ranks", [2, *GROUP_SIZES])
def test_golden_vectors_on_threads(scheme: FinalizeScheme, num_ranks: int) -> None:
    cases = [golden_case(num_ranks, name) for name in ("c0", "c1", "c2", "c3")]
    check_all(cases, num_devices=min(num_ranks, num_gpus()), limits=LIMITS[scheme])


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("num_ranks", [2, *GROUP_SIZES])
def test_calls_of_all_schemes_on_threads(num_ranks: int, in_graph: bool) -> None:
    sizes = (1, 2, 4, 9, 23, 5)
    cases = [make_case(num_ranks, t, hidden_size=520, seed=t) for t in sizes]

    def work(group: Group) -> None:
        device = group.rank % num_gpus()
        rank = GpuRank(group, cases[0], device, limits=SchemeLimits(2, 5), max_tokens=16)
        calls: list[Any] = [(case, rank.upload(case), rank.output(case)) for case in cases]
        rank.enqueue_all(calls, in_graph)
        for case, _, out in calls:
            case.check(to_bits(out))
        rank.workspace.close()

    run_on_gpu(num_ranks, work)


# --- last, as nobody knows what a killed rank leaves behind ---------------------------------------


@pytest.mark.parametrize("num_ranks", [2, *GROUP_SIZES])
def test_a_killed_process(num_ranks: int, tmp_path: Path) -> None:
    *others, killed = run_processes("killed", tmp_path, size=num_ranks, timeout_s=80.0)
    assert_done(others, "killed")
    assert "DONE" not in killed
