"""Measured times of the FP8 layer, and of what bounds it on the same GPU in the same run.

Rows are recorded as evidence; speed is not asserted. One CUDA graph holds several calls with
different routings, back to back, so that weights come from memory and not from the L2 cache.

    bytes = experts hit * 3 * H * I  (weights)  +  T * H  (hidden states)  +  2 * T * H  (output)
    flops = 2 * T * K * 3 * H * I
    floor = max(bytes / read bandwidth, flops / dense FP8 rate)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pytest

from cupy_moe.testing.compare import assert_within, compare
from cupy_moe.testing.inputs import (
    Fp8Layer,
    make_fp8_layer,
    make_hidden_states,
    make_topk,
    move_arguments,
)
from cupy_moe.weights import pack_topk_ids
from tests.gpu.support import BF16, full, routed_moe, tolerance_of, torch_oracle
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

HIDDEN, INTER, EXPERTS, TOP_K = 4096, 1536, 128, 8
TOKENS = (1, 16, 64, 256, 1024, 4096)
REPLAYS = 15

READ_KERNEL = r"""
extern "C" __global__ void read_all(const uint4* data, long long count, unsigned* sink) {
  unsigned folded = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  #pragma unroll 8
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint4 v = data[i];
    folded ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (folded == 0x9E3779B9u) *sink = folded;  // keeps the loads alive
}
"""


@dataclass(frozen=True)
class Ceilings:
    """What the GPU gives to anybody, measured in this run."""

    read_bytes_per_s: float
    fp8_flops_per_s: float

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Time that neither memory nor tensor cores can beat."""
        return 1e6 * max(num_bytes / self.read_bytes_per_s, flops / self.fp8_flops_per_s)


def timed_us(work: Callable[[], Any], repeats: int = REPLAYS) -> list[float]:
    """Times of single runs by CUDA events on torch's current stream, after three warm-up runs."""
    import torch

    times = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return times[3:]


def captured(work: Callable[[], None]) -> Any:
    """CUDA graph of ``work``, which was run once before."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def read_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second of a kernel that reads a buffer once."""
    import cupy
    import torch

    kernel = cupy.RawKernel(READ_KERNEL, "read_all")
    data, sink = cupy.zeros(num_bytes, np.uint8), cupy.zeros(1, np.uint32)
    blocks = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def work() -> None:
        with stream:
            kernel((blocks,), (512,), (data, np.int64(num_bytes // 16), sink))

    return num_bytes / (1e-6 * median(timed_us(work)))


def copy_bandwidth(num_bytes: int = 2 << 30) -> float:
    """Bytes read plus bytes written per second of a device-to-device copy."""
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / (1e-6 * median(timed_us(lambda: target.copy_(source))))


def dense_fp8_rate(size: int = 8192) -> float:
    """FLOP per second of torch's FP8 matrix product on random data."""
    import torch

    def matrix() -> torch.Tensor:
        return torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)

    a, b, one = matrix(), matrix(), torch.ones((), device="cuda")

    def work() -> None:
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * size**3 / (1e-6 * median(timed_us(work)))


@pytest.fixture(scope="module")
def ceilings(evidence: Evidence) -> Ceilings:
    read, copied, dense = read_bandwidth(), copy_bandwidth(), dense_fp8_rate()
    evidence.benchmark("ceiling/streaming read of 4 GiB", {"tb_per_s": read / 1e12})
    evidence.benchmark("ceiling/copy of 2 GiB, read + write", {"tb_per_s": copied / 1e12})
    evidence.benchmark("ceiling/dense FP8 8192^3", {"tflops": dense / 1e12})
    return Ceilings(read, dense)


@pytest.fixture(scope="module")
def layer() -> Fp8Layer:
    import cupy

    return make_fp8_layer(hidden_size=HIDDEN, intermediate_size=INTER, num_experts=EXPERTS, xp=cupy)


def make_routings(tokens: int) -> list[np.ndarray]:
    """Ids of the calls in one graph; one token takes every expert once before any comes again."""
    if tokens == 1:
        experts = np.random.default_rng(0).permutation(EXPERTS).astype(np.int32)
        return list(experts.reshape(-1, 1, TOP_K))
    return [make_topk(tokens, TOP_K, EXPERTS, dtype="float32", seed=seed)[0] for seed in range(4)]


@pytest.mark.parametrize("tokens", TOKENS)
def test_layer(tokens: int, layer: Fp8Layer, ceilings: Ceilings, evidence: Evidence) -> None:
    """Hidden 4096, intermediate 1536, 128 experts, top-8, Swiglu, uniform random routing."""
    hidden = make_hidden_states(tokens, HIDDEN)
    weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
    routings = make_routings(tokens)
    calls = [
        move_arguments(layer.arguments(hidden, pack_topk_ids(ids, weights)), "torch")
        for ids in routings
    ]
    outputs = [full((tokens, HIDDEN), np.nan, BF16, "torch") for _ in calls]

    def work() -> None:
        for call, output in zip(calls, outputs, strict=True):
            routed_moe(**call, output=output)

    graph = captured(work)
    times = [t / len(calls) for t in timed_us(graph.replay)]
    errors = compare(outputs[-1], torch_oracle(calls[-1]))
    assert_within(errors, tolerance_of(calls[-1]), "the benchmarked call")

    hit = float(np.mean([np.unique(ids).size for ids in routings]))
    num_bytes = hit * 3 * HIDDEN * INTER + 3 * tokens * HIDDEN
    flops = 2 * tokens * TOP_K * 3 * HIDDEN * INTER
    us = median(times)
    assert us > 0
    row = {
        "us": us,
        "us_min": min(times),
        "us_max": max(times),
        "tb_per_s": num_bytes / us / 1e6,
        "tflops": flops / us / 1e6,
        "share_of_floor": ceilings.floor_us(num_bytes, flops) / us,
        "experts_hit": hit,
        "calls_in_graph": len(calls),
    }
    evidence.benchmark(f"fp8 layer H4096 I1536 E128 K8/T{tokens:04d}", row)
    evidence.errors(f"fp8 benchmark/T{tokens:04d}", errors)
