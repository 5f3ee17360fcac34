"""Descriptions of prepared weights: what they say, and every refusal."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.weights import PreparedWeightLayout, prepared_weight_layouts

E4M3 = ml_dtypes.float8_e4m3fn


def layouts_of(**options: Any) -> tuple[PreparedWeightLayout, PreparedWeightLayout]:
    arguments: dict[str, Any] = {
        "weight_dtype": np.uint8,
        "weight_layout": 0,
        "use_shuffled_weight": True,
        "scale_k_group_size": 32,
        "scale_dtype": E4M3,
    }
    return prepared_weight_layouts(**arguments | options)


@pytest.mark.parametrize("library", ["numpy", "torch", "name"])
def test_layouts_of_every_weight_dtype(library: str) -> None:
    torch = pytest.importorskip("torch")
    for name, bits in {
        "bfloat16": 16,
        "float16": 16,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "uint8": 4,
    }.items():
        dtype = {
            "numpy": getattr(ml_dtypes, name, None) or np.dtype(name),
            "torch": getattr(torch, name),
            "name": name,
        }[library]
        fc1, fc2 = prepared_weight_layouts(
            weight_dtype=dtype, weight_layout=0, use_shuffled_weight=True
        )
        assert fc1 == fc2 == PreparedWeightLayout("major_k", bits, dtype)
    with pytest.raises(FrozenInstanceError):
        fc1.kind = "block_major_k"


def test_layouts_in_blocks_with_scales() -> None:
    blocks = {"fc1_block_major_k_bytes": 64, "fc2_block_major_k_bytes": 128}
    layouts = layouts_of(weight_layout=2, **blocks)
    for layout, block in zip(layouts, blocks.values(), strict=True):
        assert layout == PreparedWeightLayout(
            "block_major_k", 4, np.uint8, block, "r128c4", 32, E4M3
        )


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"kind": "major_mn"}, "kind must be"),
        ({"storage_bits": 6}, "storage_bits must be 4, 8 or 16"),
        ({"kind": "block_major_k"}, "block_major_k_bytes must be positive"),
        ({"kind": "block_major_k", "block_major_k_bytes": 0}, "block_major_k_bytes must be pos"),
        ({"block_major_k_bytes": 64}, "block_major_k_bytes must be None for 'major_k'"),
        ({"scale_layout": "r128c4"}, "must be given together"),
        ({"scale_k_group_size": 16}, "must be given together"),
        ({"scale_layout": "linear", "scale_k_group_size": 16}, "scale_layout must be None or"),
        ({"scale_layout": "r128c4", "scale_k_group_size": 0}, "scale_k_group_size must be pos"),
        ({"scale_dtype": "uint8"}, "scale_dtype must be None without scale_layout"),
    ],
)
def test_layout_is_refused(fields: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^PreparedWeightLayout: .*{pattern}"):
        PreparedWeightLayout(**{"kind": "major_k", "storage_bits": 4, **fields})


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"weight_layout": 3}, "weight_layout must be MajorK"),
        ({"weight_layout": 1}, "weight_layout must be MajorK"),
        ({"use_shuffled_weight": False}, "use_shuffled_weight must be True"),
        ({"weight_dtype": np.float32}, "weight_dtype must be one of bfloat16"),
        ({"weight_dtype": "nothing"}, "weight_dtype must be one of bfloat16"),
        ({"weight_layout": 2}, "must both be given for BlockMajorK"),
        ({"weight_layout": 2, "fc1_block_major_k_bytes": 64}, "must both be given"),
        ({"fc2_block_major_k_bytes": 64}, r"be None for MajorK \(0\)"),
        ({"scale_k_group_size": None}, "scale_dtype must be None without"),
    ],
)
def test_layouts_are_refused(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        layouts_of(**options)
