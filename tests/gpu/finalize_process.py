"""Scenarios of the finalize that a process runs as one rank: ``SCENARIO RANK SIZE FOLDER``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.groups import FileStore, Group, StoreGroup
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from tests.finalize_cases import golden_case, make_case, tricky_case
from tests.gpu.finalize_ranks import LIMITS, GpuRank, to_bits


def device_of(rank: int) -> int:
    """No rank has the device of its own number."""
    import cupy

    return (rank + 1) % cupy.cuda.runtime.getDeviceCount()


def golden(group: Group) -> None:
    for limits in LIMITS.values():
        for name in ("c0", "c1", "c2", "c3"):
            case = golden_case(group.size, name)
            rank = GpuRank(group, case, device_of(group.rank), limits=limits)
            for out in rank.run(case, 4):
                case.check(out)
            rank.workspace.close()


def tricky(group: Group) -> None:
    for limits in LIMITS.values():
        cases = [tricky_case(group.size, shift) for shift in range(6)]
        rank = GpuRank(group, cases[0], device_of(group.rank), limits=limits)
        for case in cases:
            case.check(rank.run(case)[0])
        rank.workspace.close()


def random_calls(group: Group) -> None:
    """10,000 calls of all schemes, eager and in graphs of two and three calls, each one checked.

    Outputs are compared on the device with the first, which the reference has checked.
    """
    import cupy

    limits, sizes = SchemeLimits(2, 5), [1, 2, 3, 5, 6, 17, 40]
    cases = {t: make_case(group.size, t, hidden_size=512, seed=t) for t in sizes}
    rank = GpuRank(group, cases[1], device_of(group.rank), limits=limits, max_tokens=32)
    with cupy.cuda.Device(rank.device), rank.own_stream as stream:
        arrays = {t: rank.upload(cases[t]) for t in sizes}
        right = {t: rank.output(cases[t]) for t in sizes}
        for t in sizes:
            rank.enqueue(cases[t], arrays[t], right[t])
        rank.synchronize()
        for t in sizes:
            cases[t].check(to_bits(right[t]))
        outs = {t: rank.output(cases[t]) for t in sizes}
        wrong = cupy.zeros(1, np.int64)

        def call(num_tokens: int) -> None:
            rank.enqueue(cases[num_tokens], arrays[num_tokens], outs[num_tokens])

        def compare(num_tokens: int) -> None:
            out = outs[num_tokens].view(np.uint16)
            wrong[...] += (out != right[num_tokens].view(np.uint16)).sum()
            out.fill(0x7FC1)

        compare(1)
        rank.synchronize()
        wrong.fill(0)
        graphs = []
        for members in ([6, 1], [40, 3, 2]):
            stream.begin_capture()
            for num_tokens in members:
                call(num_tokens)
            graphs.append((stream.end_capture(), members))
        group.barrier()
        plan, done = random.Random(7), 0
        while done < 10_000:
            kind = plan.randrange(4)
            if kind < 2:
                graph, members = graphs[kind]
                graph.launch(stream)
            else:
                members = [plan.choice(sizes)]
                call(members[0])
            for num_tokens in members:
                compare(num_tokens)
            done += len(members)
        rank.synchronize()
        assert int(wrong[0]) == 0
    rank.workspace.close()


def nccl(group: Group) -> None:
    for scheme, limits in LIMITS.items():
        for num_tokens in (1, 6, 23):
            case = make_case(group.size, num_tokens, hidden_size=1024, seed=num_tokens)
            outputs = []
            for transport in ("ipc", "nccl"):
                device = device_of(group.rank)
                rank = GpuRank(group, case, device, limits=limits, transport=transport)
                assert rank.workspace.transport.name == transport
                outputs += rank.run(case, 3)
                rank.workspace.close()
            case.check(outputs[0])
            for out in outputs[1:]:
                np.testing.assert_array_equal(out, outputs[0], err_msg=scheme.name)


def killed(group: Group) -> None:
    """The last rank is killed in a loop of calls; the others must raise and their GPUs work on."""
    import cupy

    case = make_case(group.size, 9, hidden_size=4096)
    rank = GpuRank(group, case, device_of(group.rank), timeout_s=1.0)
    arrays, out = rank.upload(case), rank.output(case)
    start = time.monotonic()
    try:
        for number in range(10**6):
            if group.rank == group.size - 1 and number == 200:
                os.kill(os.getpid(), signal.SIGKILL)
            rank.enqueue(case, arrays, out)
            if number % 8 == 0:
                rank.synchronize()
    except PeerTimeoutError as error:
        assert error.peer == group.size - 1
    else:
        raise AssertionError("nobody noticed")
    assert time.monotonic() - start < 20
    with cupy.cuda.Device(rank.device):
        assert int(cupy.arange(100).sum()) == 4950
    rank.workspace.close()


def raises_first(group: Group) -> None:
    """Rank 0 raises before it launches what the others wait in."""
    case = make_case(group.size, 3, hidden_size=1024)
    rank = GpuRank(group, case, device_of(group.rank), timeout_s=0.5)
    case.check(rank.run(case)[0])
    if group.rank == 0:
        arrays = rank.upload(case)
        try:
            rank.enqueue(case, arrays, arrays[0])
        except ValueError:
            group.barrier()
            return
        raise AssertionError("an output of another shape was accepted")
    arrays, out = rank.upload(case), rank.output(case)
    rank.enqueue(case, arrays, out)
    try:
        rank.synchronize()
    except PeerTimeoutError as error:
        assert error.peer == 0
    else:
        raise AssertionError("nobody noticed")
    group.barrier()


def no_memory(group: Group) -> None:
    """One GPU is full: every rank is told, and nothing is left behind."""
    import cupy

    case = make_case(group.size, 3, hidden_size=1024)
    GpuRank(group, case, device_of(group.rank)).workspace.close()  # contexts and kernels
    device = device_of(group.rank)
    with cupy.cuda.Device(device):
        free = cupy.cuda.runtime.memGetInfo()[0]
        ballast = cupy.cuda.runtime.malloc(free - (64 << 20)) if group.rank == 0 else 0
        before = cupy.cuda.runtime.memGetInfo()[0]
        try:
            GpuRank(group, case, device, max_tokens=1 << 16)
        except RuntimeError as error:
            assert "rank 0: RuntimeError" in str(error), error
        else:
            raise AssertionError("there was memory")
        assert before - cupy.cuda.runtime.memGetInfo()[0] <= 4 << 20
        if ballast:
            cupy.cuda.runtime.free(ballast)
    group.barrier()
    rank = GpuRank(group, case, device)
    case.check(rank.run(case)[0])
    rank.workspace.close()


def allocators(group: Group) -> None:
    """Workspaces made while torch and CuPy use allocators without handles to share."""
    import cupy
    import torch

    device = device_of(group.rank)
    torch.cuda.set_device(device)
    small = [torch.zeros(1000, device="cuda") for _ in range(50)]
    case = make_case(group.size, 3, hidden_size=1024)
    for pool in (cupy.cuda.MemoryAsyncPool().malloc, cupy.cuda.MemoryPool().malloc):
        with cupy.cuda.Device(device), cupy.cuda.using_allocator(pool):
            rank = GpuRank(group, case, device)
            case.check(rank.run(case)[0])
            rank.workspace.close()
    assert len(small) == 50


def two_groups(world: Group) -> None:
    """Ranks 0, 1 and 2, 3 at once on two GPUs, with equal random seeds; then 1, 3."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what a caller's framework may do)
    store = FileStore(sys.argv[4])
    case = make_case(2, 5, hidden_size=1024)
    for members in ([0, 1], [2, 3], [1, 3]):
        if world.rank in members:
            name = "-".join(map(str, members))
            own = StoreGroup(members.index(world.rank), 2, store, name)
            device = own.rank  # a GPU is shared by two processes of different groups
            rank = GpuRank(own, case, device, timeout_s=20.0)
            for out in rank.run(case, 3):
                case.check(out)
            rank.workspace.close()
    world.barrier()


SCENARIOS: dict[str, Any] = {
    function.__name__: function
    for function in (
        golden,
        tricky,
        random_calls,
        nccl,
        killed,
        raises_first,
        no_memory,
        allocators,
        two_groups,
    )
}
assert set(LIMITS) == set(FinalizeScheme)


def main() -> None:
    """Run one scenario."""
    scenario, rank, size, folder = sys.argv[1:]
    SCENARIOS[scenario](StoreGroup(int(rank), int(size), FileStore(Path(folder), timeout_s=60.0)))
    print("RANK DONE", flush=True)
    os._exit(0)  # a killed peer must not hold up the end


if __name__ == "__main__":
    main()
