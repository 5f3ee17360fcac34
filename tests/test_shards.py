"""Prepared weights cut in two: values, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.fused_moe import prims_ts_fp4_block_scale_moe_partitioned
from cupy_moe.runtime.arrays import NumpyFramework
from cupy_moe.testing.compare import assert_bit_equal
from cupy_moe.weights import (
    MoeShardedWeights,
    PreparedWeightLayout,
    prepare_gemm1_weights,
    prepare_gemm2_weights,
    prepared_weight_layouts,
    shard_prepared_moe_weights,
)
from tests.array_kinds import ARRAY_KINDS, ArrayKind
from tests.fp4_calls import MODES, case_of, fp4_arguments
from tests.fp8_calls import shifted, strided
from tests.moe_cases import STRATEGIES, fp4_call

E4M3 = ml_dtypes.float8_e4m3fn
SIZES = {"hidden_size": 256, "intermediate_size": 256}
GROUP = {"nvfp4": 16, "mxfp8": 32, "bf16": 32}

each_mode = pytest.mark.parametrize("mode", MODES)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
array_kinds = pytest.mark.parametrize("kind", ARRAY_KINDS)


def layouts_of(mode: str, block: int = 0, **options: Any) -> dict[str, PreparedWeightLayout]:
    arguments: dict[str, Any] = {
        "weight_dtype": np.uint8,
        "weight_layout": 2 if block else 0,
        "use_shuffled_weight": True,
        "scale_k_group_size": GROUP[mode],
        "scale_dtype": E4M3,
        "fc1_block_major_k_bytes": block or None,
        "fc2_block_major_k_bytes": block or None,
    }
    fc1, fc2 = prepared_weight_layouts(**arguments | options)
    return {"fc1_layout": fc1, "fc2_layout": fc2}


def whole(mode: str, block: int = 0) -> dict[str, Any]:
    """Prepared weights of a golden case as arguments, with layouts and sizes."""
    call = fp4_call(mode, case_of(mode), None, block_major_k_bytes=block)
    return {
        "fc1_weight": call["gemm1"][0],
        "fc2_weight": call["gemm2"][0],
        "fc1_scale": call["gemm1_scales"][0].view(E4M3),
        "fc2_scale": call["gemm2_scales"][0].view(E4M3),
        **layouts_of(mode, block),
        **SIZES,
    }


def shard(arguments: dict[str, Any], **options: Any) -> MoeShardedWeights:
    arguments = {"strategy": "tp_n_tp_n", **arguments, **options}
    return shard_prepared_moe_weights(
        arguments.pop("fc1_weight"), arguments.pop("fc2_weight"), **arguments
    )


def on(kind: ArrayKind, arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: kind.make(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 64])
@array_kinds
@each_strategy
@each_mode
def test_shards_are_what_each_partition_would_prepare(
    mode: str, strategy: str, kind: ArrayKind, block: int
) -> None:
    shards = shard(on(kind, whole(mode, block)), strategy=strategy)
    expected = fp4_call(mode, case_of(mode), strategy, block_major_k_bytes=block)
    for made, key in ((shards.fc1, "gemm1"), (shards.fc2, "gemm2")):
        assert type(made) is list
        for p in (0, 1):
            assert_bit_equal(kind.host(made[p]), expected[key][p])
    for made, key in ((shards.fc1_scale, "gemm1_scales"), (shards.fc2_scale, "gemm2_scales")):
        for p in (0, 1):
            scales = kind.host(made[p])
            assert scales.dtype == E4M3
            assert_bit_equal(scales.view(np.uint8), expected[key][p].ravel())


@each_strategy
def test_shards_are_copies(strategy: str) -> None:
    arguments = whole("nvfp4")
    shards = shard(arguments, strategy=strategy)
    made = [*shards.fc1, *shards.fc2, *shards.fc1_scale, *shards.fc2_scale]
    for array in made:
        assert array.flags.c_contiguous
        assert not any(np.shares_memory(array, x) for x in arguments.values() if _is_array(x))
    assert not np.shares_memory(made[0], made[1])


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


@each_strategy
def test_scales_of_tensors_and_experts_are_copied_whole(strategy: str) -> None:
    arguments = whole("nvfp4") | layouts_of("nvfp4", scale_k_group_size=None, scale_dtype=None)
    scale = np.arange(4, dtype=np.float32)
    shards = shard(arguments | {"fc1_scale": scale, "fc2_scale": None}, strategy=strategy)
    assert shards.fc2_scale is None
    for copy in shards.fc1_scale:
        np.testing.assert_array_equal(copy, scale)
        assert not np.shares_memory(copy, scale)


@pytest.mark.parametrize("dtype", [E4M3, ml_dtypes.bfloat16])
@each_strategy
def test_wider_elements(strategy: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    itemsize = np.dtype(dtype).itemsize
    w1, w2 = (rng.integers(0, 256, (2, 128, 64 * itemsize), np.uint8) for _ in range(2))
    fc1 = prepare_gemm1_weights(w1).view(dtype)
    fc2 = prepare_gemm2_weights(w2).view(dtype)
    arguments = {
        "fc1_weight": fc1,
        "fc2_weight": fc2,
        "hidden_size": 128,
        "intermediate_size": 64,
        **layouts_of("nvfp4", weight_dtype=dtype, scale_k_group_size=None, scale_dtype=None),
    }
    arguments["fc1_weight"] = np.concatenate([fc1, fc1], axis=2)  # K = 128
    shards = shard(arguments, strategy=strategy)
    rows, columns = (slice(64, 128), slice(None))
    if strategy == "tp_n_tp_k":
        rows, columns = slice(None), slice(32, 64)
    for made, expected in (
        (shards.fc1[1], arguments["fc1_weight"][:, 64:]),
        (shards.fc2[1], fc2[:, rows, columns]),
    ):
        assert made.dtype == dtype
        np.testing.assert_array_equal(made.view(np.uint8), expected.copy().view(np.uint8))


@each_strategy
def test_destinations_of_the_caller(strategy: str) -> None:
    arguments = whole("mxfp8")
    expected, made = shard(arguments, strategy=strategy), []

    def alloc(partition: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        made.append((partition, np.full(shape, 0xFF, np.uint8).view(dtype)))
        return made[-1][1]

    shards = shard(arguments, strategy=strategy, alloc=alloc)
    for name in ("fc1", "fc2", "fc1_scale", "fc2_scale"):
        for p in (0, 1):
            mine = getattr(shards, name)[p]
            assert any(partition == p and array is mine for partition, array in made)
            assert_bit_equal(mine, getattr(expected, name)[p])


@each_strategy
@each_mode
def test_shards_run_in_the_partitioned_layer(mode: str, strategy: str) -> None:
    arguments = fp4_arguments(mode, case_of(mode), strategy)
    (expected,) = prims_ts_fp4_block_scale_moe_partitioned(**arguments)
    shards = shard(whole(mode), strategy=strategy)
    arguments |= {
        "gemm1_weights": shards.fc1,
        "gemm2_weights": shards.fc2,
        "gemm1_weights_scale": shards.fc1_scale,
        "gemm2_weights_scale": shards.fc2_scale,
    }
    assert_bit_equal(prims_ts_fp4_block_scale_moe_partitioned(**arguments)[0], expected)


# --- refusals -------------------------------------------------------------------------------------

ARRAYS = ("fc1_weight", "fc2_weight", "fc1_scale", "fc2_scale")


def refused(arguments: dict[str, Any], pattern: str, **options: Any) -> None:
    def alloc(*_: object) -> None:
        raise AssertionError("allocated before everything was checked")

    with pytest.raises(ValueError, match=f"^shard_prepared_moe_weights: {pattern}"):
        shard({"alloc": alloc, **arguments}, **options)


@each_strategy
def test_array_rules(strategy: str) -> None:
    valid = whole("mxfp8") | {"strategy": strategy}
    for name in ARRAYS:
        kind = ArrayKind("numpy")
        refused(valid | {name: strided(kind, valid[name])}, f"{name} must be contiguous")
        pattern = f"{name} must start at a multiple of 16 bytes"
        refused(valid | {name: shifted(kind, valid[name])}, pattern)
        refused(valid | {name: valid[name].view(np.int8)}, f"{name} must be (uint8|float8_e4m3fn)")
        with pytest.raises(TypeError, match=f"{name}: expected an array"):
            shard(valid | {name: "weights"})
    for name in ARRAYS[:2]:
        refused(valid | {name: valid[name][:, :-32].copy()}, rf"{name} must be \(4, ")
        refused(valid | {name: valid[name][..., None]}, rf"{name} must be \(4, ")
    for name in ARRAYS[2:]:
        refused(valid | {name: valid[name][:3].copy()}, f"{name} must have .* elements")
    refused(valid | {"fc1_weight": valid["fc1_weight"][:0]}, "fc1_weight must have at least one")


@pytest.mark.parametrize("name", ARRAYS[1:])
def test_array_on_another_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = whole("nvfp4")
    away, describe = arguments[name], NumpyFramework.describe

    def describe_elsewhere(self: NumpyFramework, x: Any, what: str) -> Any:
        return replace(describe(self, x, what), device=0 if x is away else -1)

    monkeypatch.setattr(NumpyFramework, "describe", describe_elsewhere)
    refused(arguments, f"{name} must be on the device of fc1_weight, got cuda:0")


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        (lambda shape, dtype: np.zeros((*shape, 1), dtype), "return that shape and dtype"),
        (lambda shape, _: np.zeros(shape, np.int8), "return that shape and dtype, got .* of int8"),
        (lambda shape, dtype: np.repeat(np.zeros(shape, dtype), 2, -1)[..., ::2], "return contig"),
        (lambda shape, dtype: shifted(ArrayKind("numpy"), np.zeros(shape, dtype)), "start at a mu"),
    ],
    ids=["shape", "dtype", "gaps", "alignment"],
)
@pytest.mark.parametrize("scales", [False, True], ids=["weights", "scales"])
def test_destination_is_refused(wrong: Any, pattern: str, scales: bool) -> None:
    def alloc(partition: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        make = wrong if partition == 1 and scales == (len(shape) == 1) else np.zeros
        return make(shape, dtype)

    name = "fc1_scale" if scales else "fc1_weight"
    refused(whole("nvfp4"), rf"alloc\(1, .*\) for {name} must {pattern}", alloc=alloc)


def test_destination_that_is_no_array() -> None:
    with pytest.raises(TypeError, match="alloc: expected an array"):
        shard(whole("nvfp4"), alloc=lambda *_: None)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"strategy": "tp_k"}, "strategy must be 'tp_n_tp_n' or 'tp_n_tp_k'"),
        ({"hidden_size": 0}, "hidden_size must be positive and even, got 0"),
        ({"hidden_size": 255}, "hidden_size must be positive and even, got 255"),
        ({"intermediate_size": -2}, "intermediate_size must be positive and even, got -2"),
        ({"intermediate_size": 127}, "intermediate_size must be positive and even"),
        ({"fc1_epilogue_tile_m": 0}, "fc1_epilogue_tile_m must be positive"),
        ({"fc2_epilogue_tile_m": -128}, "fc2_epilogue_tile_m must be positive"),
    ],
)
def test_choices(options: dict[str, Any], pattern: str) -> None:
    refused(whole("nvfp4"), pattern, **options)


def sized(hidden: int, intermediate: int, bits: int = 4, **layout: Any) -> dict[str, Any]:
    """Arguments of zeros for one expert without scales, of any size."""
    made = PreparedWeightLayout(**{"kind": "major_k", "storage_bits": bits, **layout})
    shapes = (1, 2 * intermediate, hidden * bits // 8), (1, hidden, intermediate * bits // 8)
    fc1, fc2 = (np.zeros(shape, np.uint8) for shape in shapes)
    if made.block_major_k_bytes:
        block = made.block_major_k_bytes
        fc1, fc2 = (x.reshape(1, -1, x.shape[1], block) for x in (fc1, fc2))
    return {
        "fc1_weight": fc1,
        "fc2_weight": fc2,
        "fc1_layout": made,
        "fc2_layout": made,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
    }


SCALED = {"scale_layout": "r128c4", "scale_k_group_size": 16}
R = "tp_n_tp_k"


@pytest.mark.parametrize(
    ("arguments", "options", "pattern"),
    [
        (sized(64, 48), {}, "fc1_weight must have a multiple of 32 rows .* got 48"),
        (sized(96, 64), {}, "fc2_weight must have a multiple of 32 rows .* got 48"),
        (
            sized(32, 24),
            {"fc1_epilogue_tile_m": 64, "fc2_epilogue_tile_m": 64},
            "fc1_weight must have a multiple of 16 rows .* got 24",
        ),
        (
            sized(128, 64, kind="block_major_k", block_major_k_bytes=32) | {"strategy": R},
            {"fc2_layout": PreparedWeightLayout("block_major_k", 4, None, 24)},
            "fc2_weight must have rows of whole blocks of 24 bytes, got 32",
        ),
        (
            sized(128, 64, kind="block_major_k", block_major_k_bytes=32),
            {"strategy": R},
            "fc2_weight must have whole blocks of 32 bytes in half a row, got 16",
        ),
        (
            sized(64, 64, 16),
            {"fc1_weight": np.zeros((1, 128, 64), np.float64)},
            r"fc1_weight must be \(1, 128, 16\)",
        ),
        (
            sized(64, 64) | {"fc1_layout": PreparedWeightLayout("major_k", 4)},
            {"fc1_weight": np.zeros((1, 128, 32), np.float32), "hidden_size": 66},
            "fc1_weight must have whole elements of 4 bytes in a row of K = 66",
        ),
        (
            sized(32, 64, **SCALED),
            {"fc1_scale": np.zeros(32 * 128 // 16, np.uint8)},
            "fc1_scale must have whole tiles of 4 scales, 16 columns each, in a row, got 32",
        ),
        (
            sized(64, 64, **SCALED),
            {"fc1_scale": np.zeros(64 * 128 // 16, np.uint8)},
            "fc1_scale must have a multiple of 128 rows .* got 64",
        ),
        (
            sized(128, 64, **SCALED),
            {"fc2_scale": np.zeros(64 * 128 // 16, np.uint8)},
            "fc2_scale must have a multiple of 128 rows .* got 64",
        ),
        (
            sized(128, 64, **SCALED),
            {"strategy": R},
            "fc2_scale must have whole tiles of 4 scales, .* in half a row, got 32",
        ),
        (
            sized(256, 128, **SCALED),
            {"fc1_scale": np.zeros(256 * 256 // 16, np.float32)},
            "fc1_scale must have a one-byte dtype, got float32",
        ),
    ],
)
def test_geometry(arguments: dict[str, Any], options: dict[str, Any], pattern: str) -> None:
    refused({**arguments, **options}, pattern)
