"""What FP4 layers on CUDA arrays enqueue, with arrays in host memory that pose as CUDA arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupy_moe.fused_moe import MoePartitionResources, fp4_bound
from cupy_moe.runtime import launch as launch_module
from tests.fp4_calls import FORMS, MODES, case_of, every_argument, fp4_arguments, run
from tests.moe_cases import STRATEGIES
from tests.posing import Gpu, posing, posing_gpu

CALLER, STREAMS = 7, (11, 12)
GEMM = "grouped_gemm"


class Resources(MoePartitionResources):
    """Partitions on two streams of the stand-in for the driver, which takes down forks, joins."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__((None, None))
        self.handles, self.device = STREAMS, 0
        self.topology = tuple(("green", 2, i, i, 0) for i in range(2))
        self.log = gpu.launched

    def fork_from(self, stream: int) -> None:
        self.log.append(("fork", stream))

    def join_into(self, stream: int) -> None:
        self.log.append(("join", stream))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(fp4_bound, "device_guard", launch_module_guard)
    with posing_gpu(monkeypatch) as gpu:
        yield gpu


def launch_module_guard(_device: int) -> Any:
    from contextlib import nullcontext

    return nullcontext()


def aligned(value: Any) -> Any:
    """Copies that start at multiples of 64 bytes, as CUDA memory does."""
    if isinstance(value, list):
        return [aligned(v) for v in value]
    if not isinstance(value, np.ndarray):
        return value
    memory = np.zeros(value.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def on_gpu(gpu: Gpu, form: str, arguments: dict[str, Any]) -> dict[str, Any]:
    moved = {name: posing(aligned(value)) for name, value in arguments.items()}
    if form != "whole":
        moved["partition_resources"] = Resources(gpu)
    return moved


def both(name: str) -> list[tuple[str, int]]:
    return [(name, stream) for stream in STREAMS]


FORK, JOIN = ("fork", CALLER), ("join", CALLER)
GEMMS = {
    "whole": [(GEMM, CALLER), (GEMM, CALLER)],
    "tp_n_tp_n": [FORK, *both(GEMM), JOIN, FORK, *both(GEMM), JOIN],
    "tp_n_tp_k": [FORK, *both(GEMM), *both(GEMM), JOIN],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_stages_in_order(gpu: Gpu, form: str, mode: str) -> None:
    arguments = on_gpu(gpu, form, every_argument(mode, form))
    (output,) = run(form, arguments)
    assert output is arguments["output"]
    before = [("permute", CALLER), ("cast", CALLER)]
    assert gpu.launched == [*before, *GEMMS[form], ("finalize", CALLER)]


@pytest.mark.parametrize("form", FORMS)
def test_the_gemms_sort_few_slots_themselves(gpu: Gpu, form: str) -> None:
    case = case_of("mxfp8", "swiglu_one_token")
    run(form, on_gpu(gpu, form, fp4_arguments("mxfp8", case, form)))
    assert gpu.launched == [("cast", CALLER), *GEMMS[form], ("finalize", CALLER)]


@pytest.mark.parametrize("form", FORMS)
def test_routing_and_rows_that_are_handed_out(gpu: Gpu, form: str) -> None:
    case = case_of("bf16", "logits_default_bf16")  # more slots than the GEMMs sort themselves
    arguments = on_gpu(gpu, form, fp4_arguments("bf16", case, form, do_finalize=False))
    rows, weights, row_of_slot = run(form, arguments)
    assert rows.shape[1] == 256
    assert weights.shape == (8, 6)
    assert row_of_slot.shape == (48,)
    before = [(stage, CALLER) for stage in ("route", "permute", "cast")]
    after = [("add_rows", CALLER)] if form == "tp_n_tp_k" else []
    assert gpu.launched == [*before, *GEMMS[form], *after]


@pytest.mark.parametrize("form", STRATEGIES)
def test_partitions_are_joined_after_a_refused_launch(
    gpu: Gpu, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(config: Any, handle: str, params: int, extra: int) -> tuple[str]:
        if handle == GEMM:
            raise RuntimeError("refused")
        return gpu.launch(config, handle, params, extra)

    arguments = on_gpu(gpu, form, every_argument("mxfp8", form))
    monkeypatch.setattr(launch_module, "_driver_launch", lambda: (launch, "success"))
    with pytest.raises(RuntimeError, match="refused"):
        run(form, arguments)
    assert gpu.launched == [("permute", CALLER), ("cast", CALLER), FORK, JOIN]
    assert not arguments["partition_resources"].launch_guard()._is_owned()


@pytest.mark.parametrize("form", STRATEGIES)
def test_a_thread_that_holds_the_guard_may_run_layers(gpu: Gpu, form: str) -> None:
    arguments = on_gpu(gpu, form, every_argument("mxfp8", form))
    guard = arguments["partition_resources"].launch_guard()
    with guard:
        run(form, arguments)
        assert guard._is_owned()
    assert not guard._is_owned()
    assert gpu.launched[2:-1] == GEMMS[form]


@pytest.mark.parametrize("form", STRATEGIES)
def test_partitions_are_joined_after_a_refused_fork(gpu: Gpu, form: str) -> None:
    """A partition may be waiting already when the other cannot."""

    class Refusing(Resources):
        def fork_from(self, stream: int) -> None:
            super().fork_from(stream)
            raise RuntimeError("refused")

    arguments = on_gpu(gpu, form, every_argument("mxfp8", form))
    arguments["partition_resources"] = Refusing(gpu)
    with pytest.raises(RuntimeError, match="refused"):
        run(form, arguments)
    assert gpu.launched == [("permute", CALLER), ("cast", CALLER), FORK, JOIN]
