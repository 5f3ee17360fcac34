"""Codecs and quantizers against golden bytes, every midpoint, ml_dtypes and their own laws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.npyio import NpzFile

from cupy_moe import formats
from tests.array_kinds import XP_KINDS, ArrayKind

Codec: TypeAlias = Callable[[np.ndarray], np.ndarray]


DATA = Path(__file__).parent / "data"
INF = np.float32(np.inf)
NAN = np.float32(np.nan)
ALL_BYTES = np.arange(256, dtype=np.uint8)


@pytest.fixture(scope="module")
def golden() -> NpzFile:
    return np.load(DATA / "formats.npz")


@pytest.fixture(scope="module")
def blocks() -> NpzFile:
    return np.load(DATA / "blockquant.npz")


def finite_values(decode: Codec, codes: np.ndarray) -> np.ndarray:
    """Nonnegative finite values of a format in code order, as float64."""
    values = decode(codes).astype(np.float64)
    return values[np.isfinite(values) & ~np.signbit(values)]


E4M3_VALUES = finite_values(formats.decode_e4m3, ALL_BYTES)
E2M1_VALUES = finite_values(formats.decode_e2m1, ALL_BYTES[:16])
ENCODERS = [
    pytest.param(formats.encode_e4m3, E4M3_VALUES, 0x80, id="e4m3"),
    pytest.param(formats.encode_e2m1, E2M1_VALUES, 0x8, id="e2m1"),
]

# --- golden bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", XP_KINDS)
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "ue8m0"])
def test_decode_matches_golden_table(golden: NpzFile, kind: ArrayKind, name: str) -> None:
    table = golden[f"{name}_decode_f64" if name == "ue8m0" else f"{name}_decode_f32"]
    codes = ALL_BYTES[: len(table)]
    values = kind.host(getattr(formats, f"decode_{name}")(kind.make(codes)))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, table)
    is_number = ~np.isnan(table)
    np.testing.assert_array_equal(np.signbit(values)[is_number], np.signbit(table)[is_number])


@pytest.mark.parametrize("kind", XP_KINDS)
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_encode_matches_golden_pairs(golden: NpzFile, kind: ArrayKind, name: str) -> None:
    codes = getattr(formats, f"encode_{name}")(kind.make(golden[f"{name}_encode_in_f32"]))
    np.testing.assert_array_equal(kind.host(codes), golden[f"{name}_encode_out_u8"])


@pytest.mark.parametrize("kind", XP_KINDS)
def test_encode_bf16_matches_golden_pairs(golden: NpzFile, kind: ArrayKind) -> None:
    codes = formats.encode_bf16(kind.make(golden["bf16_encode_in_u32"].view(np.float32)))
    np.testing.assert_array_equal(kind.host(codes), golden["bf16_encode_out_u16"])


@pytest.mark.parametrize("kind", XP_KINDS)
def test_mx_scales_match_golden_bytes(golden: NpzFile, kind: ArrayKind) -> None:
    # One nonzero element a block: its magnitude is the block maximum.
    rows = np.zeros((len(golden["mxfp8_scale_amax_f32"]), 32), np.float32)
    rows[:, 7] = -golden["mxfp8_scale_amax_f32"]
    rows = kind.make(rows)
    _, floor_scales = formats.quantize_block_mxfp8(rows)
    _, fp8_scales = formats.mxfp8_quantize(rows)
    _, fp4_scales = formats.mxfp4_quantize(rows)
    np.testing.assert_array_equal(kind.host(floor_scales), golden["mxfp8_scale_op_u8"])
    np.testing.assert_array_equal(
        kind.host(fp8_scales)[:, 0], golden["mxfp8_scale_input_quantizer_u8"]
    )
    np.testing.assert_array_equal(
        kind.host(fp4_scales)[:, 0], golden["mxfp4_scale_input_quantizer_u8"]
    )


@pytest.mark.parametrize("kind", XP_KINDS)
def test_operation_quantizers_match_golden_bytes(blocks: NpzFile, kind: ArrayKind) -> None:
    r = kind.make(blocks["op_in_f32"])
    q, scales = formats.quantize_block_mxfp8(r)
    np.testing.assert_array_equal(kind.host(q), blocks["op_mxfp8_q_u8"])
    np.testing.assert_array_equal(kind.host(scales), blocks["op_mxfp8_s_u8"])
    values = formats.dequantize_mxfp8(q, scales)
    np.testing.assert_array_equal(kind.host(values), blocks["op_mxfp8_deq_f32"])

    codes, scales = formats.quantize_block_nvfp4(r, kind.make(blocks["op_nvfp4_c_f32"][:, None]))
    packed = formats.pack_fp4(codes)
    np.testing.assert_array_equal(kind.host(packed), blocks["op_nvfp4_q_u8"])
    np.testing.assert_array_equal(kind.host(scales), blocks["op_nvfp4_s_u8"])
    values = formats.dequantize_nvfp4(packed, scales)
    np.testing.assert_array_equal(kind.host(values), blocks["op_nvfp4_deq_f32"])


@pytest.mark.parametrize("kind", XP_KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_input_quantizers_match_golden_bytes(
    blocks: NpzFile, kind: ArrayKind, dtype: str, name: str
) -> None:
    bits = blocks["in_nvfp4_bf16_u16" if name == "nvfp4" else "in_bf16_u16"]
    x = bits.view(ml_dtypes.bfloat16)
    x = kind.make(x if dtype == "bfloat16" else x.astype(np.float32))
    extra = (blocks["in_nvfp4_G_f32"],) if name == "nvfp4" else ()
    q, scales = getattr(formats, f"{name}_quantize")(x, *extra)
    values = getattr(formats, f"dequantize_{name}")(q, scales, *extra)
    np.testing.assert_array_equal(kind.host(scales), blocks[f"in_{name}_s_u8"])
    # CuPy's kernels flush subnormal elements; rows without any are exact, as all rows in NumPy.
    magnitude = np.abs(kind.host(x).astype(np.float32))
    exact = ~((magnitude > 0) & (magnitude < np.finfo(np.float32).tiny)).any(axis=-1)
    exact |= kind.library == "numpy"
    assert exact.sum() >= 0.9 * exact.size
    np.testing.assert_array_equal(kind.host(q)[exact], blocks[f"in_{name}_q_u8"][exact])
    np.testing.assert_array_equal(kind.host(values)[exact], blocks[f"in_{name}_deq_f32"][exact])


# --- encoders: midpoints, specials, ml_dtypes, laws -----------------------------------------------


@pytest.mark.parametrize(("encode", "values", "sign_bit"), ENCODERS)
def test_every_midpoint_goes_to_even_and_its_neighbours_do_not(
    encode: Codec, values: np.ndarray, sign_bit: int
) -> None:
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    np.testing.assert_array_equal(middle, (values[:-1] + values[1:]) / 2)  # exact in FP32
    lower = np.arange(len(middle), dtype=np.uint8)
    expected = {-1: lower, 0: lower + lower % 2, 1: lower + 1}
    for ulps, codes in expected.items():
        x = middle if ulps == 0 else np.nextafter(middle, ulps * INF)
        np.testing.assert_array_equal(encode(x), codes, err_msg=f"{ulps} ulp")
        np.testing.assert_array_equal(encode(-x), codes | sign_bit, err_msg=f"{ulps} ulp, negative")


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (400.199585, 0x7D),  # 416; through FP16 it would be 400, a tie, and go to 384
        (464.0, 0x7E),
        (np.nextafter(np.float32(464), INF), 0x7E),
        (3.4e38, 0x7E),
        (INF, 0x7E),
        (-INF, 0xFE),
        (NAN, 0x7F),
        (-NAN, 0x7F),
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-10, 0x00),
        (-(2.0**-10), 0x80),
        (3 * 2.0**-10, 0x02),
        (1e-45, 0x00),
        (-1e-45, 0x80),
    ],
)
def test_e4m3_specials(x: float, code: int) -> None:
    assert int(formats.encode_e4m3(np.float32(x))) == code


def test_e4m3_of_400_199585_is_416() -> None:
    assert formats.decode_e4m3(formats.encode_e4m3(np.float32(400.199585))) == np.float32(416)


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (6.5, 7),
        (INF, 7),
        (-INF, 15),
        (NAN, 7),
        (-NAN, 7),
        (0.0, 0),
        (-0.0, 8),
        (-0.2, 8),
        (1e-45, 0),
        (5.0, 6),
        (0.75, 2),
    ],
)
def test_e2m1_specials(x: float, code: int) -> None:
    assert int(formats.encode_e2m1(np.float32(x))) == code


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 447.0])
def test_e4m3_agrees_with_ml_dtypes_within_range(scale: float) -> None:
    x = np.random.default_rng(1).uniform(-scale, scale, 200_000).astype(np.float32)
    ours = formats.encode_e4m3(x)
    np.testing.assert_array_equal(ours, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_bf16_agrees_with_ml_dtypes_on_random_bit_patterns() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 300_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        theirs = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(formats.encode_bf16(x), theirs)
    np.testing.assert_array_equal(
        formats.round_bf16(x), theirs.view(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_bf16_nan_stays_nan(bits: int) -> None:
    assert np.isnan(formats.round_bf16(np.uint32(bits).view(np.float32)))


@pytest.mark.parametrize("kind", XP_KINDS)
def test_every_code_survives_a_round_trip(kind: ArrayKind) -> None:
    e4m3 = np.delete(ALL_BYTES, 0xFF)  # the two NaNs share one code
    round_trip = formats.encode_e4m3(formats.decode_e4m3(kind.make(e4m3)))
    np.testing.assert_array_equal(kind.host(round_trip), e4m3)
    e2m1 = ALL_BYTES[:16]
    round_trip = formats.encode_e2m1(formats.decode_e2m1(kind.make(e2m1)))
    np.testing.assert_array_equal(kind.host(round_trip), e2m1)
    bf16 = np.arange(1 << 16, dtype=np.uint16)
    quiet = bf16[~(np.isnan(formats.decode_bf16(bf16)) & ((bf16 & 0x40) == 0))]
    round_trip = formats.encode_bf16(formats.decode_bf16(kind.make(quiet)))
    np.testing.assert_array_equal(kind.host(round_trip), quiet)


def test_decoders_take_the_types_of_their_codes() -> None:
    codes = {
        ml_dtypes.float8_e4m3fn: formats.decode_e4m3,
        ml_dtypes.float8_e8m0fnu: formats.decode_ue8m0,
        ml_dtypes.bfloat16: formats.decode_bf16,
    }
    for dtype, decode in codes.items():
        width = np.dtype(f"u{np.dtype(dtype).itemsize}")
        raw = np.arange(1 << (8 * width.itemsize), dtype=width)
        np.testing.assert_array_equal(decode(raw.view(dtype)), decode(raw))
        with pytest.raises(TypeError, match=f"codes as integers or {np.dtype(dtype).name}"):
            decode(np.ones(3, np.float32))


@pytest.mark.parametrize("x", [None, "1", [1, 2j]])
@pytest.mark.parametrize("encode", [formats.encode_e4m3, formats.encode_e2m1, formats.encode_bf16])
def test_encoders_take_real_numbers(encode: Codec, x: Any) -> None:
    with pytest.raises(TypeError, match="expected real numbers"):
        encode(x)


any_floats = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=1, min_side=2, max_side=40),
    elements=st.floats(width=32, allow_nan=False),
)


@pytest.mark.parametrize(("encode", "values", "sign_bit"), ENCODERS)
@given(x=any_floats)
def test_encoders_pick_a_nearest_value(
    encode: Codec, values: np.ndarray, sign_bit: int, x: np.ndarray
) -> None:
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    codes = encode(x)
    np.testing.assert_array_equal(codes & sign_bit != 0, np.signbit(x))
    error = np.abs(values[codes & (sign_bit - 1)] - magnitude)
    best = np.abs(values[:, None] - magnitude).min(axis=0)
    np.testing.assert_array_equal(error, best)


@pytest.mark.parametrize(("encode", "values", "sign_bit"), ENCODERS)
@given(x=any_floats)
def test_encoders_are_monotone(
    encode: Codec, values: np.ndarray, sign_bit: int, x: np.ndarray
) -> None:
    codes = encode(np.sort(x)).astype(int)
    signed = np.where(codes & sign_bit, -(codes & (sign_bit - 1)), codes)
    assert (np.diff(signed) >= 0).all()


@given(codes=hnp.arrays(np.uint8, (3, 8), elements=st.integers(0, 15)))
def test_fp4_packing_round_trip(codes: np.ndarray) -> None:
    packed = formats.pack_fp4(codes)
    np.testing.assert_array_equal(formats.unpack_fp4(packed), codes)
    np.testing.assert_array_equal(packed & 0xF, codes[:, 0::2])  # even index in the low nibble


@pytest.mark.parametrize(
    "function",
    [formats.encode_e4m3, formats.encode_e2m1, formats.encode_bf16, formats.round_bf16],
)
def test_encoders_keep_any_shape_and_strides(function: Codec) -> None:
    x = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)
    np.testing.assert_array_equal(function(x.T), function(x).T)
    np.testing.assert_array_equal(function(x[:, ::2]), function(x)[:, ::2])
    assert function(x[1, 2]).shape == ()
    assert function(x[1, 2]) == function(x)[1, 2]
    assert function(x[:0]).shape == (0, 6)


# --- block quantizers: degenerate blocks ----------------------------------------------------------


@pytest.mark.parametrize("kind", XP_KINDS)
def test_all_fp4_codes_under_extreme_ue8m0_bytes(kind: ArrayKind) -> None:
    scales = np.array([0, 1, 126, 127, 128, 254, 255], np.uint8)
    codes = np.tile(ALL_BYTES[:16], 2)
    packed = np.tile(formats.pack_fp4(codes), (len(scales), 1))
    expected = formats.decode_e2m1(codes) * formats.decode_ue8m0(scales)[:, None].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    with np.errstate(over="ignore"):
        values = formats.dequantize_mxfp4(kind.make(packed), kind.make(scales[:, None]))
    values = kind.host(values)
    # CuPy's kernels flush subnormal results; everything else is exact, NaN for byte 255 included.
    subnormal = np.abs(expected) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(values[~subnormal], expected[~subnormal])
    if kind.library == "numpy":
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", XP_KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_block_maximum_ignores_nan_and_saturates_infinity(kind: ArrayKind, bad: float) -> None:
    r = np.full((2, 32), 3.0, np.float32)
    r[0, 5] = bad
    for quantize in (formats.quantize_block_mxfp8, formats.mxfp8_quantize):
        q, scales = (kind.host(part) for part in quantize(kind.make(r)))
        assert q[0, 5] == (0x7F if np.isnan(bad) else 0x7E | (bad < 0) << 7)
        if np.isnan(bad):
            assert scales[0, 0] == scales[1, 0]
            np.testing.assert_array_equal(np.delete(q[0], 5), np.delete(q[1], 5))
    codes, scales = formats.quantize_block_nvfp4(kind.make(r), np.float32(1))
    codes, scales = kind.host(codes), kind.host(scales)
    assert codes[0, 5] == (0xF if bad == -np.inf else 0x7)
    assert scales[0, 0] == (scales[1, 0] if np.isnan(bad) else 0x7E)


@pytest.mark.parametrize("kind", XP_KINDS)
@pytest.mark.parametrize("value", [0.0, 2.0**-119, np.nan])
def test_blocks_too_small_for_a_scale_become_zero(kind: ArrayKind, value: float) -> None:
    r = kind.make(np.full((1, 32), value, np.float32))
    for quantize in (
        formats.quantize_block_mxfp8,
        lambda r: formats.quantize_block_nvfp4(r, np.float32(1)),
    ):
        q, scales = (kind.host(part) for part in quantize(r))
        assert not scales.any()
        assert np.isnan(value) or not q.any()


@pytest.mark.parametrize("kind", XP_KINDS)
def test_fp8_quantize_maps_the_maximum_to_448(kind: ArrayKind) -> None:
    x = np.random.default_rng(4).normal(size=(5, 7)).astype(np.float32)
    q, g = formats.fp8_quantize(kind.make(x))
    assert kind.host(g) == np.float32(448) / np.abs(x).max()
    assert np.abs(kind.host(formats.decode_e4m3(q))).max() == np.float32(448)
    error = np.abs(kind.host(formats.dequantize_fp8(q, g)) - x)
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, np.abs(x).max() / 448 * 2.0**-10)).all()


@pytest.mark.parametrize("x", [np.zeros((2, 3)), np.zeros((0, 3)), np.full((2, 3), 1e-44)])
def test_fp8_quantize_degenerate_inputs_have_a_finite_factor(x: np.ndarray) -> None:
    q, g = formats.fp8_quantize(x.astype(np.float32))
    assert np.isfinite(g)
    assert g > 0
    assert not q.any()


@pytest.mark.parametrize(
    ("call", "multiple"),
    [
        (lambda: formats.mxfp8_quantize(np.zeros((2, 33), np.float32)), 32),
        (lambda: formats.mxfp4_quantize(np.zeros((2, 16), np.float32)), 32),
        (lambda: formats.nvfp4_quantize(np.zeros((2, 24), np.float32), 1.0), 16),
        (lambda: formats.quantize_block_nvfp4(np.zeros((2, 8), np.float32), 1.0), 16),
        (lambda: formats.quantize_block_mxfp8(np.float32(1)), 32),
        (lambda: formats.pack_fp4(np.zeros((2, 3), np.uint8)), 2),
    ],
)
def test_partial_blocks_are_refused(call: Callable[[], object], multiple: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of {multiple}, got shape"):
        call()
