"""Measured times of the FP4 layers, whole and in two partitions of the GPU.

Rows are recorded as evidence; speed is not asserted. ``cupy_moe.bench.fp4`` defines what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupy_moe.bench.ceilings import read_bandwidth
from cupy_moe.bench.fp4 import (
    FP4_WORKLOADS,
    Fp4Ceilings,
    make_fp4_bench_layer,
    measure_fp4,
    measure_fp4_ceilings,
)
from cupy_moe.bench.timing import free_memory
from tests.gpu.fp4_layers import compile_kernels, partition_resources
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

REPLAYS = 7
WHOLE = (1, 16, 64, 256, 1024)
ROWS = [
    *[(key, "bf16", "whole", WHOLE) for key in FP4_WORKLOADS],
    ("W-D", "mxfp8", "whole", (64,)),
    ("W-D", "nvfp4", "whole", (64,)),
    ("W-D", "bf16", "tp_n_tp_n", (64,)),
    ("W-D", "bf16", "tp_n_tp_k", (64,)),
]


@pytest.fixture(scope="module")
def ceilings(evidence: Evidence) -> Iterator[Fp4Ceilings]:
    compile_kernels()
    free_memory()
    measured = measure_fp4_ceilings(read_bandwidth())
    free_memory()
    evidence.benchmark("ceiling/dense BF16 8192^3", {"tflops": measured.bf16_flops_per_s / 1e12})
    yield measured
    free_memory()


@pytest.mark.parametrize(("key", "mode", "form", "tokens"), ROWS)
def test_layer(
    key: str,
    mode: str,
    form: str,
    tokens: tuple[int, ...],
    ceilings: Fp4Ceilings,
    evidence: Evidence,
) -> None:
    free_memory()
    resources = None if form == "whole" else partition_resources()
    layer = make_fp4_bench_layer(FP4_WORKLOADS[key], mode, form, resources)
    for num_tokens in tokens:
        row = measure_fp4(layer, num_tokens, ceilings, replays=REPLAYS)
        assert row.timing.us > 0
        name = f"fp4 layer {layer.workload.title}/{mode}/{form}/T{num_tokens:05d}"
        evidence.benchmark(name, row.as_dict())
