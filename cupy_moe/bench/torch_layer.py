"""The FP8 layer in torch, written from its definition: what our own output is held to.

It shares the weights in logical order with the peers, and no code with the operations. Experts are
dequantized one at a time, so it is meant for a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.layers import BenchLayer
from cupy_moe.bench.workloads import Ids, Workload, local_experts

__all__ = ["layer_output", "tokens_to_check"]

MOST_TOKENS = 4
E4M3_MAX = 448.0


def tokens_to_check(workload: Workload, ids: Ids) -> list[int]:
    """At most four tokens from all over the batch, of those that visit local experts.

    If no token does, of all tokens: their outputs are zero.
    """
    visitors = np.flatnonzero((ids < workload.local_num_experts).any(axis=1))
    tokens = visitors if visitors.size else np.arange(ids.shape[0])
    spread = np.linspace(0, tokens.size - 1, min(MOST_TOKENS, tokens.size)).astype(int)
    return [int(token) for token in tokens[spread]]


def layer_output(
    layer: BenchLayer,
    hidden: Any,
    ids: Ids,
    weights: NDArray[np.float32],
    tokens: Sequence[int],
) -> Any:
    """Compute with float32 sums; only the intermediate is rounded to E4M3, as in the layer.

    Parameters
    ----------
    layer : BenchLayer
    hidden : torch.Tensor (T, H), float8_e4m3fn
    ids, weights : numpy.ndarray (T, K)
    tokens : sequence of int
        Rows of these that are computed, n of them.

    Returns
    -------
    torch.Tensor (n, H), float32
    """
    import torch

    ids, weights = ids[tokens], weights[tokens]
    x = torch.stack([hidden[token].float() for token in tokens]) * layer.input_factor
    output = torch.zeros_like(x)
    for expert in local_experts(layer.workload, ids).tolist():
        token, slot = np.nonzero(ids == expert)
        rows = torch.from_numpy(token).to(x.device)
        weight = torch.from_numpy(weights[token, slot]).to(x.device)
        fc1 = x[rows] @ layer.w1[expert].float().T * layer.w1_factor[expert]
        up, gate = fc1.chunk(2, dim=1)
        activated = _round_to_e4m3(up * torch.nn.functional.silu(gate), layer.intermediate_factor)
        fc2 = activated @ layer.w2[expert].float().T * layer.w2_factor[expert]
        output.index_add_(0, rows, weight[:, None] * fc2)
    return output


def _round_to_e4m3(values: Any, factor: float) -> Any:
    """Quantize and dequantize; ``factor`` leads from codes to values."""
    import torch

    codes = (values / factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float() * factor
