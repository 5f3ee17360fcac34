"""What the benchmark of FP4 layers counts, and its table; needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("rich")

from rich.console import Console

from cupy_moe.bench.fp4 import FP4_WORKLOADS, Fp4Ceilings, Fp4Row, fp4_work, padded
from cupy_moe.bench.rows import Timing
from cupy_moe.bench.workloads import Workload
from cupy_moe.cli.bench_fp4 import fp4_table

SMALL = Workload("small", "none", 256, 128, 4, 2, 4)
ROUTING = np.array([[0, 1], [1, 3], [0, 3]], np.int32)  # three experts hit, six assignments


@pytest.mark.parametrize(
    ("mode", "bits_of_weight", "token_bytes"),
    [("bf16", 4.25, 512), ("mxfp8", 4.25, 256 + 8), ("nvfp4", 4.5, 128 + 16)],
)
def test_bytes_include_the_scales(mode: str, bits_of_weight: float, token_bytes: int) -> None:
    work = fp4_work(SMALL, mode, [ROUTING])
    weights = 3 * 3 * 256 * 128 * bits_of_weight / 8
    assert work.num_bytes == weights + 3 * (token_bytes + 2 * 256)
    assert work.flops == 2 * 6 * 3 * 256 * 128


@pytest.mark.parametrize(("form", "size"), [("whole", 2944), ("tp_n_tp_k", 3072)])
def test_sizes_are_padded_to_what_a_form_takes(form: str, size: int) -> None:
    workload = padded(FP4_WORKLOADS["W-C"], form)
    assert (workload.hidden_size, workload.intermediate_size) == (size, size)
    assert padded(FP4_WORKLOADS["W-D"], form) == FP4_WORKLOADS["W-D"]


def test_floor_and_table() -> None:
    ceilings = Fp4Ceilings(read_bytes_per_s=1e12, bf16_flops_per_s=1e14)
    work = fp4_work(SMALL, "bf16", [ROUTING])
    floor_us = ceilings.floor_us(work)
    assert floor_us == pytest.approx(1e6 * work.num_bytes / 1e12)
    row = Fp4Row(SMALL, "bf16", "whole", 3, 4, work, floor_us, Timing(2 * floor_us, 1.0, 9.0))
    figures = row.as_dict()
    assert figures["share_of_floor"] == 0.5
    assert figures["tb_per_s"] == pytest.approx(0.5)
    console = Console(width=200, record=True, quiet=False)
    console.print(fp4_table([row]))
    text = console.export_text()
    assert "small H256 I128 E4 K2" in text
    assert "50%" in text
