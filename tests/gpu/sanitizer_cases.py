"""Small calls for ``compute-sanitizer``: every kernel, every branch that indexes memory.

Arrays come from ``cudaMalloc`` one by one, so that a step over the edge of one is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from cupy_moe.comm.groups import Group
from cupy_moe.comm.transport import Step, Transport
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme, Phases
from cupy_moe.pipeline import tiled_as
from cupy_moe.testing.compare import assert_within, compare, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from cupy_moe.testing.inputs import make_fp8_layer, make_hidden_states, make_topk, move_arguments
from cupy_moe.tiling import Tiling
from cupy_moe.types import ActivationType
from tests.emulated_ranks import run_ranks
from tests.finalize_cases import make_case
from tests.fp4_calls import run
from tests.gpu.finalize_ranks import LIMITS, GpuRank
from tests.gpu.fp4_layers import TOLERANCES, on_host, on_library
from tests.gpu.support import logits_moe, reference, routed_moe, tolerance_of


def routed(tokens: int, experts: int, top_k: int, activation: ActivationType, **topk: str) -> None:
    """One call on ids, checked; then its unfinalized form."""
    layer = make_fp8_layer(
        hidden_size=128, intermediate_size=128, num_experts=experts, activation=activation
    )
    routing = make_topk(tokens, top_k, experts, **topk)
    host = layer.arguments(make_hidden_states(tokens, 128), routing)
    arguments = move_arguments(host, "cupy")
    assert_within(compare(routed_moe(**arguments), reference(host)), tolerance_of(host))
    routed_moe(**arguments, do_finalize=False)


def from_logits(tokens: int, experts: int, top_k: int, **options: int) -> None:
    """One call on logits."""
    layer = make_fp8_layer(hidden_size=128, intermediate_size=128, num_experts=experts)
    logits = np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32)
    bias = np.linspace(-1, 1, experts, dtype=np.float32)
    hidden = make_hidden_states(tokens, 128)
    host = layer.logits_arguments(hidden, logits, top_k, routing_bias=bias, **options)
    out = to_host(logits_moe(**move_arguments(host, "cupy")))
    assert np.isfinite(out.astype(np.float32)).all()


def fp4(mode: str, sizes: Fp4Sizes) -> None:
    """One call of a layer that is not partitioned, checked; then its unfinalized form."""
    host = fp4_layer(mode, "whole", sizes)
    arguments = on_library(host, "cupy")
    (out,), (expected,) = run("whole", arguments), run("whole", on_host(host))
    assert_within(compare(out, expected), TOLERANCES[mode])
    run("whole", arguments | {"do_finalize": False})


class StepByStep(Transport):
    """The phases of a finalize one after another, all ranks meeting in between.

    So no launch waits for one that the tool holds back.
    """

    name = "ipc"

    def __init__(self, rank: GpuRank) -> None:
        (whole,) = rank.workspace.transport.steps(FinalizeScheme.EveryRank, 1)
        self._rank, self._peers = rank, whole.peers

    def steps(self, scheme: FinalizeScheme, num_tokens: int) -> list[Step]:
        phases = [Phases.Send, Phases.Reduce]
        phases += [] if scheme is FinalizeScheme.EveryRank else [Phases.Receive]
        return [Step(phase, self._peers, self._meet) for phase in phases]

    def _meet(self, stream: int) -> None:
        self._rank.own_stream.synchronize()
        self._rank.group.barrier()


@contextmanager
def few_multiprocessors() -> Iterator[None]:
    """Plan for two of them: blocks fill the slots of their rings again and again.

    Plans are kept by sizes, so those of these calls belong to them alone.
    """
    with mock.patch("cupy_moe.pipeline.sm_count", return_value=2):
        yield


def finalized(num_ranks: int, tokens: int, hidden_size: int, top_k: int) -> None:
    """A finalize by every scheme, the ranks being threads."""
    case = make_case(num_ranks, tokens, hidden_size=hidden_size, top_k=top_k)

    def work(group: Group) -> None:
        for limits in LIMITS.values():
            rank = GpuRank(group, case, limits=limits)
            if num_ranks > 1:
                rank.workspace.transport = StepByStep(rank)
            case.check(rank.run(case)[0])
            rank.workspace.close()

    run_ranks(num_ranks, work, timeout_s=60.0)


def main(level: str) -> None:
    """Run the cases; "few" is one call of each kernel, for the slower tools."""
    import cupy

    cupy.cuda.set_allocator(None)
    routed(3, 4, 2, ActivationType.Swiglu)
    from_logits(3, 8, 2, routing_method_type=1)
    fp4("mxfp8", Fp4Sizes(3))
    fp4("nvfp4", Fp4Sizes(3))
    fp4("bf16", Fp4Sizes(200, experts=1, top_k=1))  # clusters share tokens, two tiles the rows
    with few_multiprocessors():
        routed(24, 16, 4, ActivationType.Swiglu)
        fp4("mxfp8", Fp4Sizes(8, hidden=896, inter=512, experts=8, top_k=4))
        fp4("bf16", Fp4Sizes(400, hidden=512, experts=2, top_k=1))  # in one cluster
    finalized(1, 2, 4096, 8)
    finalized(2, 3, 264, 3)
    if level == "all":
        routed(1, 1, 1, ActivationType.Relu2)
        routed(37, 4, 2, ActivationType.SwigluStep, invalid="extremes", dtype="float32")
        routed(65, 3, 2, ActivationType.Geglu, invalid="half_the_rows")
        routed(129, 2, 1, ActivationType.Situ, pattern="one_expert", dtype="bfloat16")
        routed(9, 4, 2, ActivationType.Identity, invalid="all_rows")
        routed(521, 5, 2, ActivationType.Swiglu, invalid="half_the_rows")  # a cluster permutes
        from_logits(37, 64, 8, routing_method_type=2, n_group=8, topk_group=4)
        from_logits(5, 128, 1, routing_method_type=3)
        fp4("bf16", Fp4Sizes(37, block_bytes=64, local=(2, 3)))
        # A cluster with one weight tile too few, and one of other tiles.
        fp4("mxfp8", Fp4Sizes(90, hidden=384, inter=128, experts=1, top_k=1))
        fp4("mxfp8", Fp4Sizes(390, experts=1, top_k=1))  # three of the largest tiles share rows
        with tiled_as(Tiling(96, 256, 256, gather=False)):
            fp4("nvfp4", Fp4Sizes(100, experts=1, top_k=1))
        finalized(1, 3, 264, 3)
        finalized(1, 140, 8, 1)
        finalized(2, 2, 4096, 8)
        finalized(4, 9, 264, 3)
        finalized(8, 3, 520, 11)
    cupy.cuda.Device().synchronize()
    print("CASES DONE")


if __name__ == "__main__":
    main(sys.argv[1])
