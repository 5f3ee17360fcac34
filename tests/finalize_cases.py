"""Seeded calls of the tensor-parallel finalize on simulated ranks, and what they must give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from cupy_moe.codecs import encode_bf16
from cupy_moe.comm.rules import NormOptions
from cupy_moe.reference.finalize import finalize_terms, reduce_rows
from cupy_moe.testing.compare import FINALIZE, assert_within, compare, finalize_element_bound

BF16 = ml_dtypes.bfloat16
NAN = 0x7FC1
# Around the sentinel of two -0.0: subnormals that a flush makes zero, and zeros of either sign.
TRICKY_WORDS = (0x8000, 0x8001, 0x807F, 0x0000)
INVALID = (-1, 2**31 - 1, -(2**31))
DATA = Path(__file__).parent / "data"


@dataclass(eq=False)
class FinalizeCase:
    """Arguments of one call on every rank, BF16 as bits, and its expected output."""

    gemm2: list[np.ndarray]
    index: list[np.ndarray]
    weights: np.ndarray  # float32 or bfloat16
    norm_weight: np.ndarray
    options: NormOptions

    @property
    def num_ranks(self) -> int:
        return len(self.gemm2)

    @property
    def num_tokens(self) -> int:
        return len(self.weights)

    @property
    def hidden_size(self) -> int:
        return len(self.norm_weight)

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]

    def terms(self) -> np.ndarray:
        rows = reduce_rows(self.gemm2, self.index, self.hidden_size)
        o = self.options
        return finalize_terms(
            rows,
            self.weights.astype(np.float32),
            self.norm_weight,
            eps=o.eps,
            gain_center=o.gain_center,
            weight_before_norm=o.weight_before_norm,
        )

    def check(self, out: np.ndarray) -> None:
        """Compare the BF16 bits of an output with the reference."""
        terms = self.terms()
        expected = encode_bf16(terms.sum(axis=1, initial=0.0).astype(np.float32)).view(BF16)
        size = encode_bf16(np.abs(terms).sum(axis=1).astype(np.float32)).view(BF16)
        bound = finalize_element_bound(expected, size)
        assert_within(compare(out.view(BF16), expected, element_bound=bound), FINALIZE)

    def arguments(self, rank: int) -> tuple[np.ndarray, ...]:
        """gemm2, weights, index, norm_weight of a rank as typed NumPy arrays."""
        norm_weight = self.norm_weight.view(BF16)
        return self.gemm2[rank].view(BF16), self.weights, self.index[rank], norm_weight


def make_case(
    num_ranks: int,
    num_tokens: int,
    *,
    hidden_size: int = 264,
    top_k: int = 8,
    seed: int = 0,
    weights: type = np.float32,
    before: bool = False,
) -> FinalizeCase:
    """Random rows with -0.0 and subnormals among them, a NaN row nobody names, invalid slots."""
    rng = np.random.default_rng(seed)
    num_rows = num_tokens * top_k + 3
    gemm2, index = [], []
    for rank in range(num_ranks):
        rows = encode_bf16(rng.standard_normal((num_rows + rank, hidden_size), np.float32))
        tricky = rng.random(rows.shape) < 0.05
        rows[tricky] = rng.choice(np.array(TRICKY_WORDS, np.uint16), tricky.sum())
        rows[-1] = NAN
        idx = rng.permutation(num_rows - 1)[: num_tokens * top_k].astype(np.int32)
        invalid = rng.random(idx.shape) < 0.1
        idx[invalid] = rng.choice(np.array([*INVALID, len(rows)], np.int64), invalid.sum())
        gemm2.append(rows)
        index.append(idx.reshape(num_tokens, top_k))
    return FinalizeCase(
        gemm2,
        index,
        rng.random((num_tokens, top_k), np.float32).astype(weights),
        encode_bf16((1 + 0.1 * rng.standard_normal(hidden_size)).astype(np.float32)),
        NormOptions(1e-6, 0.25, before),
    )


def tricky_case(num_ranks: int, shift: int, hidden_size: int = 256) -> FinalizeCase:
    """Rows of all pairings of tricky words, low against high half, shifted from call to call."""
    case = make_case(num_ranks, 2, hidden_size=hidden_size, top_k=4)
    words = np.array(TRICKY_WORDS, np.uint16)
    for rank, rows in enumerate(case.gemm2):
        column = np.arange(hidden_size) + 2 * (rank + shift)
        pairs = np.where(column % 2, words[column // 2 % 4], words[column // 8 % 4])
        rows[:] = np.stack([np.roll(pairs, 2 * row) for row in range(len(rows))])
    case.index = [np.arange(8, dtype=np.int32).reshape(2, 4) for _ in case.index]
    return case


@cache
def golden_case(num_ranks: int, name: str) -> FinalizeCase:
    """A golden vector; hidden size 4096, top-8, six tokens."""
    with np.load(DATA / f"finalize_rmsnorm_p{num_ranks}.npz") as file:
        arrays = dict(file)
    (spec,) = (c for c in json.loads(str(arrays["cases"]))["cases"] if c["name"] == name)
    bits = arrays.get(f"{name}/weights_bf16_u16")
    return FinalizeCase(
        [arrays[f"gemm2_rank{rank}_bf16_u16"] for rank in range(num_ranks)],
        list(arrays[f"{name}/idx_i32"]),
        arrays[f"{name}/weights_f32"] if bits is None else bits.view(BF16),
        arrays[f"norm_weight_{spec['norm_weight']}_bf16_u16"],
        NormOptions(spec["eps"], spec["gain_center"], spec["weight_before_norm"]),
    )


def assert_all_equal(outputs: Sequence[np.ndarray]) -> None:
    """Every rank and repetition must give the same bits."""
    for out in outputs[1:]:
        np.testing.assert_array_equal(out, outputs[0])
