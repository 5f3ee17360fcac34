"""The finalize with ranks that are threads and share one GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.groups import Group, ThreadGroup
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from tests.finalize_cases import NAN, golden_case, make_case, tricky_case
from tests.gpu.finalize_process import random_calls
from tests.gpu.finalize_ranks import (
    LIMITS,
    GpuRank,
    check_all,
    check_slow_producer,
    green_streams,
    run_on_gpu,
    to_bits,
)

pytestmark = pytest.mark.gpu

SCHEMES = pytest.mark.parametrize("scheme", FinalizeScheme, ids=lambda scheme: scheme.name)
SEVERAL = pytest.mark.parametrize("num_ranks", [2, 4, 8])


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


# --- values ---------------------------------------------------------------------------------------


@SCHEMES
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_golden_vectors(scheme: FinalizeScheme, num_ranks: int) -> None:
    cases = [golden_case(num_ranks, name) for name in ("c0", "c1", "c2", "c3")]
    check_all(cases, limits=LIMITS[scheme])


@SEVERAL
def test_golden_vectors_on_green_contexts(num_ranks: int) -> None:
    case = golden_case(num_ranks, "c1")
    with green_streams(num_ranks) as streams:

        def work(group: Group) -> list[np.ndarray]:
            rank = GpuRank(group, case, stream=streams[group.rank])
            outputs = rank.run(case, 5)
            rank.workspace.close()
            return outputs

        for outputs in run_on_gpu(num_ranks, work):
            for out in outputs:
                case.check(out)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_and_tokens(num_ranks: int) -> None:
    options = {"hidden_size": 1024, "weights": ml_dtypes.bfloat16}
    check_all([make_case(num_ranks, t, **options) for t in (1, 2, 15, 16, 17, 64)])


@SCHEMES
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "hidden_size", "top_k"),
    [(2, 5, 2880, 4), (2, 17, 16384, 32), (4, 37, 264, 6), (8, 20, 1000, 7)],
)
def test_other_sizes(
    scheme: FinalizeScheme, num_ranks: int, num_tokens: int, hidden_size: int, top_k: int
) -> None:
    case = make_case(num_ranks, num_tokens, hidden_size=hidden_size, top_k=top_k, before=True)
    check_all([case], limits=LIMITS[scheme])


def test_more_tokens_than_a_launch_has() -> None:
    check_all([make_case(2, 301, hidden_size=512)], max_tokens=128)


def test_one_rank_and_many_tokens() -> None:
    check_all([make_case(1, 1000, hidden_size=512, top_k=2)])


def test_a_token_does_not_depend_on_the_batch() -> None:
    case = make_case(2, 150, hidden_size=4096, top_k=2)
    (whole,) = check_all([case], 1, limits=LIMITS[FinalizeScheme.TokenOwner], max_tokens=256)
    few = make_case(2, 150, hidden_size=4096, top_k=2)
    few.index, few.weights = [index[:3] for index in case.index], case.weights[:3]
    (first,) = check_all([few], 1, limits=LIMITS[FinalizeScheme.EveryRank])
    np.testing.assert_array_equal(first, whole[:3])


# --- the protocol ---------------------------------------------------------------------------------


@SCHEMES
@SEVERAL
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_words_around_the_sentinel(scheme: FinalizeScheme, num_ranks: int, in_graph: bool) -> None:
    cases = [tricky_case(num_ranks, shift) for shift in range(6)]

    def work(group: Group) -> None:
        rank = GpuRank(group, cases[0], limits=LIMITS[scheme])
        calls = [(case, rank.upload(case), rank.output(case)) for case in cases]
        rank.enqueue_all(calls, in_graph)
        for case, _, out in calls:
            case.check(to_bits(out))
        rank.workspace.close()

    run_on_gpu(num_ranks, work)


@SEVERAL
def test_eager_calls_and_graphs_of_one_to_three_calls(num_ranks: int, cupy: Any) -> None:
    limits, sizes = SchemeLimits(2, 5), [1, 3, 9, 2, 6]
    cases = {t: make_case(num_ranks, t, hidden_size=256, seed=t) for t in sizes}
    plan = random.Random(3)
    sequence = [plan.choice(["eager", "one", "two", "three"]) for _ in range(40)]

    def work(group: Group) -> None:
        rank = GpuRank(group, cases[1], limits=limits)
        calls = [(cases[t], rank.upload(cases[t]), rank.output(cases[t])) for t in sizes]

        def last(count: int) -> None:
            for call in calls[-count:]:
                rank.enqueue(*call)

        graphs = {
            name: rank.capture(partial(last, count))
            for name, count in (("one", 1), ("two", 2), ("three", 3))
        }
        written = {"eager": calls[:1], "one": calls[-1:], "two": calls[-2:], "three": calls[-3:]}
        kept = [
            (case, out.view(np.uint16).copy())
            for item in sequence
            for case, _, out in written[item]
        ]

        def keep(name: str, free: Iterator[Any]) -> None:
            """Copy what an item wrote, and write NaN over it."""
            with rank.own_stream:
                for _, _, out in written[name]:
                    next(free)[1][...] = out.view(np.uint16)
                    out.view(np.uint16).fill(NAN)

        spare = [(case, cupy.empty(out.shape, np.uint16)) for case, _, out in written["three"]]
        keep("three", iter(spare))  # compiled before any rank waits for another
        rank.synchronize()
        delay, free = random.Random(group.rank), iter(kept)
        group.barrier()
        for item in sequence:
            time.sleep(delay.choice([0, 0, 0.002]))
            if item == "eager":
                rank.enqueue(*calls[0])
            else:
                graphs[item].launch(rank.own_stream)
            keep(item, free)
        rank.synchronize()
        for case, out in kept:
            case.check(out.get())
        rank.workspace.close()

    run_on_gpu(num_ranks, work)


@SEVERAL
def test_random_calls(num_ranks: int) -> None:
    run_on_gpu(num_ranks, partial(random_calls, num_calls=2_500))


@SCHEMES
@SEVERAL
def test_late_ranks(scheme: FinalizeScheme, num_ranks: int, cupy: Any) -> None:
    """Ranks behind kernels that sleep or sweep the L2 cache."""
    sleep = cupy.RawKernel(
        r"""extern "C" __global__ void nap(int microseconds) {
          for (int i = 0; i < microseconds; ++i) __nanosleep(1000);
        }""",
        "nap",
    )
    case = make_case(num_ranks, 12, hidden_size=1024)
    sleep((1,), (1,), (np.int32(1),))

    def work(group: Group) -> None:
        rank = GpuRank(group, case, limits=LIMITS[scheme])
        sweep = cupy.zeros(16 << 20, np.float32)
        arrays, delays = rank.upload(case), random.Random(group.rank)
        outputs = [rank.output(case) for _ in range(30)]
        sweep += 1  # compiled before any rank waits for another
        cupy.cuda.Device().synchronize()
        group.barrier()
        for out in outputs:
            with rank.own_stream:
                if delays.random() < 0.4:
                    sleep((1,), (1,), (np.int32(delays.randrange(300)),))
                if delays.random() < 0.2:
                    sweep += 1
            rank.enqueue(case, arrays, out)
        rank.synchronize()
        for out in outputs:
            case.check(to_bits(out))
        rank.workspace.close()

    run_on_gpu(num_ranks, work)


# --- streams --------------------------------------------------------------------------------------


def test_two_streams_take_turns(cupy: Any) -> None:
    case = make_case(2, 4, hidden_size=1024)

    def work(group: Group) -> None:
        rank = GpuRank(group, case)
        other = cupy.cuda.Stream(non_blocking=True)
        arrays = rank.upload(case)
        outputs = [rank.output(case) for _ in range(100)]
        group.barrier()
        for number, out in enumerate(outputs):
            rank.enqueue(case, arrays, out, (rank.stream, other.ptr)[number % 2])
        rank.synchronize()
        for out in outputs:
            case.check(to_bits(out))
        rank.workspace.close()

    run_on_gpu(2, work)


def test_a_workspace_is_made_while_another_thread_captures(cupy: Any) -> None:
    case = make_case(1, 4)
    (expected,) = check_all([case], 1)
    captured = cupy.cuda.Stream(non_blocking=True)
    with captured:
        captured.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            (rank,) = run_on_gpu(1, lambda group: GpuRank(group, case))
        finally:
            captured.end_capture()
    np.testing.assert_array_equal(rank.run(case)[0], expected)
    rank.workspace.close()


def test_two_streams_in_one_capture(cupy: Any) -> None:
    case = make_case(1, 4)

    def work(group: Group) -> None:
        rank = GpuRank(group, case)
        arrays, out = rank.upload(case), rank.output(case)
        rank.enqueue(case, arrays, out)
        rank.synchronize()
        first, second = rank.own_stream, cupy.cuda.Stream(non_blocking=True)
        with first:
            first.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            rank.enqueue(case, arrays, out)
            fork = first.record()
            second.wait_event(fork)
            with pytest.raises(RuntimeError, match="one CUDA graph must be on one stream"):
                rank.enqueue(case, arrays, out, second.ptr)
            first.wait_event(second.record())
            first.end_capture()
        rank.workspace.close()

    run_on_gpu(1, work)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_slow_producer_that_lets_its_successor_start(in_graph: bool, num_ranks: int) -> None:
    case = make_case(num_ranks, 1, hidden_size=1024)

    def work(group: Group) -> None:
        rank = GpuRank(group, case)
        check_slow_producer(rank, case, in_graph)
        rank.workspace.close()

    run_on_gpu(num_ranks, work)


def test_two_groups_of_threads_share_the_gpu(cupy: Any) -> None:
    case = make_case(2, 64, hidden_size=4096)
    pairs = [ThreadGroup(2), ThreadGroup(2)]

    def work(thread: Group) -> None:
        rank = GpuRank(pairs[thread.rank // 2].ranks[thread.rank % 2], case)
        arrays, outputs = rank.upload(case), [rank.output(case) for _ in range(30)]
        thread.barrier()
        for out in outputs:
            rank.enqueue(case, arrays, out)
        rank.synchronize()
        for out in outputs:
            case.check(to_bits(out))
        thread.barrier()
        rank.workspace.close()

    run_on_gpu(4, work)


# --- ranks that do not come -----------------------------------------------------------------------


@SCHEMES
@SEVERAL
def test_a_rank_that_does_not_come(scheme: FinalizeScheme, num_ranks: int, cupy: Any) -> None:
    case = make_case(num_ranks, 6, hidden_size=1024)

    def work(group: Group) -> None:
        rank = GpuRank(group, case, limits=LIMITS[scheme], timeout_s=0.3)
        case.check(rank.run(case)[0])
        arrays, outs = rank.upload(case), [rank.output(case) for _ in range(2)]
        group.barrier()
        if group.rank > 0:
            start = time.monotonic()
            for out in outs:
                rank.enqueue(case, arrays, out)
            with pytest.raises(PeerTimeoutError, match=f"rank {group.rank} waited") as caught:
                rank.synchronize()
            assert time.monotonic() - start < 5
            assert (caught.value.call, caught.value.num_tokens) == (2, 6)
            for out in outs:
                assert np.isnan(to_bits(out).view(ml_dtypes.bfloat16).astype(np.float32)).all()
            with pytest.raises(PeerTimeoutError):
                rank.enqueue(case, arrays, outs[0])
            assert int(cupy.arange(10).sum()) == 45  # the GPU works on
        rank.workspace.close()
        again = GpuRank(group, case, limits=LIMITS[scheme])
        case.check(again.run(case)[0])
        again.workspace.close()

    run_on_gpu(num_ranks, work)


@pytest.mark.parametrize("scheme", [FinalizeScheme.TokenOwner, FinalizeScheme.ExpertOwner])
def test_a_late_rank_hears_that_the_other_has_given_up(scheme: FinalizeScheme, cupy: Any) -> None:
    case = make_case(2, 6, hidden_size=1024)

    def work(group: Group) -> None:
        rank = GpuRank(group, case, limits=LIMITS[scheme], timeout_s=0.3)
        case.check(rank.run(case)[0])
        arrays, out = rank.upload(case), rank.output(case)
        for number in (1, 0):  # one after the other
            group.barrier()
            if number == group.rank:
                rank.enqueue(case, arrays, out)
                with pytest.raises(PeerTimeoutError):
                    rank.synchronize()
        rank.workspace.close()

    run_on_gpu(2, work)


def test_hundred_workspaces_leave_no_memory(cupy: Any) -> None:
    case = make_case(1, 1)

    def work(group: Group) -> None:
        free = []
        for number in range(100):
            GpuRank(group, case, max_tokens=256).workspace.close()
            if number % 50 == 49:
                group.barrier()
                free.append(cupy.cuda.runtime.memGetInfo()[0])
                group.barrier()
        assert free[0] - free[1] <= 1 << 20

    run_on_gpu(2, work)
