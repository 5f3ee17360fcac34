"""FP4 layers in CUDA graphs and on green contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cupy_moe import partitioned_launches
from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.runtime.launch import BoundLaunch
from cupy_moe.runtime.streams import GreenPartitions
from cupy_moe.testing.compare import assert_bit_equal, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from tests.fp4_calls import FORMS, run
from tests.gpu.fp4_layers import (
    compile_kernels,
    on_library,
    partition_resources,
)
from tests.gpu.probe_launch import launch_probe, probe_function
from tests.gpu.support import BF16, LIBRARIES, capture, full, overwrite, side_stream, synchronize
from tests.moe_cases import STRATEGIES

pytestmark = pytest.mark.gpu

DATA = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
each_form = pytest.mark.parametrize("form", FORMS)
each_library = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    compile_kernels()


@each_form
@each_library
def test_replay_follows_new_inputs(library: str, form: str) -> None:
    for tokens in (3, 70):
        sizes = Fp4Sizes(tokens)
        static = on_library(fp4_layer("mxfp8", form, sizes), library)
        output = full((tokens, sizes.hidden), np.nan, BF16, library)
        replay = capture(library, lambda s=static, o=output: run(form, s | {"output": o}))
        for seed, pattern in ((5, "one_expert"), (6, "uniform")):
            other = Fp4Sizes(tokens, pattern=pattern)
            fresh = fp4_layer("mxfp8", form, other, seed=seed)
            fresh = on_library({name: fresh[name] for name in DATA}, library)
            for name in DATA:
                overwrite(static[name], fresh[name])
            overwrite(output, full((tokens, sizes.hidden), np.nan, BF16, library))
            replay()
            (expected,) = run(form, static)
            assert_bit_equal(output, expected, f"{tokens} tokens, {pattern}")


@each_form
def test_layers_in_one_graph(form: str) -> None:
    """A kernel may start before its predecessor ends, but not before what it reads is there."""
    layers = [
        on_library(fp4_layer("bf16", form, Fp4Sizes(tokens), seed=seed), "torch")
        for seed, tokens in enumerate((33, 1, 70, 4, 33))
    ]
    expected = [to_host(run(form, layer)[0]).copy() for layer in layers]
    outputs: list[Any] = []

    def work() -> None:
        outputs[:] = [run(form, layer)[0] for layer in layers]

    replay = capture("torch", work)
    for _ in range(20):
        for output in outputs:
            output.fill_(np.nan)
        replay()
        for output, right in zip(outputs, expected, strict=True):
            assert_bit_equal(output, right)


@each_form
def test_many_runs_of_one_call(form: str) -> None:
    """Also on a stream that none of its arrays was made on."""
    arguments = on_library(fp4_layer("nvfp4", form, Fp4Sizes(20)), "torch")
    first = to_host(run(form, arguments)[0]).copy()
    with side_stream("torch"):
        for _ in range(20):
            assert_bit_equal(run(form, arguments)[0], first)


class Recorder:
    """Launches a probe behind every GEMM of a partition, which writes down its multiprocessors."""

    def __init__(self, resources: MoePartitionResources, blocks: int) -> None:
        import cupy

        self.resources = resources
        self.function = probe_function()
        self.ids = [cupy.full(blocks, 0xFFFFFFFF, np.uint32) for _ in resources.handles]
        self.streams: list[int] = []

    def enqueue(self, launches: Sequence[BoundLaunch]) -> None:
        enqueue(launches)
        for launch in launches:
            stream = int(launch.config.hStream)
            if launch.function.name != "grouped_gemm":
                assert stream not in self.resources.handles
                continue
            self.streams.append(stream)
            ids = self.ids[self.resources.handles.index(stream)]
            launch_probe(
                self.function,
                sm_ids=ids,
                spin_cycles=2_000_000,
                num_blocks=ids.size,
                stream=stream,
            )

    def multiprocessors(self) -> list[set[int]]:
        return [set(ids.get().tolist()) for ids in self.ids]


enqueue = partitioned_launches.enqueue


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("form", STRATEGIES)
def test_gemms_run_on_their_partitions(
    form: str, in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = partition_resources()
    arguments = on_library(fp4_layer("bf16", form, Fp4Sizes(9)), "cupy")
    recorder = Recorder(resources, 16 * max(resources.sm_counts))
    monkeypatch.setattr(partitioned_launches, "enqueue", recorder.enqueue)
    work: Callable[[], Any] = lambda: run(form, arguments)  # noqa: E731
    if in_graph:
        replay = capture("cupy", work)
        synchronize()
        for ids in recorder.ids:
            ids.fill(0xFFFFFFFF)
        replay()
    else:
        work()
    synchronize()
    first, second = recorder.multiprocessors()
    assert [len(first), len(second)] == list(resources.sm_counts)
    assert not first & second
    assert set(recorder.streams) == set(resources.handles)


@each_library
def test_two_handles_and_a_doubled_stream(library: str) -> None:
    """Handles of other partitions, and of one partition twice, give the same bits."""
    arguments = fp4_layer("bf16", "tp_n_tp_n", Fp4Sizes(33))
    expected = to_host(run("tp_n_tp_n", on_library(arguments, library))[0])
    with GreenPartitions(0, (16, 32)) as partitions:
        first, second = partitions.streams
        for streams in ((first, second), (second, second)):
            other = MoePartitionResources(streams)
            (out,) = run("tp_n_tp_n", on_library(arguments, library, other))
            assert_bit_equal(out, expected)
        synchronize()
