"""Random FP4 layers as the keyword arguments of the operations, whole or in two partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_moe.fused_moe import MoePartitionResources
from cupy_moe.testing.inputs import make_topk
from cupy_moe.types import ActivationType, WeightLayout
from cupy_moe.weights import (
    prepared_weight_layouts,
    quantize_activations_mxfp8,
    quantize_activations_nvfp4,
    shard_prepared_moe_weights,
)

__all__ = ["HOST_RESOURCES", "Fp4Sizes", "fp4_layer", "fp4_tokens", "partition_weights"]

HOST_RESOURCES = MoePartitionResources((None, None))


@dataclass(frozen=True)
class Fp4Sizes:
    """Sizes of a layer and its routing."""

    tokens: int
    hidden: int = 256
    inter: int = 256
    experts: int = 6
    top_k: int = 2
    local: tuple[int, int] | None = None
    pattern: str = "uniform"
    activation: ActivationType = ActivationType.Swiglu
    block_bytes: int = 0  # of BlockMajorK
    weights_dtype: str = "float32"

    @property
    def weight_layout(self) -> int:
        """Number that the operations take."""
        return int(WeightLayout.BlockMajorK if self.block_bytes else WeightLayout.MajorK)

    def __str__(self) -> str:
        """As a test's name."""
        words = [f"T{self.tokens}-H{self.hidden}-I{self.inter}-E{self.experts}-K{self.top_k}"]
        words += [self.pattern, self.activation.name, f"B{self.block_bytes}"]
        return "-".join(words + ([] if self.local is None else [f"local{self.local}"]))


def fp4_layer(
    mode: str, form: str, sizes: Fp4Sizes, *, seed: int = 0, xp: Any = np, **options: Any
) -> dict[str, Any]:
    """Keyword arguments of the operation of a form, with arrays of NumPy or CuPy.

    Prepared weights are random bytes: every order of them is the preparation of some weights.
    """
    rng = xp.random.default_rng(seed)
    offset, count = sizes.local or (0, sizes.experts)
    hidden, scales = fp4_tokens(mode, sizes.tokens, sizes.hidden, rng, xp)
    w1, s1 = _matrix(mode, sizes, (count, 2 * sizes.inter, sizes.hidden), rng, xp)
    w2, s2 = _matrix(mode, sizes, (count, sizes.hidden, sizes.inter), rng, xp)
    ids, weights = make_topk(
        sizes.tokens,
        sizes.top_k,
        sizes.experts,
        pattern=sizes.pattern,
        dtype=sizes.weights_dtype,
        seed=seed,
    )
    is_nvfp4 = mode == "nvfp4"
    gains = xp.asarray(2.0 ** (np.arange(count) % 4), dtype=np.float32)  # different in each expert
    arguments = {
        "hidden_states": hidden,
        "hidden_states_scale": scales,
        "gemm1_weights": w1,
        "gemm1_weights_scale": s1,
        "gemm2_weights": w2,
        "gemm2_weights_scale": s2,
        "output1_scale_scalar": gains * 8 if is_nvfp4 else xp.ones(count, np.float32),
        "output1_scale_gate_scalar": 0.25 / gains if is_nvfp4 else xp.ones(count, np.float32),
        "output2_scale_scalar": 0.5 / gains if is_nvfp4 else xp.ones(count, np.float32),
        "routing_logits": None,
        "routing_bias": None,
        "topk_ids": xp.asarray(ids),
        "topk_weights": xp.asarray(weights.view(np.uint16)).view(weights.dtype)
        if weights.itemsize == 2
        else xp.asarray(weights),
        "num_experts": sizes.experts,
        "top_k": sizes.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": sizes.inter,
        "local_expert_offset": offset,
        "local_num_experts": count,
        "routed_scaling_factor": None,
        "activation_type": int(sizes.activation),
        "weight_layout": sizes.weight_layout,
    }
    if form == "whole":
        absent = ("gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
        return dict.fromkeys(absent) | arguments | {"routing_input_mode": 2} | options
    shards = partition_weights(mode, form, sizes, arguments)
    return arguments | shards | {"partition_resources": HOST_RESOURCES} | options


def fp4_tokens(mode: str, tokens: int, hidden: int, rng: Any, xp: Any) -> tuple[Any, Any]:
    """Make standard normal hidden states of a mode and their scales, NumPy or CuPy."""
    x = rng.standard_normal((tokens, hidden), dtype=np.float32)
    if mode == "mxfp8":
        return quantize_activations_mxfp8(x)
    if mode == "nvfp4":
        return quantize_activations_nvfp4(x, xp.float32(1.0))[:2]
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded.view(ml_dtypes.bfloat16), None


def _matrix(
    mode: str, sizes: Fp4Sizes, shape: tuple[int, int, int], rng: Any, xp: Any
) -> tuple[Any, Any]:
    """Random codes, and scales around what keeps the variance of a unit vector."""
    experts, rows, k = shape
    block = 16 if mode == "nvfp4" else 32
    size = -np.log2(np.sqrt(k) * 2.5)
    scales = rng.integers(-1, 2, (experts, rows, k // block)) + int(np.round(size))
    if mode == "nvfp4":
        codes = rng.integers(0, 8, scales.shape) + 8 * (scales + 7)  # normal E4M3 ones
        codes = xp.clip(codes, 1, 0x7E)
    else:
        codes = scales + 127
    packed = rng.integers(0, 256, (experts, rows, k // 2), dtype=np.uint8)
    if sizes.block_bytes:
        packed = packed.reshape(experts, k // 2 // sizes.block_bytes, rows, sizes.block_bytes)
    return packed, codes.astype(np.uint8)


def partition_weights(
    mode: str, strategy: str, sizes: Fp4Sizes, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Cut the weights of a whole layer: arguments of the partitioned one that differ."""
    block = sizes.block_bytes or None
    fc1, fc2 = prepared_weight_layouts(
        weight_dtype="uint8",
        weight_layout=sizes.weight_layout,
        use_shuffled_weight=True,
        scale_k_group_size=16 if mode == "nvfp4" else 32,
        fc1_block_major_k_bytes=block,
        fc2_block_major_k_bytes=block,
    )
    cut = shard_prepared_moe_weights(
        arguments["gemm1_weights"],
        arguments["gemm2_weights"],
        strategy=strategy,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inter,
        fc1_layout=fc1,
        fc2_layout=fc2,
        fc1_scale=arguments["gemm1_weights_scale"],
        fc2_scale=arguments["gemm2_weights_scale"],
    )
    return {
        "gemm1_weights": cut.fc1,
        "gemm2_weights": cut.fc2,
        "gemm1_weights_scale": cut.fc1_scale,
        "gemm2_weights_scale": cut.fc2_scale,
        "partition_strategy": strategy,
    }
