"""FP4 layers of the benchmark: what is counted, and their definition against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.bench.fp4 import FORMS, FP4_WORKLOADS, MODES, Fp4BenchLayer, fp4_work, padded
from cupy_moe.bench.layers import LARGEST_REL_L2
from cupy_moe.bench.torch_layer import layer_output
from cupy_moe.bench.workloads import Workload
from cupy_moe.testing.compare import compare
from tests.fp4_bench_layer import host_layer, routing

torch = pytest.importorskip("torch")

COUNTED = Workload("counted", "none", 256, 128, 4, 2, 4)
ROUTING = np.array([[0, 1], [1, 3], [0, 3]], np.int32)  # three experts hit, six assignments
CHECKED = [0, 3, 4]


@pytest.mark.parametrize(
    ("mode", "bits_of_weight", "token_bytes"),
    [("bf16", 4.25, 512), ("mxfp8", 4.25, 256 + 8), ("nvfp4", 4.5, 128 + 16)],
)
def test_bytes_include_the_scales(mode: str, bits_of_weight: float, token_bytes: int) -> None:
    work = fp4_work(COUNTED, mode, [ROUTING])
    weights = 3 * 3 * 256 * 128 * bits_of_weight / 8
    assert work.num_bytes == weights + 3 * (token_bytes + 2 * 256)
    assert work.flops == 2 * 6 * 3 * 256 * 128


@pytest.mark.parametrize(("form", "size"), [("whole", 2944), ("tp_n_tp_k", 3072)])
def test_sizes_are_padded_to_what_a_form_takes(form: str, size: int) -> None:
    workload = padded(FP4_WORKLOADS["W-C"], form)
    assert (workload.hidden_size, workload.intermediate_size) == (size, size)
    assert padded(FP4_WORKLOADS["W-D"], form) == FP4_WORKLOADS["W-D"]


# --- the definition -------------------------------------------------------------------------------


def distance(layer: Fp4BenchLayer, judge: Fp4BenchLayer) -> float:
    """Relative L2 distance of the operation's output from the definition of ``judge``."""
    hidden, (ids, weights) = layer.make_hidden(5, seed=1), routing(5)
    output = layer.call(hidden, ids, weights)()
    expected = layer_output(judge, hidden, ids, weights, CHECKED)
    assert expected.shape == (len(CHECKED), layer.workload.hidden_size)
    return compare(output[CHECKED].float().numpy(), expected.numpy()).rel_l2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_definition_agrees_with_the_reference(mode: str, form: str) -> None:
    layer = host_layer(mode, form)
    assert distance(layer, layer) < LARGEST_REL_L2[mode] / 4


def reverse_rows(whole: dict[str, Any]) -> None:
    whole["gemm1_weights"] = whole["gemm1_weights"].flip(1)


def swap_experts(whole: dict[str, Any]) -> None:
    whole["gemm2_weights"] = whole["gemm2_weights"].roll(1, 0)


def double_scales(whole: dict[str, Any]) -> None:
    """E4M3 has three bits behind the exponent."""
    step = 8 if whole["gemm2_weights_scale"].shape[-1] == 256 // 16 else 1
    whole["gemm2_weights_scale"] = whole["gemm2_weights_scale"] + step


@pytest.mark.parametrize("change", [reverse_rows, swap_experts, double_scales])
@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_layer_is_far(mode: str, change: Any) -> None:
    layer, wrong = host_layer(mode), host_layer(mode)
    change(wrong.whole)
    assert distance(layer, wrong) > LARGEST_REL_L2[mode]


def test_one_set_of_weights_serves_both_formats_of_tokens() -> None:
    layer = host_layer("bf16").in_mode("mxfp8")
    assert layer.whole is not host_layer("mxfp8").whole
    assert torch.equal(layer.w1, host_layer("mxfp8").w1)
    assert distance(layer, layer) < LARGEST_REL_L2["mxfp8"] / 4


def test_batches_have_the_tokens_of_the_mode() -> None:
    batch = host_layer("nvfp4").batch(4)
    assert batch.num_tokens == 4
    assert tuple(batch.hidden.values.shape) == (4, 128)
    assert len(batch.routings) >= 4
    assert batch.work == fp4_work(host_layer("nvfp4").workload, "nvfp4", batch.routings)
