"""Small calls for ``compute-sanitizer``: every kernel, every branch that indexes memory.

Arrays come from ``cudaMalloc`` one by one, so that a step over the edge of one is seen.
"""

from __future__ import annotations

import sys

import numpy as np

from cupy_moe.comm.groups import SingleRank
from cupy_moe.testing.compare import assert_within, compare, to_host
from cupy_moe.testing.fp4_inputs import Fp4Sizes, fp4_layer
from cupy_moe.testing.inputs import make_fp8_layer, make_hidden_states, make_topk, move_arguments
from cupy_moe.types import ActivationType
from tests.finalize_cases import make_case
from tests.fp4_calls import run
from tests.gpu.finalize_ranks import GpuRank
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


def finalized(tokens: int, hidden_size: int, top_k: int) -> None:
    """A finalize of one rank; ranks that wait for each other would outlast any time limit here."""
    case = make_case(1, tokens, hidden_size=hidden_size, top_k=top_k)
    rank = GpuRank(SingleRank(), case)
    case.check(rank.run(case)[0])
    rank.workspace.close()


def main(level: str) -> None:
    """Run the cases; "few" is one call of each kernel, for the slower tools."""
    import cupy

    cupy.cuda.set_allocator(None)
    routed(3, 4, 2, ActivationType.Swiglu)
    from_logits(3, 8, 2, routing_method_type=1)
    fp4("mxfp8", Fp4Sizes(3))
    fp4("nvfp4", Fp4Sizes(3))
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
        finalized(3, 264, 3)
        finalized(2, 4096, 8)
        finalized(140, 8, 1)
    cupy.cuda.Device().synchronize()
    print("CASES DONE")


if __name__ == "__main__":
    main(sys.argv[1])
