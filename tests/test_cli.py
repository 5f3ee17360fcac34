"""The command line: what it prints, its exit codes and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_moe.kernels.permute import all_permute_configs

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, cache: Path, code: int = 0, **variables: str) -> str:
    """Run ``python -m cupy_moe`` in a process of its own."""
    environment = {**os.environ, "CUPY_MOE_CACHE_DIR": str(cache), "COLUMNS": "200", **variables}
    done = subprocess.run(
        [sys.executable, "-m", "cupy_moe", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_info_says_what_is_installed(tmp_path: Path) -> None:
    import numpy as np

    text = run("info", cache=tmp_path)
    assert f"numpy {np.__version__}" in text
    assert str(tmp_path) in text


def test_demo_compares_with_the_unquantized_layer(tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"
    sizes = ("--tokens", "16", "--backend", "cpu")
    text = run("demo", *sizes, "--plot", str(plot), cache=tmp_path)
    assert "NumPy reference" in text
    error = float(text.split("relative L2 error")[1].split()[0])
    assert 0.01 < error < 0.1  # what two E4M3 roundings of every factor cost
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_demo_refuses_sizes_that_the_layer_cannot_have(tmp_path: Path) -> None:
    text = run("demo", "--hidden", "100", cache=tmp_path, code=1)
    assert "--hidden must be a multiple of 128, got 100" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--tokens", "0"), "--tokens: must be an integer of at least 1, got '0'"),
        (("demo", "--seed", "x"), "--seed: invalid int value: 'x'"),
        (("precompile", "--jobs", "-1"), "--jobs: must be an integer of at least 1, got '-1'"),
        (("precompile", "--arch", "hopper"), "--arch: must be such as sm_80, sm_90a"),
        (("precompile", "--arch", "sm_75"), "needs compute capability 8.0"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    assert message in run(*arguments, cache=tmp_path, code=2)


def test_demo_refuses_more_slots_than_experts(tmp_path: Path) -> None:
    text = run("demo", "--experts", "4", "--top-k", "5", cache=tmp_path, code=1)
    assert "--top-k must be at most --experts 4, got 5" in text


def test_precompile_says_once_what_nvrtc_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    text = run("precompile", "--arch", "sm_99", cache=tmp_path, code=1)
    assert text.count("cannot compile for sm_99") == 1


def test_precompile_uses_the_architectures_of_the_runtime(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    run("precompile", "--arch", "sm_90", "--kernel", "permute", cache=tmp_path)
    kernels = list(tmp_path.glob("permute-sm_90a-*.cubin"))
    assert len(kernels) == len(all_permute_configs("sm_90a"))


def test_precompile_fills_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    run("precompile", "--arch", "sm_90a", "--kernel", "permute", cache=tmp_path)
    compiled = list(tmp_path.glob("permute-sm_90a-*.cubin"))
    assert len(compiled) == len(all_permute_configs("sm_90a"))


@pytest.mark.parametrize("what", ["fp8", "fp4", "sweep"])
def test_bench_without_a_gpu_says_so(what: str, tmp_path: Path) -> None:
    """Hidden here, so that it also holds where there is one."""
    text = run("bench", what, cache=tmp_path, code=1, CUDA_VISIBLE_DEVICES="")
    assert "error: " in text
    assert "driver" in text or "no usable CUDA device" in text or "needs CuPy" in text
    assert "Traceback" not in text


def test_unknown_commands_are_refused(tmp_path: Path) -> None:
    assert "invalid choice" in run("fly", cache=tmp_path, code=2)
