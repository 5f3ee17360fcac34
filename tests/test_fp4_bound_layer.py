"""What FP4 layers on CUDA arrays enqueue, with arrays in host memory that pose as CUDA arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cupy_moe.runtime import launch as launch_module
from tests.fp4_calls import FORMS, MODES, case_of, every_argument, fp4_arguments, run
from tests.moe_cases import STRATEGIES
from tests.posing import Gpu, PosingResources, posing_fp4, posing_gpu

CALLER, STREAMS = 7, (11, 12)
GEMM = "grouped_gemm"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with posing_gpu(monkeypatch) as gpu:
        yield gpu


def both(name: str) -> list[tuple[str, int]]:
    return [(name, stream) for stream in STREAMS]


FORK, EXCHANGE, JOIN = ("fork", CALLER), ("exchange", STREAMS[0]), ("join", CALLER)
GEMMS = {
    "whole": [(GEMM, CALLER), (GEMM, CALLER)],
    "tp_n_tp_n": [FORK, *both(GEMM), EXCHANGE, *both(GEMM), JOIN],
    "tp_n_tp_k": [FORK, *both(GEMM), *both(GEMM), JOIN],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_stages_in_order(gpu: Gpu, form: str, mode: str) -> None:
    arguments = posing_fp4(gpu, every_argument(mode, form))
    (output,) = run(form, arguments)
    assert output is arguments["output"]
    before = [("permute", CALLER), ("place_tokens", CALLER)]
    assert gpu.launched == [*before, *GEMMS[form], ("finalize", CALLER)]


@pytest.mark.parametrize("form", FORMS)
def test_the_gemms_sort_few_slots_themselves(gpu: Gpu, form: str) -> None:
    case = case_of("mxfp8", "swiglu_one_token")
    run(form, posing_fp4(gpu, fp4_arguments("mxfp8", case, form)))
    assert gpu.launched == [("place_tokens", CALLER), *GEMMS[form], ("finalize", CALLER)]


@pytest.mark.parametrize("form", FORMS)
def test_routing_and_rows_that_are_handed_out(gpu: Gpu, form: str) -> None:
    case = case_of("bf16", "logits_default_bf16")  # more slots than the GEMMs sort themselves
    arguments = posing_fp4(gpu, fp4_arguments("bf16", case, form, do_finalize=False))
    rows, weights, row_of_slot = run(form, arguments)
    assert rows.shape[1] == 256
    assert weights.shape == (8, 6)
    assert row_of_slot.shape == (48,)
    before = [(stage, CALLER) for stage in ("route", "permute", "place_tokens")]
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

    arguments = posing_fp4(gpu, every_argument("mxfp8", form))
    monkeypatch.setattr(launch_module, "_driver_launch", lambda: (launch, "success"))
    with pytest.raises(RuntimeError, match="refused"):
        run(form, arguments)
    assert gpu.launched == [("permute", CALLER), ("place_tokens", CALLER), FORK, JOIN]
    assert not arguments["partition_resources"].launch_guard()._is_owned()


@pytest.mark.parametrize("form", STRATEGIES)
def test_a_thread_that_holds_the_guard_may_run_layers(gpu: Gpu, form: str) -> None:
    arguments = posing_fp4(gpu, every_argument("mxfp8", form))
    guard = arguments["partition_resources"].launch_guard()
    with guard:
        run(form, arguments)
        assert guard._is_owned()
    assert not guard._is_owned()
    assert gpu.launched[2:-1] == GEMMS[form]


@pytest.mark.parametrize("form", STRATEGIES)
def test_partitions_are_joined_after_a_refused_fork(gpu: Gpu, form: str) -> None:
    """A partition may be waiting already when the other cannot."""

    class Refusing(PosingResources):
        def fork_from(self, stream: int) -> None:
            super().fork_from(stream)
            raise RuntimeError("refused")

    arguments = posing_fp4(gpu, every_argument("mxfp8", form))
    arguments["partition_resources"] = Refusing(gpu)
    with pytest.raises(RuntimeError, match="refused"):
        run(form, arguments)
    assert gpu.launched == [("permute", CALLER), ("place_tokens", CALLER), FORK, JOIN]
