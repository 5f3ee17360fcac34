"""The portable main loop of FP4 layers on threads of the host: one tile, every order of K.

The loop's own source, with copies, matrix loads and products emulated, against float64.
"""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cupy_moe.codecs import decode_bf16, encode_bf16
from cupy_moe.formats import dequantize_mxfp4, dequantize_nvfp4
from cupy_moe.runtime.kernel_source import source_dir
from cupy_moe.weights.layouts import swizzle_scales_r128c4
from tests.emulated_ranks import COMPILER, EMULATOR

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ROWS, TOKENS = 128, 32  # of the tile
OWN = EMULATOR / "portable_fp4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tile")


@cache
def build(moe_format: str, folder: Path) -> ctypes.CDLL:
    """Compile the loop of one format for the host."""
    binary = folder / f"{moe_format}.so"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    paths = [f"-I{place}" for place in (OWN, EMULATOR, source_dir())]
    source = [f"-DFORMAT={moe_format}", str(OWN / "tile.cpp"), "-o", str(binary)]
    subprocess.run([str(COMPILER), *options, *paths, *source], check=True)
    return ctypes.CDLL(str(binary))


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# Rows of weights are whole spans of four blocks: multiples of 64 in NVFP4, else of 128.
@pytest.mark.parametrize(
    ("moe_format", "k"),
    [("Nvfp4", 128), ("Nvfp4", 192), ("Nvfp4", 384)]
    + [(moe_format, k) for moe_format in ("Mxfp8", "Bf16") for k in (128, 384)],
)
def test_sums_of_a_tile(moe_format: str, k: int, folder: Path) -> None:
    """Within what FP32 additions of exact products may lose; scales that need two multipliers."""
    rng = np.random.default_rng(k)
    is_nvfp4 = moe_format == "Nvfp4"
    block = 16 if is_nvfp4 else 32
    codes = rng.integers(0, 256, (ROWS, k // 2), dtype=np.uint8)
    scales = rng.integers(118, 133, (ROWS, k // block), dtype=np.uint8)
    if is_nvfp4:
        scales = rng.integers(0, 0x7F, scales.shape, dtype=np.uint8)
    tokens = encode_bf16(rng.standard_normal((TOKENS, k)).astype(np.float32))
    out = np.full((ROWS, TOKENS), np.nan, np.float32)
    prepared = np.ascontiguousarray(swizzle_scales_r128c4(scales))
    multiply = build(moe_format, folder).multiply
    multiply(address(codes), address(prepared), address(tokens), k, address(out))

    dequantize = dequantize_nvfp4 if is_nvfp4 else dequantize_mxfp4
    weights = np.asarray(dequantize(codes, scales)).astype(np.float64)
    values = np.asarray(decode_bf16(tokens)).astype(np.float64)
    lost = k * 2.0**-24 * (np.abs(weights) @ np.abs(values).T)
    assert (np.abs(out - weights @ values.T) <= lost).all()
