"""Enumerations shared by the public operations, the reference and the kernels.

Enumerators travel to the CUDA sources by name (``cuda_src/common/types.cuh``), so a drift between
the two is a compile error, never a wrong number.
"""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    "ActivationType",
    "MoeFormat",
    "RoutingInputMode",
    "RoutingMethodType",
    "WeightLayout",
]


class RoutingMethodType(IntEnum):
    """How router logits become expert ids and weights; integer values are the public contract's."""

    Default = 0  # softmax over all experts, then top-k
    Renormalize = 1  # top-k of the logits, softmax over the selected
    DeepSeekV3 = 2  # sigmoid + bias, group-limited top-k
    Llama4 = 3  # top-1 of the logits, sigmoid weight
    RenormalizeNaive = 4  # equal to Renormalize
    TopK = 5  # top-k of the logits, raw logits as weights
    SigmoidRenorm = 6  # top-k of sigmoids, normalized over the selected
    MiniMax2 = 7  # sigmoid + bias, normalized over the selected
    Sigmoid = 8  # top-k of sigmoids, sigmoid weights
    TopKSigmoid = 9  # top-k of the logits, sigmoid weights
    Unspecified = 10


class RoutingInputMode(IntEnum):
    """Where the unpartitioned FP4 operation takes expert ids and weights from."""

    FromLogits = 0  # routing_logits
    PackedPrecomputed = 1  # topk_ids, words of id and BF16 weight
    UnpackedPrecomputed = 2  # topk_ids and topk_weights


class ActivationType(IntEnum):
    """FC1 activation; integer values are the public contract's."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11
    ClampedRelu2 = 12
    PowLU = 13

    @property
    def is_gated(self) -> bool:
        """Whether FC1 has an up half and a gate half (2 * intermediate_size rows)."""
        return self in _GATED


_GATED = frozenset(
    {
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.SwigluBias,
        ActivationType.SwigluStep,
        ActivationType.GegluTanh,
        ActivationType.Situ,
        ActivationType.PowLU,
    }
)


class WeightLayout(IntEnum):
    """Storage order of prepared weights."""

    MajorK = 0  # (E, M, K bytes), K contiguous
    MajorMn = 1  # never supported
    BlockMajorK = 2  # (E, K bytes / block, M, block)


class MoeFormat(Enum):
    """What hidden states, weights and the FC1 output of a layer are."""

    Fp8 = "fp8"  # E4M3 throughout, scales per tensor
    Nvfp4 = "nvfp4"  # E2M1 throughout, an E4M3 scale per 16
    Mxfp8 = "mxfp8"  # E4M3 and E2M1 weights, a UE8M0 scale per 32
    Bf16 = "bf16"  # BF16 and E2M1 weights with a UE8M0 scale per 32

    @property
    def has_block_scales(self) -> bool:
        """Whether weights are E2M1 with block scales."""
        return self is not MoeFormat.Fp8

    @property
    def scale_block(self) -> int:
        """Elements of K per weight scale; 1 without block scales."""
        return {MoeFormat.Fp8: 1, MoeFormat.Nvfp4: 16}.get(self, 32)
