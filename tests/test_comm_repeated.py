"""Calls of the finalize made again: what skips the rules, on emulated ranks with posing arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.comm import (
    PeerTimeoutError,
    close_tp_moe_finalize_rmsnorm,
    finalize_rmsnorm,
    init_tp_moe_finalize_rmsnorm,
    launches,
    opening,
    repeated,
    tp_moe_finalize_rmsnorm,
)
from cupy_moe.comm.groups import Group, SingleRank
from cupy_moe.comm.residents import enter_device, leave_device
from cupy_moe.comm.workspace import FinalizeWorkspace
from cupy_moe.runtime.arrays import FRAMEWORKS
from cupy_moe.validate import Checker
from tests import emulated_ranks
from tests.emulated_ranks import emulate, run_ranks
from tests.finalize_cases import BF16, NAN, FinalizeCase, make_case
from tests.posing import Posing, PosingFramework

pytestmark = pytest.mark.skipif(emulated_ranks.COMPILER is None, reason="no C++ compiler")

SIZES = {"hidden_size": 64, "top_k": 2, "max_tokens": 8}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator")


class Order(emulated_ranks._OneStream):
    """What streams are, as the test says."""

    ids: dict[int, int] = {}  # noqa: RUF012 (cleared by the fixture)
    captured: set[int] = set()  # noqa: RUF012
    log: list[int] = []  # noqa: RUF012

    def before(self, stream: int) -> int | None:
        return None if stream in self.captured else self.ids.get(stream, stream)

    def after(self, stream: int) -> None:
        self.log.append(stream)


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, built: Path) -> Iterator[PosingFramework]:
    emulate(monkeypatch, built)
    framework = PosingFramework()
    for kept in (Order.ids, Order.captured, Order.log):
        kept.clear()
    monkeypatch.setitem(FRAMEWORKS, Posing, framework)
    monkeypatch.setattr("cupy_moe.comm.workspace.StreamOrder", Order)
    monkeypatch.setattr(opening, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(finalize_rmsnorm, "_refuse_capture", lambda device: None)
    repeated._reader.cache_clear()
    yield framework
    close_tp_moe_finalize_rmsnorm()
    repeated._reader.cache_clear()


def posing(array: np.ndarray, offset: int = 0) -> Posing:
    """Copy that poses as an array of ``cuda:0`` and starts where allocators put arrays."""
    memory = np.zeros(array.nbytes + 512, np.uint8)
    first = -memory.ctypes.data % 256 + offset
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy.view(Posing)


def arrays_of(case: FinalizeCase, rank: int = 0) -> list[Any]:
    out = np.full((case.num_tokens, case.hidden_size), NAN, np.uint16).view(BF16)
    return [posing(array) for array in (*case.arguments(rank), out)]


def call(arrays: list[Any], **scalars: Any) -> None:
    defaults = {"eps": 1e-6, "gain_center": 0.25, "weight_before_norm": False}
    tp_moe_finalize_rmsnorm(*arrays, **defaults | scalars)


def check(case: FinalizeCase, arrays: list[Any]) -> None:
    case.check(np.asarray(arrays[-1]).view(np.uint16))


def small_case(num_tokens: int = 3, num_ranks: int = 1, **options: Any) -> FinalizeCase:
    return make_case(num_ranks, num_tokens, hidden_size=64, top_k=2, **options)


def init(**options: Any) -> FinalizeWorkspace:
    assert init_tp_moe_finalize_rmsnorm(SingleRank(), device=0, **SIZES | options)
    return finalize_rmsnorm._registry.get().workspace


def passes_the_rules(run: Callable[[], object]) -> bool:
    """Whether a call is taken without a look at the rules for arrays."""
    with mock.patch.object(Checker, "array", autospec=True, side_effect=Checker.array) as rule:
        run()
    return rule.call_count == 0


# --- what skips the rules -------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("num_tokens", [1, 3, 19])  # the last in three launches
def test_other_arrays_of_the_same_forms(transport: str, num_tokens: int) -> None:
    cases = [small_case(num_tokens, 2, seed=seed) for seed in range(3)]

    def work(group: Group) -> None:
        assert init_tp_moe_finalize_rmsnorm(group, device=0, transport=transport, **SIZES)
        workspace = finalize_rmsnorm._registry.get().workspace
        for number, case in enumerate([*cases, *cases]):
            arrays = arrays_of(case, group.rank)
            with mock.patch.object(workspace, "run", side_effect=workspace.run) as run:
                call(arrays)
            assert run.call_count == (not number)
            check(case, arrays)
        assert workspace._num_calls == 6
        close_tp_moe_finalize_rmsnorm()

    run_ranks(2, work)


def test_no_rules_and_nothing_bound() -> None:
    workspace, case = init(), small_case()
    assert not passes_the_rules(lambda: call(arrays_of(case)))
    with mock.patch.object(launches, "bind", side_effect=AssertionError):
        assert passes_the_rules(lambda: call(arrays_of(case)))
    assert workspace._num_calls == 2
    assert Order.log == [7, 7]


def test_rows_that_are_far_apart() -> None:
    init()
    case = small_case()
    wide = posing(np.pad(case.gemm2[0], ((0, 0), (0, 24)), constant_values=NAN).view(BF16))
    wider = posing(np.pad(case.gemm2[0], ((0, 0), (0, 40)), constant_values=NAN).view(BF16))
    for rows, is_known in ((wide, False), (wide, True), (wider, False), (wide, True)):
        arrays = [rows[:, :64], *arrays_of(case)[1:]]
        assert passes_the_rules(lambda arrays=arrays: call(arrays)) is is_known
        check(case, arrays)


def test_threads_of_one_rank() -> None:
    init()
    cases = [small_case(seed=seed) for seed in range(4)]
    call(arrays_of(cases[0]))
    wrong: list[BaseException] = []

    def work(case: FinalizeCase) -> None:
        try:
            for _ in range(5):
                arrays = arrays_of(case)
                call(arrays)
                check(case, arrays)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what does not --------------------------------------------------------------------------------


def test_arrays_of_other_forms() -> None:
    init()
    case = small_case()
    call(arrays_of(case))
    others = [
        small_case(4),
        small_case(weights=ml_dtypes.bfloat16),
        FinalizeCase(
            [case.gemm2[0][:-1]], case.index, case.weights, case.norm_weight, case.options
        ),
    ]
    for other in others:
        arrays = arrays_of(other)
        assert not passes_the_rules(lambda arrays=arrays: call(arrays))
        check(other, arrays)
    flat = arrays_of(case)
    flat[2] = posing(case.index[0].reshape(-1))
    assert not passes_the_rules(lambda: call(flat))
    check(case, flat)


def test_a_misaligned_array() -> None:
    init()
    arrays = arrays_of(small_case())
    call(arrays)
    arrays[0] = posing(np.asarray(arrays[0]), offset=8)
    with pytest.raises(ValueError, match="multiple of 16"):
        call(arrays)


@pytest.mark.parametrize("position", range(4))
def test_an_output_over_an_input(position: int) -> None:
    init()
    case = small_case(1)
    arrays = arrays_of(case)
    call(arrays)
    size = arrays[position].nbytes
    memory = posing(np.zeros(size + 512, np.uint8))
    shared = memory[:size].view(arrays[position].dtype).reshape(arrays[position].shape)
    shared[...] = arrays[position]
    last = (size - 1) // 256 * 256  # in the last of the input
    over = memory[last : last + 128].view(BF16).reshape(1, 64)
    apart = memory[-(-size // 256) * 256 :][:128].view(BF16).reshape(1, 64)
    arrays[position] = shared
    with pytest.raises(ValueError, match="not overlap"):
        call([*arrays[:-1], over])
    assert passes_the_rules(lambda: call([*arrays[:-1], apart]))
    check(case, [apart])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"weight_before_norm": 0}, TypeError),
        ({"gain_center": True}, TypeError),
        ({"eps": float("nan")}, ValueError),
        ({"eps": None}, TypeError),
        ({"backend": "other"}, ValueError),
    ],
)
def test_scalars_that_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    init()
    arrays = arrays_of(small_case())
    call(arrays, gain_center=1.0)
    with pytest.raises(error):
        call(arrays, **{"gain_center": 1.0} | changes)


def test_other_scalars() -> None:
    init()
    case = small_case()
    for before in (False, True, False):
        arrays = arrays_of(case)
        case.options = type(case.options)(1e-6, 0.25, before)
        call(arrays, weight_before_norm=before)
        check(case, arrays)


def test_another_stream_and_another_one_at_its_address(framework: PosingFramework) -> None:
    init()
    case = small_case()
    with mock.patch.object(launches, "bind", side_effect=launches.bind) as bound:
        for stream in (7, 8, 7, 8):
            framework.stream = stream
            call(arrays_of(case))
        Order.ids[8] = 9
        call(arrays_of(case))
    assert [item.kwargs["stream"] for item in bound.call_args_list] == [7, 8, 8]
    assert Order.log == [7, 8, 7, 8, 8]


def test_captured_calls_are_bound_one_by_one(framework: PosingFramework) -> None:
    """A graph keeps the parameters of each of its launches."""
    init()
    Order.captured.add(7)
    with mock.patch.object(launches, "bind", side_effect=launches.bind) as bound:
        for _ in range(3):
            call(arrays_of(small_case()))
    assert bound.call_count == 3
    assert Order.log == []


def test_more_ranks_on_the_device() -> None:
    init()
    arrays = arrays_of(small_case(8))
    with mock.patch.object(launches, "bind", side_effect=launches.bind) as bound:
        call(arrays)
        enter_device(0)
        try:
            for _ in range(2):
                call(arrays)
        finally:
            leave_device(0)
        call(arrays)
    alone, shared = bound.call_args_list
    assert (alone.kwargs["pdl"], shared.kwargs["pdl"]) == (True, False)


# --- what went wrong ------------------------------------------------------------------------------


def test_after_a_wait_was_given_up() -> None:
    workspace = init()
    arrays = arrays_of(small_case())
    call(arrays)
    workspace._report.words[:4] = (1, 0, 1, 3)
    with pytest.raises(PeerTimeoutError, match="in call 1"):
        call(arrays)


def test_after_the_workspace_was_closed() -> None:
    workspace = init()
    arrays = arrays_of(small_case())
    for _ in range(2):
        call(arrays)
    where, _ = workspace._last
    close_tp_moe_finalize_rmsnorm()
    assert not workspace.repeat(where[0], [array.ctypes.data for array in arrays], 7)
    with pytest.raises(ValueError, match="not initialized"):
        call(arrays)
    init(top_k=2, max_tokens=16)
    assert not passes_the_rules(lambda: call(arrays))


def test_a_launch_that_fails_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    init()
    arrays = arrays_of(small_case())
    for _ in range(2):
        call(arrays)

    def refuse(bound: object) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(launches, "enqueue", refuse)
    with pytest.raises(RuntimeError, match="refuses"):
        call(arrays)
    assert Order.log == [7, 7, 7]
