"""Scenarios that a process runs as one rank of the finalize: ``SCENARIO,... RANK SIZE FOLDER``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_moe.comm import (
    close_tp_moe_finalize_rmsnorm,
    init_tp_moe_finalize_rmsnorm,
    tp_moe_finalize_rmsnorm,
)
from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.groups import FileStore, Group, StoreGroup
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.fused_moe import trtllm_fp8_per_tensor_scale_routed_moe
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from cupy_moe.testing.inputs import (
    make_fp8_layer,
    make_hidden_states,
    make_topk,
    move_arguments,
    to_library,
)
from tests.emulated_ranks import run_ranks
from tests.finalize_cases import BF16, NAN, FinalizeCase, golden_case, make_case, tricky_case
from tests.finalize_layer import NORM, check_layer, finalized, shard_layer
from tests.gpu.finalize_ranks import LIMITS, GpuRank, check_slow_producer, num_gpus, to_bits

MOST_AHEAD = 100  # calls of which the GPU has not ended, so that no launch has to wait for a queue

SYNCHRONIZED = 8  # of so many calls one, on the way to a rank that is killed


def device_of(rank: int) -> int:
    """No rank has the device of its own number, if there are as many as ranks."""
    return (rank + 1) % num_gpus()


def open_rank(group: Group, case: FinalizeCase, **options: Any) -> GpuRank:
    """Rank of this process; one that shares its GPU with other processes takes turns with them."""
    patience = {"timeout_s": 30.0} if group.size > num_gpus() else {}
    return GpuRank(group, case, device_of(group.rank), **patience | options)


def golden(group: Group) -> None:
    cases = [golden_case(group.size, name) for name in ("c0", "c1", "c2", "c3")]
    check_schemes(group, cases, num_calls=4 if group.size <= num_gpus() else 2)


def tricky(group: Group) -> None:
    check_schemes(group, [tricky_case(group.size, shift) for shift in range(6)], num_calls=1)


def check_schemes(group: Group, cases: list[FinalizeCase], num_calls: int) -> None:
    """Run cases of equal sizes through a workspace of each scheme."""
    for limits in LIMITS.values():
        rank = open_rank(group, cases[0], limits=limits)
        for case in cases:
            for out in rank.run(case, num_calls):
                case.check(out)
        rank.workspace.close()


def few_calls(group: Group) -> None:
    """Like `random_calls`, for processes that take turns: every call takes many time slices."""
    random_calls(group, 30)


def random_calls(group: Group, num_calls: int = 10_000) -> None:
    """Calls of all schemes, eager and in graphs of two and three calls, each one checked.

    Outputs are compared on the device with the first, which the reference has checked.
    """
    import cupy

    limits, sizes = SchemeLimits(2, 5), [1, 2, 3, 5, 6, 17, 40]
    cases = {t: make_case(group.size, t, hidden_size=512, seed=t) for t in sizes}
    rank = open_rank(group, cases[1], limits=limits, max_tokens=32)
    with cupy.cuda.Device(rank.device), rank.own_stream as stream:
        arrays = {t: rank.upload(cases[t]) for t in sizes}
        right = {t: rank.output(cases[t]) for t in sizes}
        group.barrier()
        for t in sizes:
            rank.enqueue(cases[t], arrays[t], right[t])
        rank.synchronize()
        for t in sizes:
            cases[t].check(to_bits(right[t]))
        outs = {t: rank.output(cases[t]) for t in sizes}
        wrong = cupy.zeros(1, np.int64)

        def compare(num_tokens: int) -> None:
            out = outs[num_tokens].view(np.uint16)
            wrong[...] += (out != right[num_tokens].view(np.uint16)).sum()
            out.fill(0x7FC1)

        for t in sizes:  # compiles what compares, before any rank waits for another
            compare(t)
        rank.synchronize()
        wrong.fill(0)
        graphs = []
        for members in ([6, 1], [40, 3, 2]):
            calls = [(cases[t], arrays[t], outs[t]) for t in members]
            graphs.append((rank.capture(partial(rank.enqueue_each, calls)), members))
        plan, done, ahead = random.Random(7), 0, 0
        while done < num_calls:
            if done - ahead > MOST_AHEAD:  # not the device: ranks may share it
                stream.synchronize()
                ahead = done
            kind = plan.randrange(4)
            if kind < 2:
                graph, members = graphs[kind]
                graph.launch(stream)
            else:
                members = [plan.choice(sizes)]
                rank.enqueue(*[of[members[0]] for of in (cases, arrays, outs)])
            for num_tokens in members:
                compare(num_tokens)
            done += len(members)
        rank.synchronize()
        assert int(wrong[0]) == 0
    rank.workspace.close()


def nccl(group: Group) -> None:
    """The same bits as by stores into the peers' memory; without NCCL, it is named as missing."""
    try:
        from cupy.cuda import nccl as library

        reason = None if library.available else "NCCL is not installed"
    except ImportError as error:
        reason = f"CuPy has no NCCL: {error}"
    if reason is not None:
        with pytest.raises(RuntimeError, match="no workspace"):
            GpuRank(group, make_case(2, 1), device_of(group.rank), transport="nccl")
        print("SKIPPED nccl:", reason, flush=True)
        return
    for scheme, limits in LIMITS.items():
        cases = [make_case(group.size, t, hidden_size=1024, seed=t) for t in (1, 6, 23)]
        outputs = []
        for transport in ("ipc", "nccl"):
            device = device_of(group.rank)
            rank = GpuRank(group, cases[0], device, limits=limits, transport=transport)
            assert rank.workspace.transport.name == transport
            outputs.append([rank.run(case, 2) for case in cases])
            rank.workspace.close()
        for case, stored, sent in zip(cases, *outputs, strict=True):
            case.check(stored[0])
            np.testing.assert_array_equal(np.stack(stored), np.stack(sent), err_msg=scheme.name)


def killed(group: Group) -> None:
    """The last rank is killed in a loop of calls; the others must raise and their GPUs work on."""
    import cupy

    case = make_case(group.size, 9, hidden_size=4096)
    # Where ranks take turns on a GPU, a call takes many of their time slices.
    timeout_s, end = (1.0, 200) if group.size <= num_gpus() else (2.0, 20)
    rank = open_rank(group, case, timeout_s=timeout_s)
    arrays, out = rank.upload(case), rank.output(case)
    group.barrier()
    start = time.monotonic()

    def call_on() -> None:
        for number in range(10**6):
            if group.rank == group.size - 1 and number == end:
                os.kill(os.getpid(), signal.SIGKILL)
            rank.enqueue(case, arrays, out)
            if number % SYNCHRONIZED == 0:
                rank.synchronize()

    with pytest.raises(PeerTimeoutError) as caught:
        call_on()
    assert caught.value.call >= end - SYNCHRONIZED  # not before
    # Of more than two ranks, one may hear first of another one that has waited in vain.
    assert caught.value.peer == group.size - 1 or (
        group.size > 2 and caught.value.peer != group.rank
    )
    assert time.monotonic() - start < 20
    with cupy.cuda.Device(rank.device):
        assert int(cupy.arange(100).sum()) == 4950
    start = time.monotonic()
    rank.workspace.close()  # waits for the killed one, but not for long
    assert time.monotonic() - start < 20


def raises_first(group: Group) -> None:
    """Rank 0 raises before it launches what the others wait in."""
    case = make_case(group.size, 3, hidden_size=1024)
    rank = GpuRank(group, case, device_of(group.rank), timeout_s=2.0)
    case.check(rank.run(case)[0])
    arrays, out = rank.upload(case), rank.output(case)
    group.barrier()
    if group.rank == 0:
        with pytest.raises(ValueError, match="output must be"):
            rank.enqueue(case, arrays, arrays[0])
    else:
        rank.enqueue(case, arrays, out)
        with pytest.raises(PeerTimeoutError) as caught:
            rank.synchronize()
        assert caught.value.peer == 0
    rank.workspace.close()
    again = GpuRank(group, case, device_of(group.rank))
    case.check(again.run(case)[0])
    again.workspace.close()


def slow_producer(group: Group) -> None:
    """Programmatic dependent launch, which ranks that share a GPU do without."""
    case = make_case(group.size, 1, hidden_size=1024)
    for in_graph in (False, True):
        rank = open_rank(group, case)
        check_slow_producer(rank, case, in_graph)
        rank.workspace.close()


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
        with pytest.raises(RuntimeError, match="rank 0: RuntimeError"):
            GpuRank(group, case, device, max_tokens=1 << 14)
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
    managed = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
    for pool in (cupy.cuda.MemoryAsyncPool().malloc, managed.malloc):
        with cupy.cuda.Device(device), cupy.cuda.using_allocator(pool):
            rank = GpuRank(group, case, device)
            case.check(rank.run(case)[0])
            rank.workspace.close()
    assert len(small) == 50


def two_groups(world: Group) -> None:
    """Ranks 0, 1 and 2, 3 of four at once on two GPUs, then 1, 3; with equal random seeds.

    Ranks q and q + 2 are threads of process q, so rank 3 is on GPU 1.
    """
    random.seed(0)
    store = FileStore(Path(sys.argv[4]) / "groups", timeout_s=5.0)
    case = make_case(2, 5, hidden_size=1024)

    def work(members: list[int], rank: int, all_ranks: Group) -> None:
        own = StoreGroup(members.index(rank), 2, store, "-".join(map(str, members)))
        gpu = GpuRank(own, case, device_of(rank % 2))
        arrays, outputs = gpu.upload(case), [gpu.output(case) for _ in range(3)]
        all_ranks.barrier()  # no copy of a thread may wait for a launch of the other
        for out in outputs:
            gpu.enqueue(case, arrays, out)
        gpu.synchronize()
        for out in outputs:
            case.check(to_bits(out))
        gpu.workspace.close()

    def pair(thread: Group) -> None:
        rank = world.rank + 2 * thread.rank
        work([[0, 1], [2, 3]][thread.rank], rank, StoreGroup(rank, 4, store, "all"))

    run_ranks(2, pair, timeout_s=10.0)
    if world.rank == 1:
        run_ranks(2, lambda thread: work([1, 3], 1 + 2 * thread.rank, thread), timeout_s=10.0)
    world.barrier()


def pairs(world: Group) -> None:
    """Ranks 0, 1 and 2, 3, and so on: groups at once, a process a rank, with equal random seeds."""
    random.seed(0)
    store = FileStore(Path(sys.argv[4]) / "pairs", timeout_s=40.0)
    own = StoreGroup(world.rank % 2, 2, store, f"pair {world.rank // 2}")
    case = make_case(2, 5, hidden_size=1024)
    rank = GpuRank(own, case, device_of(world.rank), timeout_s=30.0)
    world.barrier()
    for out in rank.run(case, num_calls=3):
        case.check(out)
    rank.workspace.close()


def layer(group: Group) -> None:
    """An FP8 layer cut along its intermediate dimension against the whole layer on one GPU."""
    import cupy

    whole = make_fp8_layer(hidden_size=512, intermediate_size=1024, num_experts=4)
    hidden, topk = make_hidden_states(9, 512), make_topk(9, 2, 4)
    arguments = move_arguments(whole.arguments(hidden, topk, do_finalize=False), "cupy")
    expected = finalized(trtllm_fp8_per_tensor_scale_routed_moe(**arguments))
    device = device_of(group.rank)
    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
        assert init_tp_moe_finalize_rmsnorm(
            group, device=device, hidden_size=512, top_k=2, timeout_s=30.0, transport="ipc"
        )
        shard = shard_layer(whole, group.rank, group.size)
        arguments = move_arguments(shard.arguments(hidden, topk, do_finalize=False), "cupy")
        norm_weight = to_library(np.ones(512, BF16), "cupy")
        out = cupy.full((9, 512), NAN, np.uint16).view(BF16)

        kept = []  # what a graph of CuPy refers to must not be handed out again

        def run() -> None:
            kept.append(trtllm_fp8_per_tensor_scale_routed_moe(**arguments))
            tp_moe_finalize_rmsnorm(*kept[-1], norm_weight, out, **NORM)

        run()
        stream.synchronize()
        check_layer(to_bits(out), expected)
        group.barrier()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        out.view(np.uint16).fill(NAN)
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        check_layer(to_bits(out), expected)
        close_tp_moe_finalize_rmsnorm()


SCENARIOS: dict[str, Any] = {
    function.__name__: function
    for function in (
        golden,
        tricky,
        random_calls,
        few_calls,
        nccl,
        killed,
        raises_first,
        slow_producer,
        no_memory,
        allocators,
        two_groups,
        pairs,
        layer,
    )
}
assert set(LIMITS) == set(FinalizeScheme)


def main() -> None:
    """Run scenarios one after another."""
    scenarios, rank, size, folder = sys.argv[1:]
    # More processes take longer to start, one after the other where they compile the same kernels.
    timeout_s = 8.0 if int(size) == 2 else 40.0
    group = StoreGroup(int(rank), int(size), FileStore(Path(folder), timeout_s=timeout_s))
    for scenario in scenarios.split(","):
        SCENARIOS[scenario](group)
        print("DONE", scenario, flush=True)
    os._exit(0)  # a killed peer must not hold up the end


if __name__ == "__main__":
    main()
