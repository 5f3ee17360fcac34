"""How the FP4 layers are handed to other packages, which are simulated by their documentation.

Each simulation computes the layer from what it was given, in its own order of rows and halves; the
result must be near that of our operation.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from cupy_moe.bench import contenders
from cupy_moe.bench.layers import LARGEST_REL_L2
from cupy_moe.bench.peers import humming, torch_grouped
from cupy_moe.bench.peers.flashinfer import FlashInferMxfp4
from cupy_moe.bench.peers.humming import HummingMxfp4Grouped, HummingMxfp4Indexed
from cupy_moe.bench.peers.humming_gemm import SWIGLU
from cupy_moe.bench.peers.marlin import HOMES, UTILITIES, Marlin
from cupy_moe.bench.peers.torch_grouped import TorchBf16
from cupy_moe.formats import dequantize_mxfp4
from cupy_moe.testing.compare import compare
from tests.fp4_bench_layer import host_layer, routing

torch = pytest.importorskip("torch")

BLOCK = 16  # rows of a tile


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Make a package importable, its parents included."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if not isinstance(sys.modules.get(path), SimulatedModule):
            monkeypatch.setitem(sys.modules, path, SimulatedModule(path))
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
    vars(sys.modules[name]).update(content)


class SimulatedModule(ModuleType):
    """Package without a file."""

    __path__: ClassVar[list[str]] = []


def values(codes: Any, scales: Any) -> Any:
    """Dequantize (E, N, K/2) with (E, N, K/32)."""
    codes, scales = (x.contiguous().view(torch.uint8).numpy() for x in (codes, scales))
    return torch.from_numpy(dequantize_mxfp4(codes, scales))


def weighted_sum(rows: Any, row_of_slot: Any, weights: Any, output: Any) -> Any:
    """What the kernel does."""
    live = (row_of_slot >= 0)[..., None]
    picked = torch.where(live, rows[row_of_slot.clamp_min(0).long()].float(), 0.0)
    return output.copy_((weights[..., None] * picked).sum(1))


def swiglu(up: Any, gate: Any) -> Any:
    return (up.float() * torch.nn.functional.silu(gate.float())).bfloat16()


def layer_of_slots(x: Any, w1: Any, w2: Any, ids: Any, weights: Any, *, gate_first: bool) -> Any:
    """Whole layer, slot by slot."""
    output = torch.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        expert = int(ids[token, slot])
        halves = (w1[expert] @ x[token].float()).bfloat16().chunk(2)
        y = swiglu(halves[1], halves[0]) if gate_first else swiglu(*halves)
        output[token] += float(weights[token, slot]) * (w2[expert] @ y.float())
    return output.bfloat16()


def distance(peer: Any) -> float:
    """Relative L2 distance of a peer's output from ours."""
    layer = host_layer("bf16")
    hidden, (ids, weights) = layer.make_hidden(37, seed=2), routing(37)
    ours = layer.call(hidden, ids, weights)()
    theirs = peer(layer).prepare(hidden, ids, weights)()
    assert theirs.dtype == torch.bfloat16
    return compare(theirs.float().numpy(), ours.float().numpy()).rel_l2


def test_torch_on_dequantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_grouped, "weighted_sum", weighted_sum)
    assert distance(TorchBf16) < LARGEST_REL_L2["bf16"] / 2


@pytest.mark.parametrize(
    ("peer", "modules"),
    [
        (HummingMxfp4Indexed, ["humming"]),
        (Marlin, HOMES),
        (FlashInferMxfp4, ["flashinfer.fused_moe"]),
    ],
)
def test_installed_peers_that_cannot_be_imported(
    peer: Any, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "version", lambda package: "1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for each in modules:
        monkeypatch.setitem(sys.modules, each, None)
    name = modules[0].partition(".")[0]
    assert re.match(rf"{name}[-\w]* cannot be imported: \w*Error: ", peer.missing())


# --- Humming --------------------------------------------------------------------------------------


def simulate_humming(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Humming 0.1.20, as far as it is called; returns the kinds of GEMM that ran."""
    kinds: list[str] = []

    def schema(*, b_dtype: str, bs_dtype: str, weight_scale_group_size: int) -> SimpleNamespace:
        assert (b_dtype, bs_dtype, weight_scale_group_size) == ("float4e2m1", "float8e8m0", 32)
        return SimpleNamespace(b_dtype=SimpleNamespace(num_bits=4))

    def transform(tensors: Any, **options: Any) -> Any:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        shape = options["num_experts"], options["shape_n"]
        assert weight.dtype == torch.int32
        assert tuple(weight.shape) == (*shape, options["shape_k"] // 8)
        assert scale.dtype == torch.float8_e8m0fnu
        assert tuple(scale.shape) == (*shape, options["shape_k"] // 32)
        assert options["torch_dtype"] == torch.bfloat16
        assert options["input_schema"] is None
        return SimpleNamespace(), {"weight": weight, "weight_scale": scale}

    def tuning(config: Any, *, shape_m: int, gemm_type: str) -> dict[str, Any]:
        assert shape_m == 2 * 37
        return {"block_shape": (BLOCK, 128, 64), "kind": gemm_type}

    def forward(
        config: Any, *, inputs: Any, weight: Any, weight_scale: Any, locks: Any, **options: Any
    ) -> Any:
        kind = options["compute_config"]["gemm_type"]
        assert options["tuning_config"]["kind"] == kind
        assert options["input_scale"] is None
        kinds.append(kind)
        w = values(weight, weight_scale)
        if kind == "grouped_contiguous":
            edges = options["expert_layout"].tolist()
            assert edges[-1] == len(inputs)
            blocks = [
                (torch.arange(first, end), expert)
                for expert, (first, end) in enumerate(pairwise(edges))
            ]
            source, num_rows = inputs, len(inputs)
        else:
            top_k, num_rows = options["top_k"], len(inputs) * options["top_k"]
            rows = options["sorted_ids"].reshape(-1, BLOCK)
            assert int(options["num_tokens_padded"]) == rows.numel()
            blocks = [
                (block[block < num_rows].long(), expert)
                for block, expert in zip(rows, options["expert_ids"].tolist(), strict=True)
            ]
            source = inputs.repeat_interleave(top_k, 0)
        output = torch.full((num_rows, w.shape[1]), torch.nan)
        for chosen, expert in blocks:
            output[chosen] = source[chosen].float() @ w[expert].T
        return output.bfloat16()

    def process(config: Any, rows: Any, **options: Any) -> Any:
        assert options["activation_impl"] == SWIGLU == "a * b / (1.0f + __expf(-b))"
        assert options["activation_type"] == "binary_split"
        return swiglu(*rows.chunk(2, dim=1)), None, None

    module(monkeypatch, "humming.schema", HummingWeightSchema=schema, HummingInputSchema=None)
    module(monkeypatch, "humming.transform", prepare_and_transform_humming_tensors=transform)
    module(monkeypatch, "humming.tune", get_heuristics_config=tuning)
    module(monkeypatch, "humming.forward", humming_forward=forward, may_process_input=process)
    monkeypatch.setattr(humming, "weighted_sum", weighted_sum)
    return kinds


@pytest.mark.parametrize(
    ("peer", "kind"),
    [(HummingMxfp4Indexed, "indexed"), (HummingMxfp4Grouped, "grouped_contiguous")],
)
def test_humming(peer: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = simulate_humming(monkeypatch)
    assert distance(peer) < LARGEST_REL_L2["bf16"] / 2
    assert kinds == [kind, kind]


# --- whole layers of others -----------------------------------------------------------------------


def test_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FC1 is ``[up; gate]``; both helpers only change the order of bytes."""

    def fused(x: Any, ids: Any, weights: Any, w1: Any, w2: Any, dtype: Any, **options: Any) -> None:
        assert options["use_w4_group_scaling"] is True
        assert (options["ep_size"], options["ep_rank"], dtype) == (1, 0, torch.bfloat16)
        s1, s2 = options["quant_scales"]
        assert s1.dtype == torch.int32
        matrices = values(w1, s1), values(w2, s2)
        result = layer_of_slots(x, *matrices, ids, weights, gate_first=False)
        options["output"].copy_(result)

    @contextmanager
    def autotune(_: bool) -> Any:
        yield

    module(
        monkeypatch,
        "flashinfer.fused_moe",
        cutlass_fused_moe=fused,
        interleave_moe_weights_for_sm90_mixed_gemm=lambda weights, kind: weights,
        interleave_moe_scales_for_sm90_mixed_gemm=lambda scales: scales,
    )
    module(monkeypatch, "flashinfer", autotune=autotune)
    assert distance(FlashInferMxfp4) < LARGEST_REL_L2["bf16"] / 2


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("has_gating_output", [False, True])
def test_marlin(home: str, has_gating_output: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FC1 is ``[gate; up]``; matrices are transposed, the helpers only change the order."""

    def repack(*, b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int) -> Any:
        assert tuple(b_q_weight.shape) == (size_k // 8, size_n)
        assert (b_q_weight.dtype, perm.numel(), num_bits) == (torch.int32, 0, 4)
        return b_q_weight

    def permute(*, s: Any, size_k: int, size_n: int, group_size: int) -> Any:
        assert tuple(s.shape) == (size_k // group_size, size_n)
        return s

    def fused(
        hidden_states: Any,
        w1: Any,
        w2: Any,
        bias1: None,
        bias2: None,
        w1_scale: Any,
        w2_scale: Any,
        topk_weights: Any,
        topk_ids: Any,
        quant_type_id: int,
        activation: str = "silu",
    ) -> Any:
        assert quant_type_id == 77
        matrices = (
            values(w.transpose(1, 2), s.transpose(1, 2))
            for w, s in ((w1, w1_scale), (w2, w2_scale))
        )
        return layer_of_slots(hidden_states, *matrices, topk_ids, topk_weights, gate_first=True)

    def fused_with_gating_output(gating_output: None, **arguments: Any) -> Any:
        return fused(**arguments)

    function = fused_with_gating_output if has_gating_output else fused
    module(monkeypatch, home, fused_marlin_moe=function)
    module(monkeypatch, f"{UTILITIES}.marlin_utils", marlin_permute_scales=permute)
    process = SimpleNamespace(mxfp4_marlin_process_scales=lambda s: s.to(torch.float8_e8m0fnu))
    module(monkeypatch, f"{UTILITIES}.marlin_utils_fp4", **vars(process))
    module(monkeypatch, "vllm._custom_ops", gptq_marlin_repack=repack)
    scalar_types = SimpleNamespace(float4_e2m1f=SimpleNamespace(id=77))
    module(monkeypatch, "vllm.scalar_type", scalar_types=scalar_types)
    assert distance(Marlin) < LARGEST_REL_L2["bf16"] / 2
