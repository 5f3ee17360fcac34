"""FP4 operations called again: what skips the rules, and on which partitions launches are."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupy_moe import bound_layer, pipeline
from cupy_moe.fused_moe import fp4_layers, repeated
from cupy_moe.runtime import launch as launch_module
from cupy_moe.runtime.arrays import describe
from tests.fp4_calls import FORMS, MODES, case_of, every_argument, fp4_arguments, run
from tests.moe_cases import STRATEGIES
from tests.posing import Gpu, Posing, PosingResources, posing_fp4, posing_gpu
from tests.test_repeated_calls import assert_bound_like, passes_the_rules, spoilt

HOWS = ("shape", "dtype", "gaps", "address", "device")
ARRAYS = ("hidden_states", "gemm1_weights", "gemm2_weights", "gemm2_weights_scale", "output")
CASES = ("swiglu_packed", "swiglu_unpacked_f32", "swiglu_many", "logits_deepseek_g4", "geglu")

each_form = pytest.mark.parametrize("form", FORMS)
each_mode = pytest.mark.parametrize("mode", MODES)
each_strategy = pytest.mark.parametrize("form", STRATEGIES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with posing_gpu(monkeypatch) as gpu:
        yield gpu


def full_arguments(gpu: Gpu, form: str, mode: str = "mxfp8") -> dict[str, Any]:
    """A call that gives every argument, in arrays of its own."""
    return posing_fp4(gpu, every_argument(mode, form))


def forget_launches(gpu: Gpu) -> list[tuple[str, int]]:
    launched = list(gpu.launched)
    gpu.launched.clear()
    return launched


@each_mode
@each_form
@pytest.mark.parametrize("given", [True, False], ids=["output", "allocated"])
def test_a_repeated_call_needs_no_rules(gpu: Gpu, form: str, mode: str, given: bool) -> None:
    arguments = full_arguments(gpu, form, mode)
    arguments["output"] = arguments["output"] if given else None
    assert not passes_the_rules(lambda: run(form, arguments))
    launched = forget_launches(gpu)
    assert len(launched) >= 5
    results: list[Any] = []
    assert passes_the_rules(lambda: results.extend(run(form, arguments)))
    assert gpu.launched == launched
    (output,) = results
    assert (output is arguments["output"]) is given
    assert (output.shape, output.dtype) == ((9, 256), ml_dtypes.bfloat16)


@each_form
@each_mode
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("given", [True, False], ids=["output", "allocated"])
@pytest.mark.parametrize("do_finalize", [True, False])
def test_other_arrays_of_the_same_forms_need_no_rules(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    mode: str,
    case: str,
    given: bool,
    do_finalize: bool,
) -> None:
    """They are bound to the addresses that a layer of theirs would be bound to."""
    arguments = fp4_arguments(mode, case_of(mode, case), form, do_finalize=do_finalize)
    tokens = len(arguments["hidden_states"])
    if given:
        arguments["output"] = np.zeros((tokens, 256), ml_dtypes.bfloat16)
        replay = np.zeros((tokens, arguments["top_k"]), np.int16)
        arguments["routing_replay_out"] = replay
    first, second = (posing_fp4(gpu, arguments) for _ in range(2))
    if form != "whole":
        second["partition_resources"] = first["partition_resources"]
    run(form, first)
    bound = mock.Mock(side_effect=pipeline.bind_stages)
    for module in ("bound_layer", "partitioned_launches"):
        monkeypatch.setattr(f"cupy_moe.{module}.bind_stages", bound)
    results: list[Any] = []
    assert passes_the_rules(lambda: results.extend(run(form, second)))
    (call,) = bound.call_args_list
    make = fp4_layers.whole_layer if form == "whole" else fp4_layers.partitioned_layer
    assert_bound_like(make(**second), call.args[0], results[0] if len(results) == 1 else results)


@each_form
def test_graphs(gpu: Gpu, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one place the whole layer becomes one; partitions never do."""
    scratch = full_arguments(gpu, form)["hidden_states"]  # anything that stays where it is
    monkeypatch.setattr(bound_layer, "allocate", lambda *_: describe(scratch))
    arguments = full_arguments(gpu, form)
    run(form, arguments)
    launched = forget_launches(gpu)
    for _ in range(9):
        run(form, arguments)
    last = forget_launches(gpu)[8 * len(launched) :]
    names = " ".join(name for name, _ in launched)
    assert last == ([(f"graph of {names}", 7)] if form == "whole" else launched)
    gpu.framework.capturing = True
    run(form, arguments)
    assert gpu.launched == launched


@each_form
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ARRAYS)
def test_rules_hold_after_an_accepted_call(gpu: Gpu, form: str, name: str, how: str) -> None:
    arguments = full_arguments(gpu, form)
    for _ in range(2):
        run(form, arguments)
    gpu.launched.clear()
    old = arguments[name]
    new = [old[0], spoilt(how, old[1])] if isinstance(old, list) else spoilt(how, old)
    if how == "shape" and name.endswith("scale"):  # scales may have any
        new = [*new[:1], new[1][:-1]] if isinstance(old, list) else new[:-1]
    with pytest.raises((TypeError, ValueError)):
        run(form, arguments | {name: new})
    assert gpu.launched == []


@each_form
@pytest.mark.parametrize("shared", ["hidden_states", "gemm1_weights", "gemm2_weights_scale"])
@pytest.mark.parametrize("written", ["output"])
def test_overlaps_are_refused(gpu: Gpu, form: str, shared: str, written: str) -> None:
    """Also with an array that fits an accepted call, as all but its address does."""
    arguments = full_arguments(gpu, form)
    run(form, arguments)
    inside = arguments[shared][1] if isinstance(arguments[shared], list) else arguments[shared]
    memory = np.zeros(inside.nbytes + (1 << 16), np.uint8)
    begin = -memory.ctypes.data % 256
    alias = memory[begin : begin + inside.nbytes].view(inside.dtype).reshape(inside.shape)
    output = arguments[written]
    out = memory[begin : begin + output.nbytes].view(output.dtype).reshape(output.shape)
    value = [arguments[shared][0], alias.view(Posing)]
    changed = value if isinstance(arguments[shared], list) else value[1]
    gpu.launched.clear()
    with pytest.raises(ValueError, match="output must not overlap"):
        run(form, arguments | {shared: changed, written: out.view(Posing)})
    assert gpu.launched == []


@pytest.mark.parametrize("pair", [tuple, lambda pair: pair * 2, lambda pair: pair[:1]])
def test_pairs_are_of_two(gpu: Gpu, pair: Any) -> None:
    """In a tuple they are as good as in a list; others are refused as in a first call."""
    arguments = full_arguments(gpu, "tp_n_tp_k")
    for _ in range(2):
        run("tp_n_tp_k", arguments)
    changed = arguments | {"gemm1_weights": pair(arguments["gemm1_weights"])}
    if len(changed["gemm1_weights"]) == 2:
        run("tp_n_tp_k", changed)
        assert passes_the_rules(lambda: run("tp_n_tp_k", changed))
    else:
        with pytest.raises(ValueError, match="exactly two shards"):
            run("tp_n_tp_k", changed)


def test_other_strategies_and_resources_pass_the_rules(gpu: Gpu) -> None:
    arguments = full_arguments(gpu, "tp_n_tp_k")
    run("tp_n_tp_k", arguments)
    for changed in (
        {"partition_strategy": "tp_n_tp_x"},
        {"partition_resources": None},
        {"partition_resources": PosingResources(gpu).streams},
    ):
        with pytest.raises((TypeError, ValueError), match="partition_"):
            run("tp_n_tp_k", arguments | changed)
    elsewhere = PosingResources(gpu)
    elsewhere.device = 1
    with pytest.raises(ValueError, match="have streams for cuda:0"):
        run("tp_n_tp_k", arguments | {"partition_resources": elsewhere})
    other = arguments | {"partition_resources": PosingResources(gpu)}
    assert not passes_the_rules(lambda: run("tp_n_tp_k", other))
    assert passes_the_rules(lambda: run("tp_n_tp_k", arguments))


def test_no_array_and_no_resources_are_kept_alive(gpu: Gpu) -> None:
    arguments = full_arguments(gpu, "tp_n_tp_n")
    for _ in range(3):
        run("tp_n_tp_n", arguments)
    flat = [a for v in arguments.values() for a in (v if isinstance(v, list) else [v])]
    alive = [weakref.ref(a) for a in flat if isinstance(a, Posing | PosingResources)]
    assert len(alive) > 15
    del arguments, flat
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert len(repeated.accepted) > 0


def test_resources_that_follow_closed_ones(gpu: Gpu) -> None:
    """Their streams may have the same handles; nothing refers to the old ones."""
    arguments = full_arguments(gpu, "tp_n_tp_n")
    launched: list[tuple[str, int]] = []
    for _ in range(5):
        arguments["partition_resources"] = PosingResources(gpu)
        gc.collect()
        for known in (False, True):
            assert passes_the_rules(lambda: run("tp_n_tp_n", arguments)) is known
            launched = launched or list(gpu.launched)
            assert forget_launches(gpu) == launched


# --- several handles and threads ------------------------------------------------------------------


@each_strategy
def test_handles_in_turns(gpu: Gpu, form: str) -> None:
    """Each launches on its own streams, also at the same addresses."""
    arguments = full_arguments(gpu, form)
    handles = [(11, 12), (13, 14), (14, 14)]
    resources = [PosingResources(gpu, pair) for pair in handles]
    for index in [0, 1, 2, 0, 1, 2, 1, 1, 0, 2]:
        gpu.launched.clear()
        run(form, arguments | {"partition_resources": resources[index]})
        gemms = [stream for name, stream in gpu.launched if name == "grouped_gemm"]
        assert tuple(gemms) == 2 * handles[index]
    assert len(repeated.accepted) == 3


@each_strategy
def test_threads_on_one_handle(gpu: Gpu, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is between the first and the last launch of a run belongs to it."""
    here = threading.local()
    monkeypatch.setattr(gpu.framework, "current_stream", lambda device: here.stream)
    first = full_arguments(gpu, form)
    calls = {7: first, 8: full_arguments(gpu, form)}
    calls[8]["partition_resources"] = first["partition_resources"]

    def launch(*arguments: Any) -> tuple[str]:
        time.sleep(1e-4)
        return gpu.launch(*arguments)

    here.stream = 7
    run(form, first)
    expected = forget_launches(gpu)
    monkeypatch.setattr(launch_module, "_driver_launch", lambda: (launch, "success"))

    def call(stream: int) -> None:
        here.stream = stream
        for _ in range(6):
            run(form, calls[stream])

    threads = [threading.Thread(target=call, args=(stream,)) for stream in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of_stream = {n: [(name, n if s == 7 else s) for name, s in expected] for n in calls}
    size = len(expected)
    runs = [gpu.launched[i : i + size] for i in range(0, len(gpu.launched), size)]
    assert all(run in of_stream.values() for run in runs)
    assert [runs.count(of_stream[stream]) for stream in calls] == [6, 6]
