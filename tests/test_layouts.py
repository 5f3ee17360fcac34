"""Prepared layouts against golden bytes, the closed formulas, and their inverses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.npyio import NpzFile

from cupy_moe.types import WeightLayout
from cupy_moe.weights import layouts
from tests.array_kinds import ARRAY_KINDS, ArrayKind

DATA = Path(__file__).parent / "data"
DTYPES = ["uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.fixture(scope="module")
def golden() -> NpzFile:
    return np.load(DATA / "layouts.npz")


@pytest.fixture(scope="module")
def fp8_moe() -> NpzFile:
    return np.load(DATA / "fp8_moe.npz")


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)


# --- golden bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 128, 256])
@pytest.mark.parametrize("tile", [64, 128])
def test_row_orders_match_golden_indices(golden: NpzFile, rows: int, tile: int) -> None:
    suffix = f"{rows}_tile{tile}"
    order = layouts.gemm2_row_order(rows, tile)
    np.testing.assert_array_equal(order, golden[f"shuffle_src_{suffix}"])
    order = layouts.gemm1_row_order(rows, gated=True, epilogue_tile_m=tile)
    np.testing.assert_array_equal(order, golden[f"fc1_src_{suffix}"])
    order = layouts.gemm1_row_order(rows, gated=False, epilogue_tile_m=tile)
    np.testing.assert_array_equal(order, golden[f"shuffle_src_{suffix}"])


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(128, 8), (256, 12), (100, 5)])
def test_swizzle_matches_golden_bytes(
    golden: NpzFile, kind: ArrayKind, rows: int, columns: int
) -> None:
    linear = golden[f"swizzle_in_{rows}x{columns}"]
    swizzled = layouts.swizzle_scales_r128c4(kind.make(linear))
    np.testing.assert_array_equal(
        kind.host(swizzled).ravel(), golden[f"swizzle_out_{rows}x{columns}"]
    )
    back = layouts.unswizzle_scales_r128c4(swizzled, rows, columns)
    np.testing.assert_array_equal(kind.host(back), linear)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_fp4_weights_match_golden_bytes(golden: NpzFile, kind: ArrayKind) -> None:
    steps = {
        "w1": (layouts.prepare_gemm1_weights, layouts.unprepare_gemm1_weights),
        "w2": (layouts.prepare_gemm2_weights, layouts.unprepare_gemm2_weights),
    }
    for name, (prepare, unprepare) in steps.items():
        logical = golden[f"nvfp4_{name}_logical"]
        major_k = prepare(kind.make(logical))
        np.testing.assert_array_equal(kind.host(major_k), golden[f"{name}_prepared"])
        np.testing.assert_array_equal(kind.host(unprepare(major_k)), logical)
        for block_bytes in (64, 128):
            layout = WeightLayout.BlockMajorK
            blocks = prepare(
                kind.make(logical), weight_layout=layout, block_major_k_bytes=block_bytes
            )
            expected = golden[f"{name}_blockmajor{block_bytes}"]
            np.testing.assert_array_equal(kind.host(blocks), expected)
            back = unprepare(blocks, weight_layout=layout)
            np.testing.assert_array_equal(kind.host(back), logical)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("block_format", ["nvfp4", "mx"])
def test_block_scales_match_golden_bytes(
    golden: NpzFile, kind: ArrayKind, block_format: str
) -> None:
    steps = {
        "s1": (layouts.prepare_gemm1_scales, layouts.unprepare_gemm1_scales),
        "s2": (layouts.prepare_gemm2_scales, layouts.unprepare_gemm2_scales),
    }
    for name, (prepare, unprepare) in steps.items():
        linear = golden[f"{block_format}_{name}_linear"]
        prepared = prepare(kind.make(linear))
        expected = golden[f"{block_format}_{name}_prepared"].reshape(linear.shape)
        np.testing.assert_array_equal(kind.host(prepared), expected)
        np.testing.assert_array_equal(kind.host(unprepare(prepared)), linear)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_fp8_weights_match_golden_bytes(golden: NpzFile, fp8_moe: NpzFile, kind: ArrayKind) -> None:
    e4m3 = ml_dtypes.float8_e4m3fn
    pairs = [
        (layouts.prepare_gemm1_weights, golden["fp8_fc1_logical"], golden["fp8_fc1_prepared"]),
        (layouts.prepare_gemm2_weights, golden["fp8_fc1_logical"], golden["fp8_fc2_prepared"]),
        (layouts.prepare_gemm1_weights, fp8_moe["b_w1_e4m3_u8"], fp8_moe["b_w1_prepared_u8"]),
        (layouts.prepare_gemm2_weights, fp8_moe["b_w2_e4m3_u8"], fp8_moe["b_w2_prepared_u8"]),
    ]
    for prepare, logical, expected in pairs:
        prepared = kind.host(prepare(kind.make(logical.view(e4m3))))
        assert prepared.dtype == e4m3
        np.testing.assert_array_equal(prepared.view(np.uint8), expected)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("p", [0, 1])
def test_a_shard_of_prepared_rows_is_the_preparation_of_the_shard(
    golden: NpzFile, kind: ArrayKind, p: int
) -> None:
    w1 = golden["nvfp4_w1_logical"]
    half = w1.shape[1] // 4
    shard = slice(p * half, (p + 1) * half)
    up, gate = np.split(w1, 2, axis=1)
    w1_shard = np.concatenate([up[:, shard], gate[:, shard]], axis=1)
    prepared = layouts.prepare_gemm1_weights(kind.make(w1_shard))
    np.testing.assert_array_equal(kind.host(prepared), golden[f"tp_n_tp_n_p{p}_w1"])


# --- the closed formulas --------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "tile"), [(32, 128), (32, 256), (16, 64), (16, 192)])
def test_shuffle_destination_formula(block: int, tile: int) -> None:
    assert layouts.shuffle_block_rows(tile) == block
    order = layouts.gemm2_row_order(3 * block, tile)
    n = block // 8
    for source in range(3 * block):
        b, s = divmod(source, block)
        assert order[b * block + 8 * (s % n) + s // n] == source


def test_combined_fc1_map_of_one_block() -> None:
    up, gate = np.arange(16), np.arange(16, 32)
    expected = np.concatenate([up[0::2], gate[0::2], up[1::2], gate[1::2]])
    np.testing.assert_array_equal(layouts.gemm1_row_order(32), expected)


def test_interleave_puts_up_first() -> None:
    rows = np.arange(8, dtype=np.uint8)[:, None]
    interleaved = layouts.interleave_gated(rows)
    np.testing.assert_array_equal(interleaved[:, 0], [0, 4, 1, 5, 2, 6, 3, 7])
    np.testing.assert_array_equal(layouts.uninterleave_gated(interleaved), rows)


@pytest.mark.parametrize(("rows", "columns"), [(128, 8), (256, 12), (100, 5), (130, 1)])
def test_swizzle_offset_formula(rows: int, columns: int) -> None:
    linear = random_bytes(rows, columns)
    column_tiles = -(-columns // 4)
    expected = np.zeros(-(-rows // 128) * column_tiles * 512, np.uint8)
    for m in range(rows):
        for k in range(columns):
            tile = m // 128 * column_tiles + k // 4
            expected[tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4] = linear[m, k]
    np.testing.assert_array_equal(layouts.swizzle_scales_r128c4(linear).ravel(), expected)


def test_block_major_k_formula() -> None:
    x = random_bytes(2, 6, 12)
    blocks = layouts.to_block_major_k(x, 4)
    assert blocks.shape == (2, 3, 6, 4)
    for kb in range(3):
        np.testing.assert_array_equal(blocks[:, kb], x[:, :, 4 * kb : 4 * kb + 4])


# --- inverses, dtypes, batches --------------------------------------------------------------------


@given(
    experts=st.lists(st.integers(0, 3), max_size=2),
    row_blocks=st.integers(0, 5),
    columns=st.integers(1, 9),
    tile=st.sampled_from([64, 128]),
    gated=st.booleans(),
)
def test_inverses(
    experts: list[int], row_blocks: int, columns: int, tile: int, gated: bool
) -> None:
    rows = row_blocks * layouts.shuffle_block_rows(tile)
    x = random_bytes(*experts, rows, columns)
    options: dict[str, Any] = {"epilogue_tile_m": tile}
    size = {"rows": rows, "columns": columns}
    pairs = [
        (layouts.unshuffle_rows, layouts.shuffle_rows(x, tile), options),
        (layouts.uninterleave_gated, layouts.interleave_gated(x), {}),
        (layouts.unswizzle_scales_r128c4, layouts.swizzle_scales_r128c4(x), size),
        (
            layouts.unprepare_gemm1_weights,
            layouts.prepare_gemm1_weights(x, gated=gated, **options),
            {"gated": gated, **options},
        ),
        (
            layouts.unprepare_gemm1_scales,
            layouts.prepare_gemm1_scales(x, gated=gated, **options),
            {"gated": gated, **size, **options},
        ),
        (
            layouts.unprepare_gemm2_scales,
            layouts.prepare_gemm2_scales(x, **options),
            {**size, **options},
        ),
    ]
    for inverse, prepared, arguments in pairs:
        np.testing.assert_array_equal(inverse(prepared, **arguments), x)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_library_dtype_and_bytes_are_kept(kind: ArrayKind, dtype: str) -> None:
    x = random_bytes(2, 128, 8)
    typed = x.view(getattr(ml_dtypes, dtype, dtype))
    for function in (
        layouts.interleave_gated,
        layouts.shuffle_rows,
        layouts.swizzle_scales_r128c4,
        layouts.prepare_gemm1_weights,
        layouts.prepare_gemm2_scales,
    ):
        given_array = kind.make(typed)
        result = kind.host(function(given_array))
        assert result.dtype == typed.dtype
        np.testing.assert_array_equal(result.view(np.uint8), function(x))
        np.testing.assert_array_equal(kind.host(given_array).view(np.uint8), x)  # not in place


def test_torch_packed_fp4_dtype_is_kept() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(random_bytes(2, 32, 8)).view(torch.float4_e2m1fn_x2)
    prepared = layouts.prepare_gemm1_weights(x)
    assert prepared.dtype == torch.float4_e2m1fn_x2
    expected = layouts.prepare_gemm1_weights(random_bytes(2, 32, 8))
    np.testing.assert_array_equal(prepared.view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_experts_are_independent_and_strides_do_not_matter(kind: ArrayKind) -> None:
    x = random_bytes(3, 64, 16)
    whole = layouts.prepare_gemm1_weights(x)
    for expert in range(3):
        np.testing.assert_array_equal(whole[expert], layouts.prepare_gemm1_weights(x[expert]))
    strided = kind.make(np.repeat(x, 2, axis=1))[:, ::2]
    np.testing.assert_array_equal(kind.host(layouts.prepare_gemm1_weights(strided)), whole)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
def test_results_are_contiguous_copies(kind: ArrayKind) -> None:
    x = random_bytes(2, 128, 8)
    for function in (
        layouts.to_block_major_k,
        layouts.from_block_major_k,
        layouts.unswizzle_scales_r128c4,
    ):
        arguments = (4,) if function is layouts.to_block_major_k else ()
        result = function(kind.make(x), *arguments)
        if kind.library == "torch":
            assert result.is_contiguous()
        else:
            assert result.flags.c_contiguous
            assert not np.shares_memory(x, kind.host(result))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layouts.shuffle_rows(random_bytes(48, 4)), ValueError, "multiple of 32 rows"),
        (lambda: layouts.shuffle_rows(random_bytes(24, 4), 64), ValueError, "multiple of 16 rows"),
        (lambda: layouts.prepare_gemm1_weights(random_bytes(2, 40, 4)), ValueError, "got 40"),
        (lambda: layouts.prepare_gemm2_scales(random_bytes(2, 40, 4)), ValueError, "got 40"),
        (lambda: layouts.interleave_gated(random_bytes(5, 4)), ValueError, "even number of rows"),
        (lambda: layouts.gemm2_row_order(32, 0), ValueError, "must be positive, got 0"),
        (lambda: layouts.shuffle_rows(random_bytes(32)), ValueError, r"got shape \(32,\)"),
        (
            lambda: layouts.shuffle_rows(np.zeros((32, 4), np.float32)),
            TypeError,
            "one-byte dtype .* got float32",
        ),
        (lambda: layouts.shuffle_rows([[1, 2], [3, 4]]), TypeError, "expected an array"),
        (
            lambda: layouts.unswizzle_scales_r128c4(random_bytes(100, 4)),
            ValueError,
            "whole tiles of 128 rows x 4 columns",
        ),
        (
            lambda: layouts.unswizzle_scales_r128c4(random_bytes(128, 6)),
            ValueError,
            "whole tiles of 128 rows x 4 columns",
        ),
        (
            lambda: layouts.to_block_major_k(random_bytes(4, 96), 64),
            ValueError,
            "row length 96 must be a multiple of block_bytes, got 64",
        ),
        (lambda: layouts.to_block_major_k(random_bytes(4, 96), 0), ValueError, "got 0"),
        (lambda: layouts.from_block_major_k(random_bytes(4, 96)), ValueError, "K blocks"),
        (
            lambda: layouts.prepare_gemm1_weights(random_bytes(2, 32, 4), weight_layout=1),
            ValueError,
            "MajorMn",
        ),
        (
            lambda: layouts.unprepare_gemm2_weights(random_bytes(2, 32, 4), weight_layout=1),
            ValueError,
            "MajorMn",
        ),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
