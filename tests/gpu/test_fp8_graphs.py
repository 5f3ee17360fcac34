"""CUDA graphs, streams and programmatic dependent launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    capture,
    delay,
    full,
    host_copies,
    overwrite,
    overwrite_arguments,
    reference,
    routed_moe,
    run_python,
    side_stream,
    small_arguments,
    tolerance_of,
)

pytestmark = pytest.mark.gpu

TOKENS = (1, 33, 300)


def eager(arguments: dict[str, Any], library: str) -> np.ndarray:
    """Output of an eager call on fresh arrays."""
    return to_host(routed_moe(**move_arguments(arguments, library)))


@pytest.mark.parametrize("dtype", ["packed", "float32"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_replay_follows_new_inputs(library: str, tokens: int, dtype: str) -> None:
    """New data, and routings from all tokens on one expert to no token at all."""
    static = move_arguments(small_arguments(tokens, dtype=dtype), library)
    output = full((tokens, 256), np.nan, BF16, library)
    replay = capture(library, lambda: routed_moe(**static, output=output))
    variants = [{"pattern": "one_expert"}, {"invalid": "all_rows"}, {"pattern": "uniform"}]
    for seed, variant in enumerate(variants, start=10):
        fresh = small_arguments(tokens, dtype=dtype, seed=seed, **variant)
        overwrite_arguments(static, move_arguments(fresh, library))
        overwrite(output, full((tokens, 256), np.nan, BF16, library))
        replay()
        assert_bit_equal(output, eager(fresh, library), f"replay with {variant}")
        assert_within(compare(output, reference(fresh)), tolerance_of(fresh))


@pytest.mark.parametrize("do_finalize", [True, False])
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_allocated_during_capture(library: str, do_finalize: bool) -> None:
    """Outputs and scratch that the call allocates belong to the graph and stay valid."""
    import cupy

    tokens = 65
    static = move_arguments(small_arguments(tokens), library)
    results: list[Any] = []
    replay = capture(library, lambda: results.append(routed_moe(**static, do_finalize=do_finalize)))
    held = results[-1]
    noise = [cupy.full(size, 0xFF, np.uint8) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)]
    for seed in (3, 4):
        fresh = small_arguments(tokens, seed=seed)
        overwrite_arguments(static, move_arguments(fresh, library))
        replay()
        expected = routed_moe(**move_arguments(fresh, library), do_finalize=do_finalize)
        if do_finalize:
            assert_bit_equal(held, expected, "output")
            continue
        (rows, weights, index), (rows2, weights2, index2) = map(host_copies, (held, expected))
        assert_bit_equal(weights, weights2, "expert_weights")
        assert_bit_equal(index, index2, "index map")
        assert_bit_equal(rows[index[index >= 0]], rows2[index2[index2 >= 0]], "rows")
    assert all((block == 0xFF).all() for block in noise)


@pytest.mark.parametrize("library", LIBRARIES)
def test_several_calls_in_a_graph(library: str) -> None:
    """Calls of other sizes share scratch memory in one graph; graphs and eager calls alternate."""
    sizes = (300, 1, 33)
    statics = [move_arguments(small_arguments(t, seed=t), library) for t in sizes]
    outputs = [full((t, 256), np.nan, BF16, library) for t in sizes]
    expected = [eager(small_arguments(t, seed=t), library) for t in sizes]

    def run(*calls: int) -> None:
        for call in calls:
            routed_moe(**statics[call], output=outputs[call])

    graphs = [(0,), (1, 2), (0, 1, 2)]
    replays = [capture(library, lambda calls=calls: run(*calls)) for calls in graphs]
    for step in np.random.default_rng(0).integers(0, 4, 40):
        calls = graphs[step] if step < 3 else (2, 0)
        for call in calls:
            overwrite(outputs[call], full((sizes[call], 256), np.nan, BF16, library))
        if step < 3:
            replays[step]()
        else:
            run(*calls)
        for call in calls:
            assert_bit_equal(outputs[call], expected[call], f"call {call} of {calls}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_zero_tokens_in_a_graph(library: str) -> None:
    nothing = move_arguments(small_arguments(0), library)
    something = move_arguments(small_arguments(9), library)
    output = full((9, 256), np.nan, BF16, library)

    def work() -> None:
        assert tuple(routed_moe(**nothing).shape) == (0, 256)
        routed_moe(**something, output=output)

    capture(library, work)()
    assert_bit_equal(output, eager(small_arguments(9), library))


def test_capture_before_a_warm_up_call_says_what_to_do(tmp_path: Any) -> None:
    """In a fresh process; afterwards the process still works."""
    program = """
import torch
from cupy_moe.testing.compare import assert_within, compare
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import reference, routed_moe, small_arguments, tolerance_of

arguments = move_arguments(small_arguments(9), "torch")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        routed_moe(**arguments)
except RuntimeError as error:
    print("raised:", error)
else:
    raise SystemExit("captured without a warm-up call")
assert_within(compare(routed_moe(**arguments), reference(arguments)), tolerance_of(arguments))
with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
    out = routed_moe(**arguments)
graph.replay()
assert_within(compare(out, reference(arguments)), tolerance_of(arguments))
print("works")
"""
    for _ in ("cold cache", "warm cache"):
        printed = run_python(program, CUPY_MOE_CACHE_DIR=str(tmp_path))
        message = next(line for line in printed.splitlines() if line.startswith("raised:"))
        assert "warm-up" in message, message
        assert "works" in printed.splitlines()


# --- streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", TOKENS)
def test_runs_on_the_current_stream(tokens: int) -> None:
    """The inputs arrive late on a side stream; work on any other stream would read the old ones."""
    import torch

    old, new = small_arguments(tokens, seed=1), small_arguments(tokens, seed=2)
    expected = eager(new, "torch")
    arguments, late = move_arguments(old, "torch"), move_arguments(new, "torch")
    output = full((tokens, 256), np.nan, BF16, "torch")
    routed_moe(**arguments, output=output)
    torch.cuda.synchronize()
    with side_stream("torch"):
        delay()
        overwrite_arguments(arguments, late)
        routed_moe(**arguments, output=output)
        copy = output.clone()  # a consumer on the same stream
    assert_bit_equal(copy, expected, "side stream")


@pytest.mark.parametrize("library", LIBRARIES)
def test_side_streams_of_either_library(library: str) -> None:
    arguments = move_arguments(small_arguments(65), library)
    expected = eager(small_arguments(65), library)
    for _ in range(3):
        with side_stream(library):
            out = routed_moe(**arguments)
        assert_bit_equal(out, expected, "side stream")


def test_two_streams_at_once_do_not_share_scratch() -> None:
    import torch

    streams = [torch.cuda.Stream() for _ in range(4)]
    calls = [small_arguments(300, seed=seed) for seed in range(len(streams))]
    expected = [eager(call, "torch") for call in calls]
    arguments = [move_arguments(call, "torch") for call in calls]
    torch.cuda.synchronize()
    for _ in range(25):
        outs = []
        for stream, call in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                outs.append(routed_moe(**call))
        torch.cuda.synchronize()
        for out, want in zip(outs, expected, strict=True):
            assert_bit_equal(out, want, "concurrent streams")


# --- programmatic dependent launch ------------------------------------------------------------


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_dependent_launch_does_not_change_a_bit(library: str, tokens: int) -> None:
    arguments = move_arguments(small_arguments(tokens), library)
    plain = host_copies(routed_moe(**arguments, enable_pdl=False))[0]
    for enable_pdl in (True, None):
        output = full((tokens, 256), np.nan, BF16, library)
        replay = capture(
            library,
            lambda pdl=enable_pdl, out=output: routed_moe(**arguments, enable_pdl=pdl, output=out),
        )
        assert_bit_equal(output, plain, f"eager, enable_pdl={enable_pdl}")
        overwrite(output, full((tokens, 256), np.nan, BF16, library))
        replay()
        assert_bit_equal(output, plain, f"replay, enable_pdl={enable_pdl}")


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("enable_pdl", [False, True])
def test_dependent_launches_back_to_back(enable_pdl: bool, in_graph: bool) -> None:
    """Each call's input is written by a slow kernel right before, its output copied right after."""
    import torch

    tokens, rounds = 33, 50
    calls = [small_arguments(tokens, seed=seed) for seed in range(5)]
    expected = [torch.from_numpy(eager(c, "torch").view(np.int16)).cuda() for c in calls]
    fresh = [move_arguments(call, "torch") for call in calls]
    static = move_arguments(calls[0], "torch")
    output = full((tokens, 256), np.nan, BF16, "torch")
    copies = torch.zeros((len(calls), tokens, 256), dtype=torch.bfloat16, device="cuda")

    def work() -> None:
        for copy, call in zip(copies, fresh, strict=True):
            torch.cuda._sleep(20_000)
            overwrite_arguments(static, call)
            routed_moe(**static, output=output, enable_pdl=enable_pdl)
            copy.copy_(output)
            output.fill_(float("nan"))

    run = capture("torch", work) if in_graph else work
    for _ in range(rounds):
        copies.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        for copy, want in zip(copies, expected, strict=True):
            assert torch.equal(copy.view(torch.int16), want)
