"""Measured times of the FP4 layers, whole and in two partitions of the GPU.

Rows are recorded as evidence; speed is not asserted. ``cupy_moe.bench.fp4`` defines what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest

from cupy_moe.bench.ceilings import Ceilings, dense_bf16, read_bandwidth
from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.fp4 import FP4_WORKLOADS, Fp4BenchLayer, make_fp4_bench_layer, padded
from cupy_moe.bench.measure import measure
from cupy_moe.bench.peers import FP4_PEERS, present_peers
from cupy_moe.bench.timing import free_memory
from cupy_moe.bench.workloads import Workload
from tests.gpu.fp4_layers import compile_kernels, partition_resources
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

REPLAYS = 5
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
FEWER_TOKENS = (1, 16, 64, 256, 4096)
FIRST_SUSTAINED = 1024  # tokens from which on clocks depend on the load
# Layers with the same weights follow each other: making those takes longer than most rows.
LAYERS = [
    (key, mode, form)
    for key in FP4_WORKLOADS
    for mode, form in (
        ("bf16", "whole"),
        ("mxfp8", "whole"),
        ("bf16", "tp_n_tp_n"),
        ("bf16", "tp_n_tp_k"),
        ("nvfp4", "whole"),
    )
]
FIGURES = (
    "workload",
    "mode",
    "form",
    "tokens",
    "calls_in_graph",
    "experts_hit",
    "us",
    "us_min",
    "us_max",
    "sustained_us",
    "tb_per_s",
    "tflops",
    "floor_us",
    "share_of_floor",
    "share_of_read",
)
SMALL = Workload("small", "none", 1024, 512, 16, 4, 16)


@lru_cache(maxsize=1)
def whole_layer(workload: Workload, mode: str) -> Fp4BenchLayer:
    free_memory()
    return make_fp4_bench_layer(workload, mode)


def installed_peers(layer: Fp4BenchLayer) -> list[Contender]:
    """Other implementations that are installed here, torch's on dequantized weights aside."""
    present, _ = present_peers([peer for key, peer in FP4_PEERS.items() if key != "torch"])
    return [peer(layer) for peer in present]


def make_layer(key: str, mode: str, form: str) -> Fp4BenchLayer:
    weights = "nvfp4" if mode == "nvfp4" else "bf16"
    layer = whole_layer(padded(FP4_WORKLOADS[key], form), weights).in_mode(mode)
    return layer if form == "whole" else layer.partitioned(form, partition_resources())


@pytest.fixture(scope="module")
def ceilings(evidence: Evidence) -> Iterator[Ceilings]:
    compile_kernels()
    free_memory()
    measured = Ceilings(read_bandwidth(), dense_bf16())
    free_memory()
    evidence.benchmark("ceiling/dense BF16 8192^3", measured.dense.as_dict())
    yield measured
    whole_layer.cache_clear()
    free_memory()


@pytest.mark.parametrize(("key", "mode", "form"), LAYERS)
def test_layer(key: str, mode: str, form: str, ceilings: Ceilings, evidence: Evidence) -> None:
    """Our output is held to the layer in torch, before and after it is timed, by `measure`."""
    layer = make_layer(key, mode, form)
    is_main = (mode, form) == ("bf16", "whole")
    peers = installed_peers(layer) if is_main else []
    for num_tokens in TOKENS if is_main else FEWER_TOKENS:
        sustained = is_main and num_tokens >= FIRST_SUSTAINED
        batch = layer.batch(num_tokens)
        row = measure(layer, batch, ceilings, replays=REPLAYS, peers=peers, sustained=sustained)
        assert row.us > 0
        record = row.as_dict()
        name = f"fp4 layer {layer.workload.title}/{mode}/{form}/T{num_tokens:05d}"
        evidence.benchmark(name, {figure: record[figure] for figure in FIGURES})
        for peer, figures in record["peers"].items():
            evidence.benchmark(f"{name}/{peer}", figures)
        for peer, reason in row.failures.items():
            evidence.benchmark(f"{name}/{peer}", {"failed": reason})


@pytest.mark.parametrize("key", FP4_PEERS)
@pytest.mark.parametrize("tokens", [1, 64])
def test_installed_peers_are_timed(key: str, tokens: int, ceilings: Ceilings) -> None:
    """They are, by what `measure` demands, close to our output."""
    if reason := FP4_PEERS[key].missing():
        pytest.skip(reason)
    layer = make_fp4_bench_layer(SMALL, "bf16")
    batch, peer = layer.batch(tokens), FP4_PEERS[key](layer)
    row = measure(layer, batch, ceilings, replays=3, peers=[peer], sustained=False)
    assert row.failures == {}
    assert peer.name in row.timings
