"""Every specialization compiles for every architecture, without spills, to tensor-core code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupy_moe.plan import all_specializations
from cupy_moe.runtime.jit import CompiledKernel, KernelSpec, compile_cubin

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
TENSOR_CORE_INSTRUCTION = "HMMA.16816.F32"

SPECIALIZATIONS = all_specializations()
KERNELS = sorted({spec.source for spec in SPECIALIZATIONS})


def specs_of(kernel: str) -> list[KernelSpec]:
    return [spec for spec in SPECIALIZATIONS if spec.source == kernel]


def disassemble(compiled: CompiledKernel, folder: Path) -> str:
    """Machine code as text."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.cubin)
    return subprocess.run(
        [nvdisasm(), str(cubin)], capture_output=True, text=True, check=True
    ).stdout


def nvdisasm() -> str:
    """From the wheel of the test extra, else from a CUDA toolkit."""
    for entry in map(Path, sys.path):
        found = next(entry.glob("nvidia/*/bin/nvdisasm"), None)
        if found is not None:
            return str(found)
    tool = shutil.which("nvdisasm")
    assert tool is not None, "nvdisasm is missing: pip install nvidia-cuda-nvdisasm"
    return tool


def test_every_source_has_specializations() -> None:
    sources = {path.stem for path in (Path(__file__).parents[1] / "cuda_src").glob("*.cu")}
    assert sources == set(KERNELS)
    assert len(set(SPECIALIZATIONS)) == len(SPECIALIZATIONS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch: str, kernel: str) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    specs = specs_of(kernel)
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda spec: compile_cubin(spec, arch, verbose_ptxas=True), specs))
    for spec, kernel_code in zip(specs, compiled, strict=True):
        resources = kernel_code.resources
        assert (resources.spill_stores, resources.spill_loads) == (0, 0), f"{spec}: {resources}"
        assert resources.stack == 0, f"{spec}: {resources}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gemm_runs_on_tensor_cores(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    for spec in specs_of("grouped_gemm")[::13]:
        text = disassemble(compile_cubin(spec, arch), tmp_path)
        assert TENSOR_CORE_INSTRUCTION in text, str(spec)
        assert "LDL" not in text, f"{spec}: local memory"
