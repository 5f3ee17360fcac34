"""The public finalize on arrays in host memory, with ranks that are threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupy_moe.comm import (
    FileStore,
    PeerTimeoutError,
    StoreGroup,
    ThreadGroup,
    check_arrays,
    check_tp_moe_finalize_rmsnorm,
    close_tp_moe_finalize_rmsnorm,
    finalize_rmsnorm,
    init_tp_moe_finalize_rmsnorm,
    launches,
    opening,
    supports_tp_moe_finalize_rmsnorm,
    tp_moe_finalize_rmsnorm,
)
from cupy_moe.comm.groups import Group, SingleRank
from cupy_moe.comm.host import HostWorkspace
from cupy_moe.fused_moe import trtllm_fp8_per_tensor_scale_routed_moe
from cupy_moe.testing.inputs import Fp8Layer, make_fp8_layer, make_hidden_states, make_topk
from tests.emulated_ranks import run_ranks
from tests.finalize_cases import BF16, NAN, FinalizeCase, assert_all_equal, golden_case, make_case
from tests.finalize_layer import NORM, check_layer, finalized, shard_layer

HOST = -1


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_tp_moe_finalize_rmsnorm()


def options(case: FinalizeCase) -> dict[str, Any]:
    o = case.options
    return {
        "eps": o.eps,
        "gain_center": o.gain_center,
        "weight_before_norm": o.weight_before_norm,
    }


def run(case: FinalizeCase) -> list[np.ndarray]:
    def work(group: Group) -> np.ndarray:
        sizes = {"hidden_size": case.hidden_size, "top_k": case.top_k, "device": HOST}
        assert init_tp_moe_finalize_rmsnorm(group, **sizes)
        out = np.full((case.num_tokens, case.hidden_size), NAN, np.uint16).view(BF16)
        arrays = (*case.arguments(group.rank), out)
        assert supports_tp_moe_finalize_rmsnorm(*arrays)
        assert tp_moe_finalize_rmsnorm(*arrays, **options(case)) is None
        close_tp_moe_finalize_rmsnorm()
        assert not supports_tp_moe_finalize_rmsnorm(*arrays)
        return out.view(np.uint16)

    return run_ranks(case.num_ranks, work)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["c0", "c1", "c2", "c3"])
def test_golden_vectors(num_ranks: int, name: str) -> None:
    case = golden_case(num_ranks, name)
    outputs = run(case)
    assert_all_equal(outputs)
    case.check(outputs[0])


@pytest.mark.parametrize(("hidden_size", "top_k"), [(8, 1), (2880, 4), (16384, 32)])
def test_other_sizes(hidden_size: int, top_k: int) -> None:
    case = make_case(2, 2, hidden_size=hidden_size, top_k=top_k)
    case.check(run(case)[1])


def test_rows_wider_than_what_is_read_hold_anything() -> None:
    case = make_case(2, 3)
    expected = run(case)[0]
    case.gemm2 = [np.pad(g, ((0, 0), (0, 24)), constant_values=NAN) for g in case.gemm2]
    np.testing.assert_array_equal(run(case)[0], expected)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    case = make_case(1, 2)
    assert init_tp_moe_finalize_rmsnorm(device=HOST, hidden_size=264)
    gemm2, weights, index, norm = case.arguments(0)
    bits = [torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (gemm2, norm)]
    out = torch.full((2, 264), float("nan"), dtype=torch.bfloat16)
    arrays = (bits[0], torch.from_numpy(weights), torch.from_numpy(index.reshape(-1)), bits[1])
    tp_moe_finalize_rmsnorm(*arrays, out, **options(case))
    case.check(out.view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_layer_cut_along_its_intermediate_dimension(num_ranks: int) -> None:
    whole = make_fp8_layer(hidden_size=256, intermediate_size=1024, num_experts=4)
    hidden, topk = make_hidden_states(9, 256), make_topk(9, 2, 4)

    def unfinalized(layer: Fp8Layer) -> list[np.ndarray]:
        arguments = layer.arguments(hidden, topk, do_finalize=False)
        return trtllm_fp8_per_tensor_scale_routed_moe(**arguments)

    def work(group: Group) -> np.ndarray:
        init(group=group, hidden_size=256)
        arrays = unfinalized(shard_layer(whole, group.rank, num_ranks))
        out = np.zeros((9, 256), BF16)
        tp_moe_finalize_rmsnorm(*arrays, np.ones(256, BF16), out, **NORM)
        close_tp_moe_finalize_rmsnorm()
        return out.view(np.uint16)

    outputs = run_ranks(num_ranks, work)
    assert_all_equal(outputs)
    check_layer(outputs[0], finalized(unfinalized(whole)))


# --- state ----------------------------------------------------------------------------------------


def call(**changes: Any) -> None:
    case = make_case(1, 2, hidden_size=64, top_k=2)
    out = changes.pop("output", np.zeros((2, 64), BF16))
    tp_moe_finalize_rmsnorm(*case.arguments(0), out, **options(case) | changes)


def init(**changes: Any) -> bool:
    return init_tp_moe_finalize_rmsnorm(**{"device": HOST, "hidden_size": 64, "top_k": 2} | changes)


def test_not_initialized() -> None:
    with pytest.raises(ValueError, match="contract: the operation is not initialized"):
        call()


def test_check_has_nothing_to_say() -> None:
    check_tp_moe_finalize_rmsnorm()
    assert init()
    check_tp_moe_finalize_rmsnorm()


def test_initialized_twice() -> None:
    assert init()
    assert init()
    assert init(group=SingleRank())
    call()


def test_what_is_not_said_the_second_time_stays() -> None:
    assert init(max_tokens=64, timeout_s=5.0)
    assert init_tp_moe_finalize_rmsnorm()
    assert init_tp_moe_finalize_rmsnorm(timeout_s=5.0)
    for name, value in {"hidden_size": 4096, "timeout_s": 30.0, "transport": "ipc"}.items():
        with pytest.raises(RuntimeError, match="initialized with"):
            init_tp_moe_finalize_rmsnorm(**{name: value})


@pytest.mark.parametrize("difference", [{"top_k": 3}, {"device": 0}], ids=str)
def test_ranks_that_pass_different_sizes(
    difference: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize_rmsnorm, "_refuse_capture", lambda device: None)

    def work(group: Group) -> None:
        with pytest.raises(ValueError, match="every rank must pass the same"):
            init(group=group, **(difference if group.rank else {}))
        assert init(group=group)
        close_tp_moe_finalize_rmsnorm()

    run_ranks(2, work)


@pytest.mark.parametrize("failing", ["_refuse_capture", "compute_capability", "device_shapes"])
def test_what_fails_on_one_rank_is_raised_on_all(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"_refuse_capture": None, "compute_capability": (9, 0), "device_shapes": {}}

    def step(name: str) -> Any:
        def answer(device: int, *sizes: int) -> Any:
            if name == failing and device == 1:
                raise ModuleNotFoundError("no CuPy")
            return answers[name]

        return answer

    monkeypatch.setattr(finalize_rmsnorm, "_refuse_capture", step("_refuse_capture"))
    for name in ("compute_capability", "device_shapes"):
        monkeypatch.setattr(opening, name, step(name))

    def work(group: Group) -> None:
        with pytest.raises(RuntimeError, match=r"rank 1: ModuleNotFoundError: no CuPy"):
            init(group=group, device=group.rank)
        assert init(group=group)  # nobody is left behind
        close_tp_moe_finalize_rmsnorm()

    run_ranks(2, work)


def test_what_fails_with_the_group_is_raised_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise RuntimeError("a CUDA graph is being captured")

    monkeypatch.setattr(finalize_rmsnorm, "_refuse_capture", refuse)
    group = StoreLike()
    monkeypatch.setattr(group, "all_gather", mock.Mock(side_effect=ConnectionError))
    with pytest.raises(RuntimeError, match="is being captured"):
        init(group=group, device=0)


def test_rows_that_the_gpu_cannot_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finalize_rmsnorm, "_refuse_capture", lambda device: None)
    for module in (opening, launches):
        monkeypatch.setattr(module, "compute_capability", lambda device: (8, 9))
    monkeypatch.setattr(launches, "max_shared_memory", lambda device: 101376)
    assert not init(device=0, hidden_size=8192)
    assert "hidden size 8192 with top_k 2 on cuda:0" in caplog.text
    assert not supports_tp_moe_finalize_rmsnorm(None, None, None, None, None)


def test_initialized_for_another_group() -> None:
    assert init()
    with pytest.raises(RuntimeError, match="another group"):
        init(group=StoreLike())


class StoreLike(Group):
    rank, size, key = 0, 1, "another"

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]


def test_initialized_for_other_sizes() -> None:
    assert init()
    with pytest.raises(RuntimeError, match="top_k=2"):
        init(top_k=3)


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cpu", TypeError, "device must be an integer, got 'cpu'"),
        (True, TypeError, "device must be an integer, got True"),
        (1.5, TypeError, "device must be an integer, got 1.5"),
        (-2, ValueError, "device must be a CUDA ordinal, or -1 for host memory, got -2"),
    ],
)
def test_device_that_is_none(device: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        init(device=device)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_groups_of_no_threads(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="ThreadGroup: size must be"):
        ThreadGroup(size)


def test_initialized_for_another_device() -> None:
    assert init()
    with pytest.raises(RuntimeError, match="initialized for device -1 already, got 0"):
        init(device=0)


def test_number_of_ranks_that_is_not_supported() -> None:
    def work(group: Group) -> bool:
        verdict = init(group=group)
        with pytest.raises(ValueError, match="not supported"):
            call()
        assert init(group=group) is verdict
        close_tp_moe_finalize_rmsnorm()
        return verdict

    assert run_ranks(3, work) == [False] * 3


def test_close_makes_room_for_another_group() -> None:
    assert init()
    close_tp_moe_finalize_rmsnorm()
    close_tp_moe_finalize_rmsnorm()
    assert init(group=StoreLike())


def test_no_tokens_leave_the_output_alone() -> None:
    assert init()
    empty = np.zeros((0, 64), BF16)
    arrays = (np.zeros((0, 64), BF16), np.zeros((0, 2), BF16), np.zeros((0, 2), np.int32))
    norm = np.zeros(64, BF16)
    scalars = {"eps": 1e-6, "gain_center": 0.0, "weight_before_norm": False}
    assert supports_tp_moe_finalize_rmsnorm(*arrays, norm, empty)
    tp_moe_finalize_rmsnorm(*arrays, norm, empty, **scalars)


def test_ranks_that_pass_different_numbers_of_tokens() -> None:
    def work(group: Group) -> None:
        init(group=group)
        tokens = 2 + group.rank
        case = make_case(1, tokens, hidden_size=64, top_k=2)
        with pytest.raises(ValueError, match=r"same number of tokens, got \[2, 3\]"):
            tp_moe_finalize_rmsnorm(
                *case.arguments(0), np.zeros((tokens, 64), BF16), **options(case)
            )
        close_tp_moe_finalize_rmsnorm()

    run_ranks(2, work)


def test_a_rank_that_does_not_call() -> None:
    def work(group: Group) -> None:
        init(group=group, timeout_s=0.2)
        if group.rank == 0:
            out = np.zeros((2, 64), BF16)
            for _ in range(2):
                with pytest.raises(PeerTimeoutError, match=r"0\.2 s for another rank in call 1"):
                    call(output=out)
            with pytest.raises(PeerTimeoutError):
                check_tp_moe_finalize_rmsnorm()
            assert np.isnan(out.astype(np.float32)).all()
        close_tp_moe_finalize_rmsnorm()

    run_ranks(2, work)


def test_a_rank_that_calls_when_the_other_has_given_up(tmp_path: Path) -> None:
    store = FileStore(tmp_path, timeout_s=1.0)

    def work(thread: Group) -> None:
        sizes = {"hidden_size": 64, "top_k": 2, "timeout_s": 0.2}
        workspace = HostWorkspace(StoreGroup(thread.rank, 2, store), **sizes)
        case = make_case(1, 2, hidden_size=64, top_k=2)
        out = np.zeros((2, 64), BF16)
        arrays = check_arrays(*case.arguments(0), out, device=HOST, hidden_size=64, top_k=2)
        for rank in range(2):  # one after the other
            if rank == thread.rank:
                for _ in range(2):
                    with pytest.raises(PeerTimeoutError, match="for another rank in call 1"):
                        workspace.run(arrays, case.options)
                assert np.isnan(out.astype(np.float32)).all()
            thread.barrier()

    run_ranks(2, work)


def test_backends() -> None:
    with pytest.raises(ValueError, match="backend"):
        init(backend="other")
    assert init(backend="auto")
    call(backend="auto")
    with pytest.raises(ValueError, match="backend"):
        call(backend="other")
    with pytest.raises(ValueError, match="backend"):
        supports_tp_moe_finalize_rmsnorm(None, None, None, None, None, "other")


def test_arrays_of_another_kind_are_not_supported() -> None:
    assert init()
    assert not supports_tp_moe_finalize_rmsnorm(1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="contract: output must be bfloat16"):
        call(output=np.zeros((2, 64), np.float32))


def test_threads_have_workspaces_of_their_own() -> None:
    assert init()  # of the process
    group = ThreadGroup(1)
    assert init(group=group.ranks[0])
    call()
    close_tp_moe_finalize_rmsnorm()
    call()
