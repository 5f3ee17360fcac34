"""Measured times of the FP8 layer, and of what bounds it on the same GPU in the same run.

Rows are recorded as evidence; speed is not asserted. ``cupy_moe.bench`` defines what is timed.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupy_moe.bench.ceilings import Ceilings, copy_bandwidth, dense_fp8, read_bandwidth
from cupy_moe.bench.contenders import Contender, CupyMoe
from cupy_moe.bench.fp8 import Fp8BenchLayer, make_fp8_bench_layer
from cupy_moe.bench.measure import measure
from cupy_moe.bench.peers import FP8_PEERS, present_peers
from cupy_moe.bench.peers.weighted_sum import weighted_sum
from cupy_moe.bench.timing import capture, free_memory
from cupy_moe.bench.torch_layer import layer_output, tokens_to_check
from cupy_moe.bench.workloads import WORKLOADS, Workload
from cupy_moe.testing.compare import assert_within, compare
from tests.gpu.support import tolerance_of, torch_oracle
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
REPLAYS = 15
FIGURES = (
    "us",
    "us_min",
    "us_max",
    "sustained_us",
    "tb_per_s",
    "tflops",
    "share_of_floor",
    "experts_hit",
)
# The oracle is slow: of large batches it computes the first tokens only. Rows do not depend on each
# other.
CHECKED_TOKENS = 512


@pytest.fixture(scope="module")
def ceilings(evidence: Evidence) -> Ceilings:
    read, copied = read_bandwidth(), copy_bandwidth()
    dense = dense_fp8()
    free_memory()
    evidence.benchmark("ceiling/streaming read of 4 GiB", {"tb_per_s": read / 1e12})
    evidence.benchmark("ceiling/copy of 2 GiB, read + write", {"tb_per_s": copied / 1e12})
    evidence.benchmark("ceiling/dense FP8 8192^3", dense.as_dict())
    return Ceilings(read, dense)


@pytest.fixture(scope="module", params=["W-A", "W-B"])
def layer(request: pytest.FixtureRequest) -> Fp8BenchLayer:
    free_memory()
    return make_fp8_bench_layer(WORKLOADS[request.param])


@pytest.fixture(scope="module")
def peers(layer: Fp8BenchLayer) -> list[Contender]:
    """Other implementations that are installed here."""
    return [peer(layer) for peer in present_peers(FP8_PEERS.values())[0]]


@pytest.mark.parametrize("tokens", TOKENS)
def test_layer(
    tokens: int,
    layer: Fp8BenchLayer,
    peers: list[Contender],
    ceilings: Ceilings,
    evidence: Evidence,
) -> None:
    batch = layer.batch(tokens)
    ours = CupyMoe(layer)
    ids = batch.routings[-1]
    output = ours.prepare(batch.hidden, ids, batch.weights)()
    first = slice(0, CHECKED_TOKENS)
    arguments = layer.arguments(batch.hidden[first], ids[first], batch.weights[first])
    errors = compare(output[first], torch_oracle(arguments))
    name = f"{layer.workload.title}/T{tokens:05d}"
    evidence.errors(f"fp8 benchmark {name}", errors)
    assert_within(errors, tolerance_of(arguments), "the benchmarked call")

    row = measure(layer, batch, ceilings, replays=REPLAYS, peers=peers)
    assert row.us > 0
    record = row.as_dict()
    evidence.benchmark(
        f"fp8 layer {name}", {**{f: record[f] for f in FIGURES}, "calls_in_graph": row.num_calls}
    )
    for peer, figures in record["peers"].items():
        evidence.benchmark(f"fp8 layer {name}/{peer}", figures)
    for peer, reason in row.failures.items():
        evidence.benchmark(f"fp8 layer {name}/{peer}", {"failed": reason})


@pytest.mark.parametrize("key", FP8_PEERS)
@pytest.mark.parametrize("tokens", [1, 64])
def test_installed_peers_are_timed(
    key: str, tokens: int, layer: Fp8BenchLayer, ceilings: Ceilings
) -> None:
    """A whole-layer peer is, by what `measure` demands, close to our output."""
    if reason := FP8_PEERS[key].missing():
        pytest.skip(reason)
    batch, peer = layer.batch(tokens), FP8_PEERS[key](layer)
    row = measure(layer, batch, ceilings, replays=3, peers=[peer])
    assert row.failures == {}
    assert peer.name in row.timings


def test_layer_in_torch_agrees_with_the_oracle() -> None:
    """What `measure` holds our output to; the oracle undoes the weight layout by itself."""
    layer = make_fp8_bench_layer(Workload("small", "none", 1024, 256, 16, 4, 16))
    batch = layer.batch(64)
    ids = batch.routings[-1]
    tokens = tokens_to_check(layer.workload, ids)
    assert tokens == [0, 21, 42, 63]
    output = layer_output(layer, batch.hidden, ids, batch.weights, tokens)
    arguments = layer.arguments(batch.hidden, ids, batch.weights)
    assert compare(output, torch_oracle(arguments).astype(np.float32)[tokens]).rel_l2 < 0.01


def test_captured_calls_keep_their_inputs() -> None:
    """Whoever allocates after the capture does not get the memory of the routing."""
    import torch

    layer = make_fp8_bench_layer(Workload("small", "none", 1024, 256, 16, 4, 16))
    batch, ours = layer.batch(4), CupyMoe(layer)
    captured = capture([ours.prepare(batch.hidden, ids, batch.weights) for ids in batch.routings])
    captured.replay()
    expected = [result.clone() for result in captured.results]
    others = [torch.full((n,), -1, dtype=torch.int32, device="cuda") for n in 32 * [16, 64, 2048]]
    captured.replay()
    for result, before in zip(captured.results, expected, strict=True):
        assert torch.equal(result, before)
    assert all(bool((other == -1).all()) for other in others)


def test_weighted_sum_of_a_peer() -> None:
    """The sum that is timed with Humming: slots without a row add nothing, NaN rows included."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(6, 1024, generator=generator, device="cuda").bfloat16()
    rows[5] = torch.nan
    row_of_slot = np.array([[0, 3], [-1, 4], [2, -1], [-1, -1]], np.int32)
    weights = np.array([[0.5, 0.25], [9.0, 1.0], [2.0, 9.0], [9.0, 9.0]], np.float32)
    output = torch.full((4, 1024), torch.nan, device="cuda").bfloat16()
    weighted_sum(
        rows, torch.from_numpy(row_of_slot).cuda(), torch.from_numpy(weights).cuda(), output
    )
    exact = torch.stack(
        [0.5 * rows[0].float() + 0.25 * rows[3].float(), rows[4], 2 * rows[2], 0 * rows[0]]
    )
    torch.testing.assert_close(output, exact.bfloat16(), rtol=0, atol=0)
