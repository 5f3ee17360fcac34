"""Ranks of the finalize on GPUs: threads or processes, with one each or several on one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_moe.comm.groups import Group
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.comm.rules import check_arrays
from cupy_moe.comm.workspace import FinalizeWorkspace
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from cupy_moe.testing.inputs import to_library
from tests.emulated_ranks import run_ranks
from tests.finalize_cases import BF16, NAN, FinalizeCase, assert_all_equal

ROOT = Path(__file__).resolve().parents[2]

LIMITS = {
    FinalizeScheme.EveryRank: SchemeLimits(99, 0),
    FinalizeScheme.ExpertOwner: SchemeLimits(0, 99),
    FinalizeScheme.TokenOwner: SchemeLimits(0, 0),
}


class GpuRank:
    """A workspace and the calls of one rank, on a stream of its own."""

    def __init__(
        self, group: Group, case: FinalizeCase, device: int = 0, stream: int = 0, **options: Any
    ) -> None:
        import cupy

        self._cupy, self.group, self.device = cupy, group, device
        defaults = {
            "hidden_size": case.hidden_size,
            "top_k": case.top_k,
            "max_tokens": 64,
            "timeout_s": 10.0,
            "transport": "ipc",  # no other one by chance
        }
        with cupy.cuda.Device(device):
            self.own_stream = cupy.cuda.Stream(non_blocking=True)
            self.stream = stream or self.own_stream.ptr
            self.workspace = FinalizeWorkspace(group, device, **(defaults | options))

    def upload(self, case: FinalizeCase) -> tuple[Any, ...]:
        """Arguments of this rank on its device."""
        with self._cupy.cuda.Device(self.device):
            arrays = tuple(to_library(a, "cupy") for a in case.arguments(self.group.rank))
            self._cupy.cuda.Device().synchronize()
        return arrays

    def output(self, case: FinalizeCase) -> Any:
        """NaN to write over."""
        with self._cupy.cuda.Device(self.device):
            out = self._cupy.full((case.num_tokens, case.hidden_size), NAN, np.uint16)
            self._cupy.cuda.Device().synchronize()
        return out.view(BF16)

    def enqueue(
        self, case: FinalizeCase, arrays: tuple[Any, ...], out: Any, stream: int = 0
    ) -> None:
        """Enqueue one call."""
        checked = check_arrays(
            *arrays,
            out,
            device=self.device,
            hidden_size=case.hidden_size,
            top_k=case.top_k,
        )
        self.workspace.run(checked, case.options, stream or self.stream)

    def synchronize(self) -> None:
        """Wait for the device, then raise what its launches reported."""
        with self._cupy.cuda.Device(self.device):
            self._cupy.cuda.Device().synchronize()
        self.workspace.check()

    def capture(self, work: Callable[[], None]) -> Any:
        """Graph of what ``work`` enqueues; all ranks at once: none may wait for their GPU then."""
        self.group.barrier()
        with self._cupy.cuda.Device(self.device), self.own_stream as stream:
            stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeThreadLocal)
            work()
            graph = stream.end_capture()
        self.group.barrier()
        return graph

    def enqueue_each(self, calls: list[tuple[FinalizeCase, Any, Any]]) -> None:
        """Enqueue calls (case, arrays, output)."""
        for call in calls:
            self.enqueue(*call)

    def enqueue_all(self, calls: list[tuple[FinalizeCase, Any, Any]], in_graph: bool) -> None:
        """Run calls (case, arrays, output) eagerly, or as one graph three times."""
        with self._cupy.cuda.Device(self.device):
            if in_graph:
                graph = self.capture(partial(self.enqueue_each, calls))
                for _ in range(3):
                    graph.launch(self.own_stream)
            else:
                self.group.barrier()
                self.enqueue_each(calls)
        self.synchronize()

    def run(self, case: FinalizeCase, num_calls: int = 1) -> list[np.ndarray]:
        """Outputs of calls back to back, on the host."""
        arrays = self.upload(case)
        outputs = [self.output(case) for _ in range(num_calls)]
        self.group.barrier()  # ranks on one GPU: no copy may wait for a launch that waits for it
        for out in outputs:
            self.enqueue(case, arrays, out)
        self.synchronize()
        return [to_bits(out) for out in outputs]


def to_bits(out: Any) -> np.ndarray:
    """Host copy of BF16 bits."""
    return np.asarray(out.view(np.uint16).get())


def run_on_gpu(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Threads as ranks; what hangs has failed after a minute."""
    return run_ranks(size, work, timeout_s=60.0)


def check_all(
    cases: list[FinalizeCase], num_calls: int = 3, num_devices: int = 1, **options: Any
) -> list[np.ndarray]:
    """Cases of equal sizes on one workspace: right, and the same on all ranks and in all calls."""

    def work(group: Group) -> list[list[np.ndarray]]:
        rank = GpuRank(group, cases[0], group.rank % num_devices, **options)
        outputs = [rank.run(case, num_calls) for case in cases]
        rank.workspace.close()
        return outputs

    of_ranks = run_on_gpu(cases[0].num_ranks, work)
    found = []
    for number, case in enumerate(cases):
        outputs = list(itertools.chain.from_iterable(of_rank[number] for of_rank in of_ranks))
        assert_all_equal(outputs)
        case.check(outputs[0])
        found.append(outputs[0])
    return found


PRODUCER = r"""
extern "C" __global__ void produce(const uint4* from, uint4* to, int count, int microseconds) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < microseconds; ++i) __nanosleep(1000);
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


def check_slow_producer(rank: GpuRank, case: FinalizeCase, in_graph: bool) -> None:
    """Calls behind a kernel that lets them start before it has written the rows."""
    import cupy

    with cupy.cuda.Device(rank.device) as device:
        if int(device.compute_capability) < 90:
            pytest.skip("programmatic dependent launch needs compute capability 9.0")
        source, *others = rank.upload(case)
        rows, out = cupy.empty_like(source.view(np.uint16)), rank.output(case)
        copied = cupy.empty_like(out.view(np.uint16))
        producer, count = cupy.RawKernel(PRODUCER, "produce"), rows.nbytes // 16

        def produce() -> None:
            rows.fill(0x7FC1)
            sizes = (np.int32(count), np.int32(100))
            producer((1,), (256,), (source.view(np.uint16), rows, *sizes))

        def step() -> None:
            produce()
            rank.enqueue(case, (rows.view(source.dtype), *others), out)

        def consume() -> None:
            copied[...] = out.view(np.uint16)
            out.view(np.uint16).fill(0)

        def finish() -> None:
            # Not the device: ranks that share it would wait for the next call of the other one.
            rank.own_stream.synchronize()
            rank.workspace.check()

        with rank.own_stream as stream:
            produce()
            consume()  # both compiled before any rank waits for another
            rank.synchronize()
            rank.group.barrier()
            step()
            consume()
            finish()
            expected = copied.get()
            case.check(expected)
            rank.group.barrier()
            if in_graph:
                graph = rank.capture(step)
            for _ in range(30):
                if in_graph:
                    graph.launch(stream)
                else:
                    step()
                consume()
                finish()
                np.testing.assert_array_equal(copied.get(), expected)


@contextmanager
def green_streams(num_ranks: int) -> Iterator[list[int]]:
    """Streams of disjoint parts of the GPU."""
    from cupy_moe.runtime.devices import sm_count
    from cupy_moe.runtime.streams import GreenPartitions, stream_handle

    each = (sm_count(0) - 4) // num_ranks // 8 * 8
    with GreenPartitions(0, (each,) * num_ranks) as partitions:
        yield [stream_handle(stream) for stream in partitions.streams]


def num_gpus() -> int:
    """Count the GPUs of this machine."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def need_gpus(count: int) -> None:
    """Skip where there are fewer."""
    if num_gpus() < count:
        pytest.skip(f"needs {count} GPUs, found {num_gpus()}")


def run_processes(
    scenarios: str, folder: Path, size: int = 2, timeout_s: float = 15.0, **env: str
) -> list[str]:
    """Run scenarios of ``tests.gpu.finalize_process`` on ``size`` processes; what each printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "tests.gpu.finalize_process", scenarios]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    end = time.monotonic() + timeout_s
    outputs = []
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            for hanging in processes:
                hanging.kill()
    for process in processes:
        assert process.stdout is not None
        outputs.append(process.stdout.read())
    return outputs


def assert_done(outputs: list[str], scenario: str) -> None:
    """Every rank must have come to the end of the scenario, or say what it lacks to run it."""
    for rank, output in enumerate(outputs):
        assert f"DONE {scenario}\n" in output, f"rank {rank}:\n{output[-4000:]}"
    for line in outputs[0].splitlines():
        if line.startswith(f"SKIPPED {scenario}"):
            pytest.skip(line)
