"""FP4 layers called again, from streams, handles and threads in turns: always the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime.devices import sm_count
from cupy_moe.runtime.streams import GreenPartitions
from cupy_moe.testing.compare import assert_bit_equal, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from tests.fp4_calls import FORMS, run
from tests.gpu.fp4_layers import compile_kernels, on_library, partition_resources
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    capture,
    full,
    host_copies,
    overwrite,
    run_in_threads,
    side_stream,
    synchronize,
)
from tests.gpu.test_fp8_handle import assert_same
from tests.moe_cases import STRATEGIES

pytestmark = pytest.mark.gpu

CALLS = 20  # the graph of a whole layer comes after eight
SIZES = Fp4Sizes(33)
each_form = pytest.mark.parametrize("form", FORMS)
each_strategy = pytest.mark.parametrize("form", STRATEGIES)
each_library = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    compile_kernels()


@pytest.fixture
def pairs() -> Iterator[tuple[MoePartitionResources, ...]]:
    """Two handles whose four partitions are disjoint, and one that shares one with each."""
    quarter = sm_count(0) // 4 // 8 * 8
    with GreenPartitions(0, (quarter,) * 4) as partitions:
        a, b, c, d = partitions.streams
        yield tuple(MoePartitionResources(pair) for pair in ((a, b), (c, d), (b, c)))
        synchronize()


def call_of(form: str, library: str, seed: int = 0, **options: Any) -> dict[str, Any]:
    """A call on arrays of its own, with the handle of all tests."""
    return on_library(fp4_layer("mxfp8", form, SIZES, seed=seed), library) | options


def alone(form: str, library: str, seed: int) -> np.ndarray:
    """Output of such a call with nothing else on the GPU."""
    synchronize()
    out = to_host(run(form, call_of(form, library, seed))[0]).copy()
    synchronize()
    return out


def overwrite_inputs(destination: dict[str, Any], source: dict[str, Any]) -> None:
    """Overwrite every input of a call with that of another one."""
    for name, value in source.items():
        parts = value if isinstance(value, list) else [value]
        old = destination[name]
        for part, new in zip(old if isinstance(old, list) else [old], parts, strict=True):
            if hasattr(new, "dtype"):
                overwrite(part, new)


def nothing(library: str) -> Any:
    """An output that nothing was written to."""
    return full((SIZES.tokens, SIZES.hidden), np.nan, BF16, library)


def on_stream(library: str, stream: Any) -> AbstractContextManager[Any]:
    """Make a stream the current one."""
    if library == "torch":
        import torch

        return torch.cuda.stream(stream)
    return stream


# --- again ----------------------------------------------------------------------------------------


@each_form
@each_library
def test_calls_follow_new_inputs(library: str, form: str, graphs: mock.Mock) -> None:
    static = call_of(form, library, output=nothing(library))
    fresh = [call_of(form, library, seed) for seed in (5, 6, 7)]
    expected = [to_host(run(form, call)[0]).copy() for call in fresh]
    graphs.reset_mock()
    for n in range(CALLS):
        overwrite_inputs(static, fresh[n % 3])
        overwrite(static["output"], nothing(library))
        assert run(form, static)[0] is static["output"]
        assert_bit_equal(static["output"], expected[n % 3], f"call {n}")
    assert (graphs.call_count > 0) is (form == "whole")


@each_form
@each_library
def test_allocated_results_are_never_mixed_up(library: str, form: str) -> None:
    calls = [call_of(form, library, seed) for seed in range(3)]
    expected = [alone(form, library, seed) for seed in range(3)]
    held: list[tuple[int, Any]] = []
    for step in np.random.default_rng(0).integers(0, 3, 90):
        held.append((step, run(form, calls[step])[0]))
        if len(held) > 3:
            index, output = held.pop(0)
            assert_bit_equal(output, expected[index], f"call {index}")


@each_form
@each_library
def test_rows_that_are_handed_out(library: str, form: str) -> None:
    calls = [call_of(form, library, seed, do_finalize=False) for seed in range(3)]
    expected = [host_copies(run(form, call)) for call in calls]
    held: list[tuple[int, Any]] = []
    for step in np.random.default_rng(0).integers(0, 3, 60):
        held.append((step, run(form, calls[step])))
        if len(held) > 3:
            index, results = held.pop(0)
            assert results[1] is calls[index]["topk_weights"]
            assert_same(results, expected[index], f"call {index}")


@each_form
@each_library
def test_streams_and_captures_in_turns(library: str, form: str) -> None:
    static = call_of(form, library, output=nothing(library))
    expected, other = (alone(form, library, seed) for seed in (0, 5))
    for _ in range(CALLS):
        run(form, static)
    for turn in range(3):
        with side_stream(library):
            overwrite(static["output"], nothing(library))
            run(form, static)
        assert_bit_equal(static["output"], expected, f"side stream {turn}")
        overwrite(static["output"], nothing(library))
        synchronize()
        run(form, static)
        synchronize()
        assert_bit_equal(static["output"], expected, f"first stream {turn}")
    replay = capture(library, partial(run, form, static))
    overwrite_inputs(static, call_of(form, library, 5))
    replay()
    assert_bit_equal(static["output"], other, "replay")
    overwrite(static["output"], nothing(library))
    synchronize()
    run(form, static)
    assert_bit_equal(static["output"], other, "eager after the replay")


# --- several handles and threads ------------------------------------------------------------------


@each_strategy
@each_library
def test_handles_in_turns(
    library: str, form: str, pairs: tuple[MoePartitionResources, ...]
) -> None:
    """Their runs overlap on the GPU: each handle works from a stream of its own."""
    handles = (*pairs, partition_resources())
    calls = [
        call_of(form, library, seed, partition_resources=handle)
        for seed, handle in enumerate(handles)
    ]
    expected = [alone(form, library, seed) for seed in range(len(calls))]
    with ExitStack() as stack:
        streams = [stack.enter_context(side_stream(library)) for _ in calls]
        outputs = []
        for step in np.random.default_rng(0).integers(0, len(calls), 120):
            with on_stream(library, streams[step]):
                outputs.append((step, run(form, calls[step])[0]))
        synchronize()
        for step, output in outputs:
            assert_bit_equal(output, expected[step], f"handle {step}")


@each_strategy
@each_library
def test_graphs_of_two_handles_at_the_same_time(
    library: str, form: str, pairs: tuple[MoePartitionResources, ...]
) -> None:
    calls = [
        call_of(form, library, seed, partition_resources=handle, output=nothing(library))
        for seed, handle in enumerate(pairs[:2])
    ]
    expected = [alone(form, library, seed) for seed in range(2)]
    replays = [capture(library, partial(run, form, call)) for call in calls]

    def replay(index: int) -> None:
        with side_stream(library):
            for _ in range(CALLS):
                replays[index]()

    for _ in range(3):
        for call in calls:
            overwrite(call["output"], nothing(library))
        synchronize()
        run_in_threads(*(partial(replay, index) for index in range(2)))
        for call, want in zip(calls, expected, strict=True):
            assert_bit_equal(call["output"], want)


@each_form
@pytest.mark.parametrize("shared", [True, False], ids=["one call", "a call each"])
@each_library
def test_threads(library: str, shared: bool, form: str) -> None:
    """On one handle, from a stream each; also with the same arrays, which all are inputs."""
    seeds = (0, 0, 0) if shared else (0, 1, 2)
    made = {seed: call_of(form, library, seed) for seed in seeds}
    expected = {seed: alone(form, library, seed) for seed in seeds}

    def work(seed: int) -> None:
        outputs = []
        with side_stream(library):
            for _ in range(3 * CALLS):
                outputs.append(run(form, made[seed])[0])
        for number, output in enumerate(outputs):
            assert_bit_equal(output, expected[seed], f"call {number} of {seed}")

    run_in_threads(*(partial(work, seed) for seed in seeds))


@each_strategy
def test_threads_on_a_handle_each(form: str, pairs: tuple[MoePartitionResources, ...]) -> None:
    """Disjoint, and at the end two that share a partition."""
    for handles in (pairs[:2], pairs[1:]):
        calls = [
            call_of(form, "torch", seed, partition_resources=handle)
            for seed, handle in enumerate(handles)
        ]
        expected = [alone(form, "torch", seed) for seed in range(2)]

        def work(index: int, calls: Any = calls, expected: Any = expected) -> None:
            with side_stream("torch"):
                outputs = [run(form, calls[index])[0] for _ in range(3 * CALLS)]
            for number, output in enumerate(outputs):
                assert_bit_equal(output, expected[index], f"call {number} of handle {index}")

        run_in_threads(partial(work, 0), partial(work, 1))


@each_strategy
@each_library
def test_partitions_that_are_made_again(library: str, form: str) -> None:
    """What is remembered of closed ones is not used for those that follow."""
    expected, arguments = alone(form, library, 0), call_of(form, library)
    for _ in range(5):
        with GreenPartitions(0) as partitions:
            resources = MoePartitionResources(partitions.streams)
            for _ in range(3):
                (out,) = run(form, arguments | {"partition_resources": resources})
                assert_bit_equal(out, expected)
            synchronize()
            alive = weakref.ref(resources)
            del resources
            gc.collect()
            assert alive() is None
