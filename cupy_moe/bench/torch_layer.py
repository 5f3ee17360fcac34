"""The layer in torch, written from its definition: what our own output is held to.

It shares the weights with the peers, and no code with the operations on a GPU. Experts are
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
    """Compute with float32 sums; only the intermediate is rounded, as in the layer.

    Parameters
    ----------
    layer : BenchLayer
    hidden : torch.Tensor or tuple of them
        T hidden states of the layer.
    ids, weights : numpy.ndarray (T, K)
    tokens : sequence of int
        Rows of these that are computed, n of them.

    Returns
    -------
    torch.Tensor (n, H), float32
    """
    import torch

    ids, weights = ids[tokens], weights[tokens]
    x = layer.hidden_values(hidden, list(tokens))
    output = torch.zeros_like(x)
    for expert in local_experts(layer.workload, ids).tolist():
        w1, w2 = layer.expert_values(expert)
        token, slot = np.nonzero(ids == expert)
        rows = torch.from_numpy(token).to(x.device)
        weight = torch.from_numpy(weights[token, slot]).to(x.device)
        up, gate = (x[rows] @ w1.T).chunk(2, dim=1)
        output.index_add_(0, rows, weight[:, None] * (layer.activated(expert, up, gate) @ w2.T))
    return output
