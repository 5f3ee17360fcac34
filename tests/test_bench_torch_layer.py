"""The layer in torch that the benchmark holds our output to, against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.bench.fp8 import Fp8BenchLayer
from cupy_moe.bench.layers import LARGEST_REL_L2, BenchLayer
from cupy_moe.bench.torch_layer import layer_output, tokens_to_check
from cupy_moe.bench.workloads import Workload
from cupy_moe.fused_moe import trtllm_fp8_per_tensor_scale_routed_moe
from cupy_moe.testing.compare import compare
from cupy_moe.testing.inputs import Fp8Layer, make_fp8_layer, make_hidden_states
from cupy_moe.weights import pack_topk_ids
from cupy_moe.weights.layouts import unprepare_gemm1_weights, unprepare_gemm2_weights

torch = pytest.importorskip("torch")

WORKLOAD = Workload("small", "none", 256, 128, num_experts=16, top_k=4, local_num_experts=8)
LIMIT = 0.01  # the reference rounds its output to BF16


def e4m3_tensor(array: Any) -> Any:
    return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def prepared() -> Fp8Layer:
    return make_fp8_layer(hidden_size=256, intermediate_size=128, num_experts=16, local=(0, 8))


def on_host(prepared: Fp8Layer) -> Fp8BenchLayer:
    """The layer's other forms as host tensors, in place of the cached ones on a GPU."""
    layer = Fp8BenchLayer(WORKLOAD, "fp8", "whole", prepared)
    weights = prepared.weights
    vars(layer).update(
        w1=e4m3_tensor(unprepare_gemm1_weights(weights.gemm1_weights)),
        w2=e4m3_tensor(unprepare_gemm2_weights(weights.gemm2_weights)),
        fc1_factor=torch.from_numpy(weights.output1_scales_gate_scalar),
        fc2_factor=torch.from_numpy(weights.output2_scales_scalar),
    )
    return layer


@pytest.fixture(scope="module")
def batch() -> tuple[Any, Any, Any]:
    """Hidden states, ids and weights of 12 tokens; token 5 visits no local expert."""
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((12, 16)), axis=1)[:, :4].astype(np.int32)
    ids[5] = 8 + np.arange(4)
    weights = rng.choice(np.float32([0.125, 0.25, 0.5]), ids.shape)  # BF16 holds them
    return make_hidden_states(12, 256), ids, weights


def distance(layer: BenchLayer, prepared: Fp8Layer, batch: Any, tokens: list[int]) -> float:
    hidden, ids, weights = batch
    arguments = prepared.arguments(hidden, pack_topk_ids(ids, weights))
    reference = trtllm_fp8_per_tensor_scale_routed_moe(**arguments)
    output = layer_output(layer, e4m3_tensor(hidden), ids, weights, tokens)
    assert output.shape == (len(tokens), 256)
    return compare(output, np.asarray(reference)[tokens].astype(np.float32)).rel_l2


@pytest.mark.parametrize("tokens", [[0], [11, 2], [0, 3, 5, 7], list(range(12))])
def test_torch_agrees_with_the_reference(prepared: Fp8Layer, batch: Any, tokens: list[int]) -> None:
    assert distance(on_host(prepared), prepared, batch, tokens) < LIMIT


def test_a_token_without_local_experts_is_zero(prepared: Fp8Layer, batch: Any) -> None:
    hidden, ids, weights = batch
    output = layer_output(on_host(prepared), e4m3_tensor(hidden), ids, weights, [5])
    assert bool((output == 0).all())


def swap_halves(layer: Fp8BenchLayer) -> None:
    up, gate = layer.w1.view(torch.uint8).chunk(2, dim=1)
    vars(layer)["w1"] = torch.cat([gate, up], dim=1).view(torch.float8_e4m3fn)


def swap_experts(layer: Fp8BenchLayer) -> None:
    vars(layer)["w2"] = layer.w2.view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn)


def scale(layer: Fp8BenchLayer) -> None:
    vars(layer)["fc1_factor"] = 1.2 * layer.fc1_factor


@pytest.mark.parametrize("change", [swap_halves, swap_experts, scale])
def test_a_wrong_layer_is_far(change: Any, prepared: Fp8Layer, batch: Any) -> None:
    layer = on_host(prepared)
    change(layer)
    assert distance(layer, prepared, batch, [0, 3, 7, 11]) > LARGEST_REL_L2["fp8"]


# --- which tokens ---------------------------------------------------------------------------------


def test_checked_tokens_visit_local_experts_and_span_the_batch() -> None:
    ids = np.full((100, 4), 8, np.int32)
    assert tokens_to_check(WORKLOAD, ids) == [0, 33, 66, 99]
    ids[[7, 50, 90], 2] = 7
    assert tokens_to_check(WORKLOAD, ids) == [7, 50, 90]
    ids[:, 0] = 0
    assert tokens_to_check(WORKLOAD, ids) == [0, 33, 66, 99]
    assert tokens_to_check(WORKLOAD, ids[:1]) == [0]
