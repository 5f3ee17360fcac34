"""The finalize kernel on emulated ranks: every scheme, both transports, counters."""

from __future__ import annotations

import random
import time
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.comm import Group, NormOptions, launches
from cupy_moe.comm.layout import SchemeLimits, choose_scheme
from cupy_moe.kernels import finalize_rmsnorm
from cupy_moe.kernels.finalize_rmsnorm import (
    MAX_GROUPS,
    MAX_WARPS,
    FinalizeRmsnormConfig,
    FinalizeScheme,
)
from tests import emulated_ranks
from tests.emulated_calls import LIMITS, SCHEMES, call, open_workspace
from tests.emulated_ranks import early_successors, emulate, run_ranks
from tests.finalize_cases import FinalizeCase, assert_all_equal, golden_case, make_case, tricky_case

pytestmark = pytest.mark.skipif(emulated_ranks.COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(autouse=True)
def _emulator(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    emulate(monkeypatch, built)


def run_case(case: FinalizeCase, num_calls: int = 4, **options: object) -> np.ndarray:
    """Output, which must be the same on all ranks and in all calls."""

    def work(group: Group) -> list[np.ndarray]:
        with open_workspace(group, case, **options) as workspace:
            return [call(workspace, case) for _ in range(num_calls)]

    outputs = [out for of_rank in run_ranks(case.num_ranks, work) for out in of_rank]
    assert_all_equal(outputs)
    return outputs[0]


# --- values ---------------------------------------------------------------------------------------


@SCHEMES
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "hidden_size", "top_k"),
    [
        (2, 1, 264, 8),
        (2, 5, 520, 3),
        (4, 6, 256, 6),
        (8, 3, 256, 1),
        (8, 9, 64, 11),
        (2, 3, 256, 32),
    ],
)
def test_every_scheme_and_transport(
    scheme: FinalizeScheme,
    transport: str,
    num_ranks: int,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
) -> None:
    case = make_case(num_ranks, num_tokens, hidden_size=hidden_size, top_k=top_k)
    case.check(run_case(case, limits=LIMITS[scheme], transport=transport))


@SCHEMES
def test_transports_give_the_same_bits(scheme: FinalizeScheme) -> None:
    case = make_case(4, 5, seed=3, before=True, weights=ml_dtypes.bfloat16)
    outputs = [run_case(case, 2, limits=LIMITS[scheme], transport=t) for t in ("ipc", "nccl")]
    assert_all_equal(outputs)


@pytest.mark.parametrize("name", ["c0", "c1", "c2", "c3"])
def test_golden_vectors_on_one_and_two_ranks(name: str) -> None:
    for num_ranks in (1, 2):
        case = golden_case(num_ranks, name)
        case.check(run_case(case, 1))


def test_owners_of_tokens_and_every_rank_add_alike() -> None:
    case = make_case(4, 5)
    pair = (FinalizeScheme.EveryRank, FinalizeScheme.TokenOwner)
    assert_all_equal([run_case(case, 1, limits=LIMITS[scheme]) for scheme in pair])


def test_more_tokens_than_a_launch_has() -> None:
    case = make_case(2, 21, hidden_size=64, top_k=2)
    case.check(run_case(case, 3, max_tokens=8))


def test_more_tokens_than_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "resident_clusters", lambda *shape: 3)
    for num_ranks in (2, 4):
        case = make_case(num_ranks, 17, hidden_size=64, top_k=3)
        case.check(run_case(case, 4))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    case = make_case(2, 6, hidden_size=1024)
    whole = run_case(case, 1, limits=LIMITS[FinalizeScheme.TokenOwner])
    alone = FinalizeCase(
        case.gemm2,
        [index[:1] for index in case.index],
        case.weights[:1],
        case.norm_weight,
        case.options,
    )
    first = run_case(alone, 1, limits=LIMITS[FinalizeScheme.TokenOwner])
    np.testing.assert_array_equal(first[0], whole[0])  # other cluster sizes, the same bits


@SCHEMES
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_warps_that_share_columns_change_no_bit(
    scheme: FinalizeScheme, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots on one to eight warps, in blocks alone and in clusters, token after token."""
    case = make_case(num_ranks, 3, hidden_size=264, top_k=9, before=True)
    outputs = []
    for max_threads, num_clusters in ((32, 9), (64, 9), (128, 2), (256, 1), (512, 9)):
        monkeypatch.setattr(finalize_rmsnorm, "MAX_THREADS", max_threads)
        monkeypatch.setattr(launches, "resident_clusters", lambda *shape, n=num_clusters: n)
        monkeypatch.setattr(launches, "sm_count", lambda device, n=max_threads: n // 32)
        outputs.append(run_case(case, 2, limits=LIMITS[scheme]))
    case.check(outputs[0])
    assert_all_equal(outputs)


@SCHEMES
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "top_k", "max_threads", "num_clusters"),
    [(2, 6, 4, 128, 1), (4, 5, 9, 256, 1), (2, 4, 8, 128, 3), (8, 5, 11, 256, 2)],
)
def test_clusters_of_warps_that_share_columns(
    scheme: FinalizeScheme,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    max_threads: int,
    num_clusters: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device for each rank, as only there clusters have several warps a piece."""
    case = make_case(num_ranks, num_tokens, hidden_size=264, top_k=top_k)
    monkeypatch.setattr(finalize_rmsnorm, "MAX_THREADS", max_threads)
    monkeypatch.setattr(launches, "resident_clusters", lambda *shape: num_clusters)
    planned = mock.Mock(side_effect=launches.choose_shape)
    monkeypatch.setattr(launches, "choose_shape", planned)

    def work(group: Group) -> list[np.ndarray]:
        options = {"device": group.rank, "limits": LIMITS[scheme]}
        with open_workspace(group, case, **options) as workspace:
            return [call(workspace, case) for _ in range(3)]

    outputs = [out for of_rank in run_ranks(num_ranks, work) for out in of_rank]
    case.check(outputs[0])
    assert_all_equal(outputs)
    shape = launches.choose_shape(*planned.call_args.args)
    assert min(shape.num_blocks, shape.num_groups) > 1


# --- words that look like the sentinel ------------------------------------------------------------


@SCHEMES
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_words_around_the_sentinel(scheme: FinalizeScheme, num_ranks: int) -> None:
    cases = [tricky_case(num_ranks, shift) for shift in range(7)]

    def work(group: Group) -> list[np.ndarray]:
        with open_workspace(group, cases[0], limits=LIMITS[scheme]) as workspace:
            return [call(workspace, case) for case in cases]

    for outputs in run_ranks(num_ranks, work):
        for case, out in zip(cases, outputs, strict=True):
            case.check(out)


@SCHEMES
@pytest.mark.parametrize("word", [0x0000, 0x8000])
def test_rows_of_nothing_but_zeros(scheme: FinalizeScheme, word: int) -> None:
    case = make_case(2, 2)
    for rows in case.gemm2:
        rows[:] = word
    case.weights = -case.weights
    assert not run_case(case, 4, limits=LIMITS[scheme]).any()


@SCHEMES
def test_no_slot_is_valid(scheme: FinalizeScheme) -> None:
    case = make_case(2, 3)
    for index in case.index:
        index[:] = -1
    assert not run_case(case, 4, limits=LIMITS[scheme]).any()


@SCHEMES
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_negative_gain_makes_no_negative_zeros(scheme: FinalizeScheme, num_ranks: int) -> None:
    case = make_case(num_ranks, 3)
    case.norm_weight = case.norm_weight | 0x8000
    case.options = NormOptions(1e-6, 0.0, False)
    for rows, index in zip(case.gemm2, case.index, strict=True):
        rows[:, ::2] = 0  # beside columns that are not
        index[0] = -1
    out = run_case(case, 2, limits=LIMITS[scheme])
    case.check(out)
    assert not out[0].any()
    assert not out[:, ::2].any()


@SCHEMES
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_that_underflow_are_the_same_on_all_ranks(
    scheme: FinalizeScheme, num_ranks: int
) -> None:
    case = make_case(num_ranks, 5)
    case.weights[:] = 1e-38
    case.norm_weight[:] = 0x8001  # -2^-133: products round to -0.0
    case.options = NormOptions(1e-6, 0.0, False)
    run_case(case, 2, limits=LIMITS[scheme])


# --- sequences ------------------------------------------------------------------------------------


def test_random_sequence_across_every_switch() -> None:
    limits = SchemeLimits(2, 5)
    rng = random.Random(1)
    sizes = [rng.choice([1, 2, 3, 5, 6, 7, 9, 17]) for _ in range(40)]
    assert {choose_scheme(t, 2, limits) for t in sizes} == set(FinalizeScheme)
    cases = {t: make_case(2, t, hidden_size=64, top_k=2, seed=t) for t in set(sizes)}

    def work(group: Group) -> list[np.ndarray]:
        delay = random.Random(group.rank)
        with open_workspace(group, cases[sizes[0]], limits=limits, max_tokens=8) as workspace:
            outputs = []
            for num_tokens in sizes:
                time.sleep(delay.choice([0, 0, 0.01]))
                outputs.append(call(workspace, cases[num_tokens]))
            return outputs

    for outputs in run_ranks(2, work):
        for num_tokens, out in zip(sizes, outputs, strict=True):
            cases[num_tokens].check(out)


@SCHEMES
def test_counters_do_not_overflow(scheme: FinalizeScheme) -> None:
    case = make_case(2, 3, hidden_size=256, top_k=4)

    def work(group: Group) -> int:
        with open_workspace(group, case, limits=LIMITS[scheme], timeout_s=5.0) as workspace:
            b = workspace.layout.buffers()[scheme]
            memory = workspace._memory.bytes[b.generations_offset : b.end].view(np.int32)
            memory[:] = 2**31 - 5 - (2**31 - 5) % 3  # the next copy is that of a new workspace
            workspace._num_calls = 2**31 - 3
            group.barrier()
            for _ in range(9):
                case.check(call(workspace, case))
            counters = memory[: b.capacity * MAX_WARPS * MAX_GROUPS]
            return int(counters.reshape(-1, MAX_WARPS, MAX_GROUPS)[:3, 0].max())

    assert max(run_ranks(2, work)) < 3


# --- several ranks on a device --------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
def test_successors_start_early_on_a_device_of_one_rank_only(is_shared: bool, built: Path) -> None:
    case = make_case(2, 1, hidden_size=64)
    config = FinalizeRmsnormConfig(FinalizeScheme.EveryRank, 2, num_groups=4)
    early_successors(config, built)

    def work(group: Group) -> None:
        device = 0 if is_shared else group.rank
        with open_workspace(group, case, device=device) as workspace:
            call(workspace, case)

    run_ranks(2, work)
    assert bool(early_successors(config, built)) is not is_shared
