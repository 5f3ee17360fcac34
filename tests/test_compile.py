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

from cupy_moe.kernels.gemm_tiles import MainloopKind, mainloop_for, tile_shapes
from cupy_moe.plan import all_specializations
from cupy_moe.runtime.compile_log import KernelResources
from cupy_moe.runtime.jit import KernelSpec, compile_cubin, compile_ptx
from cupy_moe.types import MoeFormat

# What a block may use of an SM's shared memory, in KiB.
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

# What feeds the tensor cores of each main loop, and the copies ahead of them.
INSTRUCTIONS = {
    # mma.sync m16n8k16, FP16 or BF16 in, FP32 sums; cp.async.
    MainloopKind.Mma: {"Fc1": ("HMMA.16816.F32", "LDGSTS"), "Fc2": ("HMMA.16816.F32", "LDGSTS")},
    # wgmma; tensor copies. FC1 gathers by cp.async or has its rows in place.
    MainloopKind.Wgmma: {"Fc1": ("GMMA.64x", "UTMALDG.4D"), "Fc2": ("GMMA.64x", "UTMALDG.3D")},
}
# wgmma on E4M3, or on BF16 with FP32 sums and the scales of the weights by bulk copies.
WGMMA_OF_E4M3 = ("QGMMA.64x",)
WGMMA_OF_FP4 = ("HGMMA.64x", "x16.F32.BF16", "UBLKCP")
# ptxas says so when it gives up the overlap of tensor cores and copies, or the registers' split.
PERFORMANCE_WARNING = re.compile(r"\(C7\d\d\d\)")
LOCAL_MEMORY = ("LDL", "STL")
# Every product flushes under -ftz=true; without it, only the insides of library functions do.
FLUSH_TO_ZERO = re.compile(r"\b(FMUL|FFMA)\.FTZ\b")


@dataclass(frozen=True)
class Compiled:
    """What is left of a compilation: figures, and machine code where it is looked at."""

    resources: KernelResources
    warnings: tuple[str, ...]
    sass: str


@cache
def specializations(arch: str) -> list[KernelSpec]:
    return all_specializations(arch)


def is_disassembled(spec: KernelSpec) -> bool:
    """One of each GEMM's tiles, and all small kernels but the router's; the rest differs little."""
    config = dict(spec.config)
    if spec.source == "grouped_gemm":
        is_one_of_fp4 = config["moe_format"] is MoeFormat.Nvfp4 and not config["sort_slots"]
        is_of_format = config["moe_format"] is MoeFormat.Fp8 or is_one_of_fp4
        return is_of_format and config["activation"].name in {"Swiglu", "Identity"}
    return spec.source != "route" or config["method"].name == "Default"


def find_nvdisasm() -> Path:
    """From the wheel of the test extra."""
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    return next(Path(file.locate()) for file in files if file.name == "nvdisasm")


def compile_one(index: int, arch: str, folder: Path) -> Compiled:
    spec = specializations(arch)[index]
    compiled = compile_cubin(spec, arch, verbose_ptxas=True)
    sass = ""
    if is_disassembled(spec):
        path = folder / f"{arch}-{index}.cubin"
        path.write_bytes(compiled.cubin)
        command = [find_nvdisasm(), "--print-code", path]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = compiled.log.splitlines()
    warnings = tuple(line for line in lines if PERFORMANCE_WARNING.search(line))
    return Compiled(compiled.resources, warnings, sass)


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
    specs = specializations(arch)
    work = partial(compile_one, arch=arch, folder=tmp_path_factory.mktemp(arch))
    return list(zip(specs, workers.map(work, range(len(specs)), chunksize=4), strict=True))


def test_no_spills_and_no_stack(kernels):
    def is_clean(r: KernelResources) -> bool:
        return r.stack == r.spill_stores == r.spill_loads == 0

    dirty = {str(spec): k.resources for spec, k in kernels if not is_clean(k.resources)}
    assert dirty == {}


def test_no_performance_warnings(kernels):
    assert {str(spec): k.warnings for spec, k in kernels if k.warnings} == {}


def test_blocks_fit_a_multiprocessor(arch, kernels):
    for spec, compiled in kernels:
        config = dict(spec.config)
        shared = compiled.resources.static_smem + config.get("smem_bytes", 0)
        assert shared <= SHARED_MEMORY_KIB[arch] * 1024, spec
        threads = config["num_threads"]
        blocks = config.get("min_blocks", 1)
        assert threads * blocks * compiled.resources.registers <= REGISTERS_OF_AN_SM, spec


def test_grouped_gemm_runs_on_tensor_cores_with_async_copies(arch, kernels):
    listings = [(spec, k.sass) for spec, k in kernels if spec.source == "grouped_gemm" and k.sass]
    shapes = [tile_shapes(mainloop_for(arch), f) for f in MoeFormat]
    assert len(listings) >= 2 * len(set().union(*shapes))
    for spec, sass in listings:
        config = dict(spec.config)
        kind = config["mainloop_kind"]
        expected = [*INSTRUCTIONS[kind][config["gemm_stage"].name]]
        if kind is MainloopKind.Wgmma:
            is_fp8 = config["moe_format"] is MoeFormat.Fp8
            expected += WGMMA_OF_E4M3 if is_fp8 else WGMMA_OF_FP4
            expected += ["LDGSTS"] if config["gather_tokens"] else []
            if config["cluster"] > 1:
                expected.append("UTMALDG.3D.MULTICAST")
                # Of the two meetings. A fence at every stage cost 40 % of the time.
                assert sass.count("MEMBAR.ALL.GPU") == 2, spec
        assert [name for name in expected if name not in sass] == [], spec
        assert [name for name in LOCAL_MEMORY if name in sass] == [], spec


def test_subnormals_are_kept(arch, kernels):
    listings = {str(spec): k.sass for spec, k in kernels if k.sass}
    assert {spec.partition(" ")[0] for spec in listings} == {
        s.source for s in specializations(arch)
    }
    assert [spec for spec, sass in listings.items() if FLUSH_TO_ZERO.search(sass)] == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_specializations_are_distinct(arch):
    specs = specializations(arch)
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("moe_format", [MoeFormat.Fp8, MoeFormat.Bf16])
def test_the_build_for_racecheck_compiles(moe_format, monkeypatch):
    """With the largest tiles, of which those of FP4 are in clusters."""
    specs = [
        spec
        for spec in specializations("sm_90a")
        if spec.source == "grouped_gemm" and dict(spec.config)["moe_format"] is moe_format
    ]
    largest = max(specs, key=lambda spec: dict(spec.config)["tile_n"])
    plain = compile_cubin(largest, "sm_90a").cubin
    monkeypatch.setenv("CUPY_MOE_NVRTC_OPTIONS", "-DCUPY_MOE_EVERY_LANE_ARRIVES")
    assert compile_cubin(largest, "sm_90a").cubin != plain


def test_ptx_for_the_oldest_architecture():
    spec = next(s for s in specializations("compute_80") if s.source == "grouped_gemm")
    ptx = compile_ptx(spec, "compute_80").decode()
    assert ".target sm_80" in ptx
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
