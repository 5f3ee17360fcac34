"""Packed routing words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe import formats, weights
from cupy_moe.runtime.arrays import describe
from tests.array_kinds import ARRAY_KINDS, ArrayKind

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(
    ("expert", "weight", "word"),
    [
        (3, 1.0, 0x00033F80),
        (3, -1.0, 0x0003BF80),  # the sign bit stays in the low half
        (0, -0.0, 0x00008000),
        (5, 1 / 3, 0x00053EAB),
        (5, 0.99999, 0x00053F80),
        (7, np.nan, 0x00077FC0),
        (7, -np.inf, 0x0007FF80),
        (-1, 0.5, 0xFFFF3F00),
        (-1, -0.5, 0xFFFFBF00),
        (32767, 0.5, 0x7FFF3F00),
        (32768, 0.5, 0xFFFF3F00),  # does not fit int16: an unused slot, not another expert
        (65539, 0.5, 0xFFFF3F00),
        (-65533, 0.5, 0xFFFF3F00),
    ],
)
def test_packed_words(kind: ArrayKind, expert: int, weight: float, word: int) -> None:
    ids, values = np.int32([[expert]]), np.float32([[weight]])
    packed = weights.pack_topk_ids(kind.make(ids), kind.make(values))
    on_host = kind.host(packed)
    assert on_host.dtype == np.int32
    assert on_host.view(np.uint32)[0, 0] == word
    unpacked, bf16 = (kind.host(part) for part in weights.unpack_topk_ids(packed))
    assert unpacked.dtype == np.int32
    assert unpacked[0, 0] == (expert if -(2**15) <= expert < 2**15 else -1)
    assert bf16.dtype == ml_dtypes.bfloat16
    assert bf16.view(np.uint16)[0, 0] == word & 0xFFFF


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64, np.int16], ids=lambda d: d.__name__)
def test_packing_matches_golden_words(kind: ArrayKind, id_dtype: Any) -> None:
    golden = np.load(DATA / "fp8_moe.npz")
    names = [case["name"] for case in json.loads(str(golden["cases"]))["cases"]]
    packed_cases = [name for name in names if f"{name}/topk_packed_i32" in golden.files]
    assert packed_cases
    for name in packed_cases:
        words = golden[f"{name}/topk_packed_i32"]
        bits = golden[f"{name}/weights_bf16_u16"]
        ids = golden[f"{name}/ids_i32"].astype(id_dtype)
        packed = weights.pack_topk_ids(kind.make(ids), kind.make(bits.view(ml_dtypes.bfloat16)))
        np.testing.assert_array_equal(kind.host(packed), words)
        unpacked, bf16 = weights.unpack_topk_ids(kind.make(words))
        np.testing.assert_array_equal(kind.host(unpacked), ids)
        np.testing.assert_array_equal(kind.host(bf16).view(np.uint16), bits)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_transposed_arguments_become_contiguous(kind: ArrayKind) -> None:
    """The operations refuse arrays with gaps or in another order."""
    ids, values = np.arange(6, dtype=np.int32).reshape(3, 2), np.full((3, 2), 0.5, np.float32)
    packed = weights.pack_topk_ids(kind.make(ids).T, kind.make(values).T)
    assert describe(packed).is_contiguous
    np.testing.assert_array_equal(kind.host(packed) >> 16, ids.T)
    for part in weights.unpack_topk_ids(kind.make(kind.host(packed).T.copy()).T):
        assert describe(part).is_contiguous
        assert tuple(part.shape) == ids.T.shape


def test_every_bf16_weight_survives_packing() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[None]
    for expert in (-1, 0, 200):
        ids = np.full(bits.shape, expert, np.int32)
        packed = weights.pack_topk_ids(ids, bits.view(ml_dtypes.bfloat16))
        unpacked, bf16 = weights.unpack_topk_ids(packed)
        np.testing.assert_array_equal(unpacked, ids)
        number = ~np.isnan(bf16.astype(np.float32))
        np.testing.assert_array_equal(bf16.view(np.uint16)[number], bits[number])
        assert np.isnan(formats.decode_bf16(bits[~number])).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: weights.pack_topk_ids(np.zeros((2, 3)), np.zeros((2, 3))),
            TypeError,
            "topk_ids must be integers, got float64",
        ),
        (
            lambda: weights.pack_topk_ids(np.zeros((2, 3), np.int32), np.zeros((3, 2), np.float32)),
            ValueError,
            r"got \(2, 3\) and \(3, 2\)",
        ),
        (
            lambda: weights.pack_topk_ids(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32)),
            TypeError,
            "topk_weights must be bfloat16 or float32, .*got int32",
        ),
        (
            lambda: weights.unpack_topk_ids(np.zeros((2, 3), np.int64)),
            TypeError,
            "int32, got int64",
        ),
        (lambda: weights.pack_topk_ids([1], [1.0]), TypeError, "topk_ids: expected an array"),
    ],
)
def test_bad_routing_arguments_are_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
