"""Planned FP8 calls: equal to the operation bit for bit, whatever changes between the runs."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, to_host
from cupy_moe.testing.inputs import make_hidden_states, move_arguments
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    capture,
    delay,
    full,
    host_copies,
    logits_moe,
    overwrite,
    overwrite_arguments,
    plan_logits_moe,
    plan_routed_moe,
    poisoned_allocations,
    routed_moe,
    run_in_threads,
    run_python,
    side_stream,
    small_arguments,
    small_layer,
    synchronize,
)

pytestmark = pytest.mark.gpu

HIDDEN = 256
TOKENS = (1, 33, 300)

each_library = pytest.mark.parametrize("library", LIBRARIES)
each_size = pytest.mark.parametrize("tokens", TOKENS)


def eager(arguments: dict[str, Any], library: str, **options: Any) -> list[np.ndarray]:
    """Results of the operation on fresh arrays."""
    return host_copies(routed_moe(**move_arguments(arguments, library), **options))


def logits_arguments(tokens: int, seed: int = 0) -> dict[str, Any]:
    layer = small_layer()
    logits = np.random.default_rng(seed).standard_normal((tokens, layer.num_experts), np.float32)
    hidden = make_hidden_states(tokens, layer.hidden_size, seed)
    return layer.logits_arguments(hidden, logits, 2, routing_method_type=1)


def assert_same(results: Any, expected: list[np.ndarray], what: str = "") -> None:
    """Equal bits; of three results the rows in use, as the others are not initialized."""
    got = host_copies(results)
    if len(got) == 1:
        assert_bit_equal(got[0], expected[0], what)
        return
    rows = expected[2][expected[2] >= 0]
    assert_bit_equal(got[2], expected[2], what)
    assert_bit_equal(got[1], expected[1], what)
    assert_bit_equal(got[0][rows], expected[0][rows], what)


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_finalize", [True, False])
@pytest.mark.parametrize("dtype", ["packed", "bfloat16", "float32"])
@each_size
@each_library
def test_runs_follow_the_contents(library: str, tokens: int, dtype: str, do_finalize: bool) -> None:
    arguments = move_arguments(small_arguments(tokens, dtype=dtype), library)
    with poisoned_allocations(library):
        plan = plan_routed_moe(**arguments, do_finalize=do_finalize)
    variants = [{}, {"pattern": "one_expert"}, {"invalid": "all_rows"}, {"pattern": "skewed"}]
    for seed, variant in enumerate(variants):
        fresh = small_arguments(tokens, dtype=dtype, seed=seed, **variant)
        overwrite_arguments(arguments, move_arguments(fresh, library))
        expected = eager(fresh, library, do_finalize=do_finalize)
        for _ in range(2):
            assert plan.run() is plan.output
            assert_same(plan.output, expected, f"{variant}")


@each_size
@each_library
def test_runs_from_logits(library: str, tokens: int) -> None:
    replay = full((tokens + 1, 2), -7, np.int16, library)
    arguments = move_arguments(logits_arguments(tokens), library)
    plan = plan_logits_moe(**arguments, routing_replay_out=replay)
    for seed in (0, 5, 6):
        fresh = move_arguments(logits_arguments(tokens, seed), library)
        for name in ("routing_logits", "hidden_states"):
            overwrite(arguments[name], fresh[name])
        other = full((tokens + 1, 2), -7, np.int16, library)
        expected = host_copies(logits_moe(**fresh, routing_replay_out=other))
        assert_same(plan.run(), expected, f"seed {seed}")
        assert_bit_equal(to_host(replay), to_host(other), "replay buffer")


@each_library
def test_output_workspace_and_options(library: str) -> None:
    arguments = move_arguments(small_arguments(33), library)
    expected = eager(small_arguments(33), library)
    own = plan_routed_moe(**arguments)
    assert own.scratch_bytes > 0
    workspace = full((own.scratch_bytes,), 0xFF, np.uint8, library)
    for enable_pdl in (None, True, False):
        output = full((33, HIDDEN), np.nan, BF16, library)
        plan = plan_routed_moe(
            **arguments, output=output, workspace_buffer=workspace, enable_pdl=enable_pdl
        )
        assert plan.scratch_bytes == 0
        assert plan.output is output
        assert np.isnan(to_host(output).astype(np.float32)).all(), "planning runs nothing"
        assert plan.run() is output
        assert_same(output, expected, f"enable_pdl={enable_pdl}")
    tiny = full((256,), 0, np.uint8, library)
    plan = plan_routed_moe(**arguments, workspace_buffer=tiny)
    assert plan.scratch_bytes == own.scratch_bytes
    assert_same(plan.run(), expected)


@each_library
def test_two_plans_and_eager_calls_interleaved(library: str) -> None:
    calls = [small_arguments(tokens, seed=tokens) for tokens in (33, 65)]
    arguments = [move_arguments(call, library) for call in calls]
    expected = [eager(call, library) for call in calls]
    plans = [plan_routed_moe(**a) for a in arguments]
    for step in np.random.default_rng(0).integers(0, 3, 40):
        if step == 2:
            assert_same(routed_moe(**arguments[0]), expected[0], "eager")
        else:
            assert_same(plans[step].run(), expected[step], f"plan {step}")
    for plan, want in zip(plans, expected, strict=True):
        assert_same(plan.output, want, "left alone since")


@each_library
def test_a_plan_keeps_its_arrays_alive(library: str) -> None:
    expected = eager(small_arguments(33), library)
    plan = plan_routed_moe(**move_arguments(small_arguments(33), library))
    gc.collect()
    noise = [full((1 << 22,), 0xFF, np.uint8, library) for _ in range(8)]
    assert_same(plan.run(), expected)
    del noise


@each_library
def test_no_tokens(library: str) -> None:
    plan = plan_routed_moe(**move_arguments(small_arguments(0), library))
    assert tuple(plan.run().shape) == (0, HIDDEN)


# --- streams, threads, graphs -----------------------------------------------------------------


@each_library
def test_a_plan_moves_between_streams(library: str) -> None:
    expected = eager(small_arguments(65), library)
    plan = plan_routed_moe(**move_arguments(small_arguments(65), library))
    for _ in range(3):
        with side_stream(library):
            overwrite(plan.output, full((65, HIDDEN), np.nan, BF16, library))
            plan.run()
        assert_same(plan.output, expected, "side stream")
        assert_same(plan.run(), expected, "first stream")
        synchronize()


@each_size
def test_runs_on_the_current_stream(tokens: int) -> None:
    """The inputs arrive late on a side stream; a run on another would read the old ones."""
    import torch

    old, new = small_arguments(tokens, seed=1), small_arguments(tokens, seed=2)
    expected = eager(new, "torch")
    arguments, late = move_arguments(old, "torch"), move_arguments(new, "torch")
    plan = plan_routed_moe(**arguments)
    plan.run()
    torch.cuda.synchronize()
    with side_stream("torch"):
        delay()
        overwrite_arguments(arguments, late)
        copy = plan.run().clone()
    assert_same(copy, expected, "side stream")


def test_a_plan_dropped_with_work_on_a_side_stream() -> None:
    """Torch must not hand out its scratch on the stream of the plan before that work is done."""
    import torch

    call = small_arguments(300, seed=3)
    expected = eager(call, "torch")
    arguments = move_arguments(call, "torch")
    output = full((300, HIDDEN), np.nan, BF16, "torch")
    plan = plan_routed_moe(**arguments, output=output)
    first_stream = torch.cuda.current_stream()
    address, num_bytes = plan._layer._scratch.ptr, plan.scratch_bytes
    with side_stream("torch"):
        delay(1_000_000_000)
        plan.run()
        done = torch.cuda.Event()
        done.record()
        del plan
        with torch.cuda.stream(first_stream):
            blocks = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(8)]
        assert not done.query(), "the delay was too short to show anything"
    assert all(abs(block.data_ptr() - address) >= num_bytes for block in blocks)
    assert_same(output, expected)


def test_new_arrays_in_a_thread_without_a_context() -> None:
    """Tensor maps of arrays that this thread is the first to pass on."""
    call = small_arguments(65, seed=4)
    expected = eager(call, "torch")
    arguments = move_arguments(call, "torch")
    output = full((65, HIDDEN), np.nan, BF16, "torch")
    run_in_threads(lambda: routed_moe(**arguments, output=output))
    assert_same(output, expected)


def test_two_threads_with_one_plan() -> None:
    """The stages of their runs must not mix: FC2 overwrites the copied rows that FC1 reads."""
    call = small_arguments(1000, seed=5)
    plan = plan_routed_moe(**move_arguments(call, "torch"))

    def work() -> None:
        for _ in range(200):
            plan.run()

    run_in_threads(work, work)
    assert_same(plan.output, eager(call, "torch"))


@each_library
def test_two_threads_with_a_plan_each(library: str) -> None:
    calls = [small_arguments(65, seed=seed) for seed in (1, 2)]
    expected = [eager(call, library) for call in calls]

    def work(index: int) -> None:
        plan = plan_routed_moe(**move_arguments(calls[index], library))
        for _ in range(50):
            with side_stream(library):
                plan.run()
            assert_same(plan.output, expected[index])

    run_in_threads(partial(work, 0), partial(work, 1))


@pytest.mark.parametrize("do_finalize", [True, False])
@each_size
@each_library
def test_replay_follows_new_inputs(library: str, tokens: int, do_finalize: bool) -> None:
    static = move_arguments(small_arguments(tokens), library)
    plan = plan_routed_moe(**static, do_finalize=do_finalize)
    replay = capture(library, plan.run)
    for seed in (10, 11):
        fresh = small_arguments(tokens, seed=seed)
        overwrite_arguments(static, move_arguments(fresh, library))
        replay()
        expected = eager(fresh, library, do_finalize=do_finalize)
        assert_same(plan.output, expected, f"replay, seed {seed}")
        assert_same(plan.run(), expected, f"run, seed {seed}")


def test_planning_loads_the_kernels(tmp_path: Any) -> None:
    """In a fresh process the first run may be inside a capture."""
    program = """
import torch
from cupy_moe.testing.compare import assert_within, compare
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import plan_routed_moe, reference, small_arguments, tolerance_of

arguments = move_arguments(small_arguments(9), "torch")
plan = plan_routed_moe(**arguments)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    plan.run()
graph.replay()
assert_within(compare(plan.output, reference(arguments)), tolerance_of(arguments))
print("works")
"""
    assert "works" in run_python(program, CUPY_MOE_CACHE_DIR=str(tmp_path)).splitlines()
