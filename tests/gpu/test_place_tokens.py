"""The kernel that places token rows against a NumPy model: every format, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupy_moe.codecs import encode_bf16
from cupy_moe.formats import dequantize_mxfp8, dequantize_nvfp4
from cupy_moe.kernels.place_tokens import PlaceTokensConfig, bind_place_tokens
from cupy_moe.runtime.devices import compute_capability
from cupy_moe.runtime.jit import load
from cupy_moe.runtime.launch import enqueue
from cupy_moe.types import MoeFormat

pytestmark = pytest.mark.gpu

POISON = 0xAB  # of bytes; no NaN in any format
SPARE_ROWS = 5  # that no slot has, anywhere among the others
GUARD_ROWS = 2  # behind all rows
GUARD = 16  # weights behind those of the last slot
SPARE_SCALES = 3  # behind those of a token

each_format = pytest.mark.parametrize("moe_format", MoeFormat, ids=lambda f: f.name)


@dataclass(frozen=True)
class Case:
    """Token rows of any bytes, and where they go."""

    moe_format: MoeFormat
    num_tokens: int = 5
    hidden_size: int = 384
    top_k: int = 8
    dead: float = 0.3  # share of the slots without a row

    def _rng(self, purpose: int) -> np.random.Generator:
        sizes = (self.num_tokens, self.hidden_size, self.top_k)
        return np.random.default_rng((*sizes, [*MoeFormat].index(self.moe_format), purpose))

    def hidden_states(self) -> np.ndarray:
        """Every code and every BF16 pattern, as bytes (T, B)."""
        halves = {MoeFormat.Nvfp4: 1, MoeFormat.Bf16: 4}.get(self.moe_format, 2)
        shape = (self.num_tokens, self.hidden_size * halves // 2)
        return self._rng(0).integers(0, 256, shape, np.uint8)

    def scales(self) -> np.ndarray:
        """Block scales, NaN and those of the ends of the range among them, and spare ones."""
        block = {MoeFormat.Nvfp4: 16, MoeFormat.Mxfp8: 32}.get(self.moe_format)
        columns = self.hidden_size // block + SPARE_SCALES if block else 0
        return self._rng(1).integers(0, 256, (self.num_tokens, columns), np.uint8)

    def places(self) -> np.ndarray:
        """Rows of the slots (T, top_k) in any order, -1 for none."""
        rng, shape = self._rng(2), (self.num_tokens, self.top_k)
        rows = rng.permutation(self.num_rows)[: self.num_tokens * self.top_k].reshape(shape)
        return np.where(rng.random(shape) < self.dead, -1, rows).astype(np.int32)

    @property
    def num_rows(self) -> int:
        """Permuted rows without the guard."""
        return self.num_tokens * self.top_k + SPARE_ROWS


# --- expected -------------------------------------------------------------------------------------


def in_k_order(rows: np.ndarray, block: int) -> np.ndarray:
    """Rows (T, H) of BF16 in the order in which the main loop of FP4 weights walks K.

    Element (block q + 8 e + 4 h + 2 a + b) of a span of four blocks of scales, the q-th of which a
    lane q owns, in pairs h = 0, 1.
    """
    spans = rows.reshape(len(rows), -1, 4, block // 8, 2, 2, 2)  # q, e, h, a, b
    return np.ascontiguousarray(spans.transpose(0, 1, 3, 5, 6, 2, 4)).reshape(rows.shape)


def rows_as_read(case: Case) -> np.ndarray:
    """What FC1 reads of every token, as bytes (T, B)."""
    hidden, scales = case.hidden_states(), case.scales()[:, :-SPARE_SCALES]
    if case.moe_format is MoeFormat.Fp8:
        return hidden
    if case.moe_format is MoeFormat.Bf16:
        return in_k_order(hidden.view(np.uint16), 32).view(np.uint8)
    is_nvfp4 = case.moe_format is MoeFormat.Nvfp4
    with np.errstate(over="ignore"):  # which is infinity
        values = (dequantize_nvfp4 if is_nvfp4 else dequantize_mxfp8)(hidden, scales)
    return in_k_order(encode_bf16(values), 16 if is_nvfp4 else 32).view(np.uint8)


def expected(case: Case, places: np.ndarray | None) -> np.ndarray:
    """Output with its guard, poison where no row goes, as bytes."""
    rows = rows_as_read(case)
    if places is None:
        places = np.arange(case.num_tokens)[:, None]
    out = np.full((case.num_rows + GUARD_ROWS, rows.shape[1]), POISON, np.uint8)
    for token, of_slots in enumerate(places):
        out[of_slots[of_slots >= 0]] = rows[token]
    return out


def comparable(case: Case, out: np.ndarray) -> np.ndarray:
    """Output whose NaNs that a scale made are all the same one."""
    if case.moe_format not in (MoeFormat.Nvfp4, MoeFormat.Mxfp8):
        return out
    bits = out.view(np.uint16)
    return np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0x7FFF), bits)


# --- running --------------------------------------------------------------------------------------


def address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def launch(case: Case, hidden: Any, scales: Any, places: Any, out: Any, **how: Any) -> None:
    config = PlaceTokensConfig(case.moe_format)
    weights, rounded = how.pop("weights", None), how.pop("rounded", None)
    bound = bind_place_tokens(
        load(config.spec(), 0),
        config,
        num_tokens=case.num_tokens,
        hidden_states=address(hidden),
        scales=address(scales),
        expanded_to_permuted=address(places),
        output=address(out),
        topk_weights=address(weights),
        expert_weights=address(rounded),
        hidden_size=case.hidden_size,
        scale_pitch=case.scales().shape[1],
        top_k=case.top_k,
        **how,
    )
    enqueue([bound])


def assert_placed(case: Case, places: np.ndarray | None) -> None:
    """Run on a poisoned output with guard and spare rows, and compare every byte."""
    import cupy

    model = expected(case, places)
    out = cupy.full(model.shape, POISON, np.uint8)
    on_device = None if places is None else cupy.asarray(places)
    hidden, scales = cupy.asarray(case.hidden_states()), cupy.asarray(case.scales())
    stream = cupy.cuda.get_current_stream().ptr
    launch(case, hidden, scales, on_device, out, stream=stream, pdl=False)
    got = cupy.asnumpy(out)
    np.testing.assert_array_equal(comparable(case, got), comparable(case, model))


# --- rows -----------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("hidden_size", [128, 384, 1024, 4096 + 128])
@pytest.mark.parametrize("top_k", [1, 8, 22, 32, 75])
def test_rows_of_slots(moe_format: MoeFormat, hidden_size: int, top_k: int) -> None:
    for dead in (0.0, 0.3, 1.0):
        case = Case(moe_format, hidden_size=hidden_size, top_k=top_k, dead=dead)
        assert_placed(case, case.places())


@each_format
@pytest.mark.parametrize("hidden_size", [128, 384, 1024, 4096 + 128])
def test_rows_by_token(moe_format: MoeFormat, hidden_size: int) -> None:
    for top_k in (1, 22):
        assert_placed(Case(moe_format, hidden_size=hidden_size, top_k=top_k), None)


@each_format
def test_many_tokens(moe_format: MoeFormat) -> None:
    case = Case(moe_format, num_tokens=1001, hidden_size=2048 + 256)
    assert_placed(case, case.places())
    assert_placed(case, None)


@each_format
def test_rows_beyond_two_to_the_32_bytes(moe_format: MoeFormat) -> None:
    import cupy

    case = Case(moe_format, num_tokens=1, hidden_size=8192, top_k=2)
    rows = rows_as_read(case)
    num_rows = 2**32 // rows.shape[1] + 3
    out = cupy.zeros((num_rows, rows.shape[1]), np.uint8)
    places = cupy.asarray(np.array([[num_rows - 1, 1]], np.int32))
    hidden, scales = cupy.asarray(case.hidden_states()), cupy.asarray(case.scales())
    stream = cupy.cuda.get_current_stream().ptr
    launch(case, hidden, scales, places, out, stream=stream, pdl=False)
    for place in (1, num_rows - 1):
        got = cupy.asnumpy(out[place : place + 1])
        np.testing.assert_array_equal(comparable(case, got), comparable(case, rows))
    assert not out[0].any()
    assert not out[2].any()
    assert not out[-2].any()


# --- weights, and order on a stream ---------------------------------------------------------------


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("top_k", [1, 8, 22, 300])
def test_weights_are_rounded(top_k: int, by_token: bool) -> None:
    """To even, once: the rows have several blocks a token."""
    import cupy

    case = Case(MoeFormat.Nvfp4, hidden_size=4096, top_k=top_k)
    rng = np.random.default_rng(top_k)
    weights = rng.standard_normal(case.num_tokens * top_k).astype(np.float32)
    weights.view(np.uint32)[::3] &= 0xFFFF8000  # halfway, or exact
    rounded = cupy.full(weights.size + GUARD, 0xABCD, np.uint16)
    model = expected(case, None if by_token else case.places())
    out = cupy.full(model.shape, POISON, np.uint8)
    places = None if by_token else cupy.asarray(case.places())
    given, scales = cupy.asarray(weights), cupy.asarray(case.scales())
    stream = cupy.cuda.get_current_stream().ptr
    how = {"weights": given, "rounded": rounded, "stream": stream, "pdl": False}
    launch(case, cupy.asarray(case.hidden_states()), scales, places, out, **how)
    got = cupy.asnumpy(rounded)
    np.testing.assert_array_equal(got[:-GUARD], encode_bf16(weights))
    assert (got[-GUARD:] == 0xABCD).all()
    np.testing.assert_array_equal(comparable(case, cupy.asnumpy(out)), comparable(case, model))


@each_format
def test_dependent_launches_wait_for_their_producers(moe_format: MoeFormat) -> None:
    """Rows and places written just before, and the same output again and again."""
    import cupy

    case = Case(moe_format, num_tokens=300, hidden_size=1024)
    model = expected(case, case.places())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        rows, map_, scales = map(cupy.asarray, (case.hidden_states(), case.places(), case.scales()))
        hidden, places = cupy.zeros_like(rows), cupy.empty_like(map_)
        out = cupy.empty(model.shape, np.uint8)
        ballast = cupy.ones(1 << 24, np.float32)
        copies = []
        for _ in range(20):
            out.fill(POISON)
            places.fill(-1)
            ballast += 1
            hidden[...] = rows
            places[...] = map_
            pdl = compute_capability(0) >= (9, 0)
            launch(case, hidden, scales, places, out, stream=stream.ptr, pdl=pdl)
            copies.append(out.copy())
    stream.synchronize()
    for copy in copies:
        got = cupy.asnumpy(copy)
        np.testing.assert_array_equal(comparable(case, got), comparable(case, model))
