"""Routing: expert selection from router logits, packed routing words, the expert permutation.

All arithmetic is FP32, as in the kernels; BF16 logits enter widened. Keys are compared by the total
order of their bits, so -0.0 sorts below +0.0 and a NaN logit still yields ids in range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupy_moe.codecs import decode_bf16, round_bf16
from cupy_moe.types import RoutingMethodType

__all__ = [
    "Permutation",
    "Segment",
    "build_permutation",
    "decode_packed",
    "select_experts",
    "sigmoid",
]

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]

_DENOMINATOR_FLOOR = np.float32(1e-20)


# --- selection ------------------------------------------------------------------------------------


def sigmoid(x: F32) -> F32:
    """Logistic function as ``0.5 * tanh(0.5 * x) + 0.5`` in FP32, the form that decides ties.

    Exactly 1 for large ``x`` and exactly 0 for very negative ``x``; ``1 / (1 + exp(-x))`` differs
    by more than 1e-3 (relative) below -10.

    Parameters
    ----------
    x : numpy.ndarray, float32

    Returns
    -------
    numpy.ndarray, same shape, float32
    """
    half = np.float32(0.5)
    # NOTE: NumPy's FP32 tanh with AVX-512 is off by whole steps where it saturates (-8.5, -9.5).
    tanh = np.tanh(half * x, dtype=np.float64).astype(np.float32)
    score: F32 = half * tanh + half
    return score


def _softmax(x: F32) -> F32:
    exp: F32 = np.exp(x - x.max(axis=-1, keepdims=True))
    result: F32 = exp / exp.sum(axis=-1, keepdims=True)
    return result


def _unchanged(x: F32) -> F32:
    return x


def _renormalize(score: F32) -> F32:
    total = score.sum(axis=-1, keepdims=True)
    result: F32 = score / np.maximum(total, _DENOMINATOR_FLOOR)
    return result


class _Rule(NamedTuple):
    """Experts are selected by ``score(logits)``; ``weight`` maps the selected scores to weights."""

    score: Callable[[F32], F32]
    weight: Callable[[F32], F32]


_RULES = {
    RoutingMethodType.Default: _Rule(_softmax, _unchanged),
    RoutingMethodType.Renormalize: _Rule(_unchanged, _softmax),
    RoutingMethodType.Llama4: _Rule(_unchanged, sigmoid),
    RoutingMethodType.RenormalizeNaive: _Rule(_unchanged, _softmax),
    RoutingMethodType.TopK: _Rule(_unchanged, _unchanged),
    RoutingMethodType.SigmoidRenorm: _Rule(sigmoid, _renormalize),
    RoutingMethodType.Sigmoid: _Rule(sigmoid, _unchanged),
    RoutingMethodType.TopKSigmoid: _Rule(_unchanged, sigmoid),
}
_BIASED = (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2)


@np.errstate(all="ignore")
def select_experts(
    logits: F32,
    bias: F32 | None,
    *,
    method: RoutingMethodType,
    top_k: int,
    n_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float | None = None,
    norm_topk_prob: bool = True,
) -> tuple[I32, F32]:
    """Select ``top_k`` experts per token and compute their routing weights.

    Ties go to the smaller expert id. Only DeepSeekV3 and MiniMax2 look at the bias and the scaling
    factor, only DeepSeekV3 at the groups, only SigmoidRenorm at ``norm_topk_prob``.

    Parameters
    ----------
    logits : numpy.ndarray, shape (T, E), float32
        Router logits; BF16 logits widened.
    bias : numpy.ndarray, shape (E,), float32, or None
        Added to the sigmoid for the selection, never part of a weight; a BF16 bias widened. None
        is zeros. Rounded to BF16 when groups are used.
    method : RoutingMethodType
    top_k : int
        1 <= top_k <= E.
    n_group, topk_group : int, optional
        Number of contiguous expert groups and how many of them stay; None, 0 or 1 is ungrouped.
    routed_scaling_factor : float, optional
        None is 1.
    norm_topk_prob : bool

    Returns
    -------
    ids : numpy.ndarray, shape (T, top_k), int32
        By decreasing key, ties by increasing id.
    weights : numpy.ndarray, shape (T, top_k), float32
        Rounded to BF16.

    Raises
    ------
    ValueError
        No routing rule belongs to ``method``.
    """
    if method in _BIASED:
        factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
        if method == RoutingMethodType.MiniMax2:
            n_group = None
        ids, weights = _select_biased(logits, bias, top_k, n_group, topk_group, factor)
    else:
        rule = _rule(method, norm_topk_prob)
        score = rule.score(logits)
        ids = _top_k(score, top_k)
        weights = rule.weight(np.take_along_axis(score, ids, axis=1))
    return ids.astype(np.int32), round_bf16(weights)


def _rule(method: RoutingMethodType, norm_topk_prob: bool) -> _Rule:
    if method == RoutingMethodType.SigmoidRenorm and not norm_topk_prob:
        method = RoutingMethodType.Sigmoid
    if method not in _RULES:
        known = ", ".join(m.name for m in sorted((*_RULES, *_BIASED)))
        raise ValueError(f"select_experts: method must be one of {known}, got {method!r}.")
    return _RULES[method]


def _top_k(keys: F32, k: int) -> NDArray[np.intp]:
    """Return the places of the ``k`` largest keys per row, in descending order; ties ascending."""
    bits = np.ascontiguousarray(keys).view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the floats' total order
    return np.argsort(-ordered, axis=-1, kind="stable")[:, :k]


def _select_biased(
    logits: F32,
    bias: F32 | None,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    factor: float,
) -> tuple[NDArray[np.intp], F32]:
    """Select by sigmoid + bias; the weights are the sigmoids alone, renormalized and scaled."""
    score = sigmoid(logits)
    bias = np.zeros(logits.shape[1], np.float32) if bias is None else bias
    if (n_group or 1) > 1:
        keys = _limit_to_groups(score + round_bf16(bias), n_group or 1, topk_group or 1)
    else:
        keys = score + bias
    ids = _top_k(keys, top_k)
    selected = np.take_along_axis(score, ids, axis=1)
    total = selected.sum(axis=-1, keepdims=True) + _DENOMINATOR_FLOOR
    return ids, selected * np.float32(factor) / total


def _limit_to_groups(keys: F32, n_group: int, topk_group: int) -> F32:
    """Put -inf outside the ``topk_group`` groups whose two largest keys have the largest sums."""
    grouped = keys.reshape(keys.shape[0], n_group, keys.shape[1] // n_group)
    group_scores = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    kept = np.zeros(group_scores.shape, bool)
    np.put_along_axis(kept, _top_k(group_scores, topk_group), True, axis=1)
    return np.where(kept[..., None], grouped, np.float32(-np.inf)).reshape(keys.shape)


# --- pre-computed routing -------------------------------------------------------------------------


def decode_packed(packed: I32) -> tuple[I32, F32]:
    """Split packed routing words: expert id in the high half (signed), BF16 weight in the low half.

    Parameters
    ----------
    packed : numpy.ndarray, shape (T, K), int32

    Returns
    -------
    ids : numpy.ndarray, shape (T, K), int32
    weights : numpy.ndarray, shape (T, K), float32
    """
    weights: F32 = decode_bf16((packed & 0xFFFF).astype(np.uint16))
    return packed >> 16, weights


# --- permutation ----------------------------------------------------------------------------------


class Segment(NamedTuple):
    """The rows of one local expert in permuted order."""

    expert: int  # local id
    rows: slice  # permuted rows, padding excluded
    slots: NDArray[np.intp]  # expanded index (token * top_k + slot) of each row, increasing


@dataclass(frozen=True, eq=False)
class Permutation:
    """Expert-sorted, tile-padded order of the live slots.

    Experts ascend by local id; each segment starts at a multiple of the tile and is padded up to
    one; experts without tokens take no space. Inside a segment the expanded index increases.

    Attributes
    ----------
    expanded_to_permuted : numpy.ndarray, shape (T * K,), int32
        Row of each slot, -1 where the slot is not live.
    counts : numpy.ndarray, shape (local_num_experts,), int32
    num_padded_rows : int
        End of the last segment.
    tile : int
    top_k : int
        Slots per token.
    """

    expanded_to_permuted: I32
    counts: I32
    num_padded_rows: int
    tile: int
    top_k: int

    @property
    def capacity(self) -> int:
        """Rows that suffice for every routing of as many slots to as many experts.

        Worst case: as many experts as possible hold one slot each, the rest fill whole tiles.
        """
        slots = self.expanded_to_permuted.size
        started = min(slots, self.counts.size)
        return (started + (slots - started) // self.tile) * self.tile

    @cached_property
    def offsets(self) -> I32:
        """First row of each expert's segment, and the end; shape (local_num_experts + 1,)."""
        return _exclusive_sum(-(-self.counts // self.tile) * self.tile)

    @cached_property
    def permuted_to_expanded(self) -> I32:
        """Slot of each row, shape (num_padded_rows,); -1 in padding rows."""
        slots = np.full(self.num_padded_rows, -1, np.int32)
        live = np.flatnonzero(self.expanded_to_permuted >= 0)
        slots[self.expanded_to_permuted[live]] = live
        return slots

    def segments(self) -> Iterator[Segment]:
        """Experts that have tokens, ascending."""
        for expert in np.flatnonzero(self.counts):
            start = int(self.offsets[expert])
            rows = slice(start, start + int(self.counts[expert]))
            yield Segment(int(expert), rows, self.permuted_to_expanded[rows].astype(np.intp))


def _exclusive_sum(x: I32) -> I32:
    return np.concatenate([[0], np.cumsum(x)]).astype(np.int32)


def build_permutation(
    ids: I32, *, num_experts: int, local_expert_offset: int, local_num_experts: int, tile: int
) -> Permutation:
    """Order the live slots by (local expert, expanded index).

    A slot is live iff its expert exists and is local; negative ids and ids >= ``num_experts`` are
    not. Every live slot counts on its own, also where a token names an expert twice.

    Parameters
    ----------
    ids : numpy.ndarray, shape (T, K), int32
        Global expert ids.
    num_experts, local_expert_offset, local_num_experts : int
    tile : int
        Rows a segment is padded to a multiple of.

    Returns
    -------
    Permutation
    """
    flat = ids.reshape(-1)
    end = min(local_expert_offset + local_num_experts, num_experts)
    slots = np.flatnonzero((flat >= local_expert_offset) & (flat < end))
    experts = flat[slots] - local_expert_offset
    order = np.argsort(experts, kind="stable")
    slots, experts = slots[order], experts[order]

    counts = np.bincount(experts, minlength=local_num_experts).astype(np.int32)
    offsets = _exclusive_sum(-(-counts // tile) * tile)
    position = np.arange(slots.size) - _exclusive_sum(counts)[experts]
    expanded_to_permuted = np.full(flat.size, -1, np.int32)
    expanded_to_permuted[slots] = offsets[experts] + position
    return Permutation(expanded_to_permuted, counts, int(offsets[-1]), tile, ids.shape[1])
