"""Every specialization compiles for every architecture, without spills; needs NVRTC but no GPU."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

from cupy_moe.kernels.grouped_gemm import TILE_N_CHOICES
from cupy_moe.plan import all_specializations
from cupy_moe.runtime.compile_log import KernelResources
from cupy_moe.runtime.jit import KernelSpec, compile_cubin, compile_ptx

# What a block may use of an SM's shared memory, in KiB. A plan does not depend on the architecture,
# so every kernel must fit everywhere.
SHARED_MEMORY_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_103a": 227,
    "sm_120a": 99,
}
REGISTERS_OF_AN_SM = 65536

TENSOR_CORE = re.compile(r"\bHMMA\.16816\.F32\b")  # mma.sync m16n8k16, FP16 in, FP32 sums
ASYNC_COPY = re.compile(r"\bLDGSTS\b")  # cp.async
# Every product flushes under -ftz=true; without it, only the insides of library functions do.
FLUSH_TO_ZERO = re.compile(r"\b(FMUL|FFMA)\.FTZ\b")


@dataclass(frozen=True)
class Compiled:
    """What is left of a compilation: figures, and machine code where it is looked at."""

    resources: KernelResources
    sass: str


@cache
def specializations() -> list[KernelSpec]:
    return all_specializations()


def is_disassembled(spec: KernelSpec) -> bool:
    """One of each GEMM's tiles, and all small kernels but the router's; the rest differs little."""
    config = dict(spec.config)
    if spec.source == "grouped_gemm":
        return config["activation"].name in {"Swiglu", "Identity"}
    return spec.source != "route" or config["method"].name == "Default"


def find_nvdisasm() -> Path:
    """From the wheel of the test extra."""
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    return next(Path(file.locate()) for file in files if file.name == "nvdisasm")


def compile_one(index: int, arch: str, folder: Path) -> Compiled:
    spec = specializations()[index]
    compiled = compile_cubin(spec, arch, verbose_ptxas=True)
    sass = ""
    if is_disassembled(spec):
        path = folder / f"{arch}-{index}.cubin"
        path.write_bytes(compiled.cubin)
        command = [find_nvdisasm(), "--print-code", path]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Compiled(compiled.resources, sass)


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """NVRTC compiles one program at a time in each process."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module", params=SHARED_MEMORY_KIB)
def arch(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def kernels(arch, workers, tmp_path_factory) -> list[tuple[KernelSpec, Compiled]]:
    """All of one architecture."""
    specs = specializations()
    work = partial(compile_one, arch=arch, folder=tmp_path_factory.mktemp(arch))
    return list(zip(specs, workers.map(work, range(len(specs)), chunksize=4), strict=True))


def test_no_spills_and_no_stack(kernels):
    def is_clean(r: KernelResources) -> bool:
        return r.stack == r.spill_stores == r.spill_loads == 0

    dirty = {str(spec): k.resources for spec, k in kernels if not is_clean(k.resources)}
    assert dirty == {}


def test_blocks_fit_a_multiprocessor(arch, kernels):
    for spec, compiled in kernels:
        config = dict(spec.config)
        shared = compiled.resources.static_smem + config.get("smem_bytes", 0)
        assert shared <= SHARED_MEMORY_KIB[arch] * 1024, spec
        threads = config.get("num_threads") or 32 * config["warps_m"] * config["warps_n"]
        blocks = config.get("min_blocks", 1)
        assert threads * blocks * compiled.resources.registers <= REGISTERS_OF_AN_SM, spec


def test_grouped_gemm_runs_on_tensor_cores_with_async_copies(kernels):
    listings = [k.sass for spec, k in kernels if spec.source == "grouped_gemm" and k.sass]
    assert len(listings) >= 2 * len(TILE_N_CHOICES)
    assert all(TENSOR_CORE.search(sass) and ASYNC_COPY.search(sass) for sass in listings)


def test_subnormals_are_kept(kernels):
    listings = {str(spec): k.sass for spec, k in kernels if k.sass}
    assert {spec.partition(" ")[0] for spec in listings} == {s.source for s in specializations()}
    assert [spec for spec, sass in listings.items() if FLUSH_TO_ZERO.search(sass)] == []


def test_specializations_are_distinct():
    specs = specializations()
    assert len(set(specs)) == len(specs)


def test_ptx_for_the_oldest_architecture():
    spec = next(s for s in specializations() if s.source == "grouped_gemm")
    ptx = compile_ptx(spec, "compute_80").decode()
    assert ".target sm_80" in ptx
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
