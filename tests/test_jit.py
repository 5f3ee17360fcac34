from __future__ import annotations

import re
import struct
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest

from cupy_moe.runtime import jit
from cupy_moe.runtime.compiler import nvrtc_options
from cupy_moe.runtime.jit import (
    KernelCompileError,
    KernelSpec,
    arch_for,
    compile_cubin,
    compile_ptx,
    load,
    render_unit,
)
from cupy_moe.runtime.kernel_source import include_closure
from cupy_moe.runtime.launch import ParamLayout
from cupy_moe.types import ActivationType
from tests.probe import FOLDER, PARAMS, ProbeConfig

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache folder of the test's own."""
    monkeypatch.setenv("CUPY_MOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nvrtc() -> Any:
    return pytest.importorskip("cupy").cuda.nvrtc


# --- translation unit -------------------------------------------------------------------------


class Flavor(Enum):
    Plain = "p"


class Level(IntEnum):
    One = 1


def spec_of(**config: Any) -> KernelSpec:
    return KernelSpec("probe", "probe", tuple(config.items()), ParamLayout(("x", "ptr")), FOLDER)


def test_unit_is_config_checks_and_source() -> None:
    spec = spec_of(
        tile_n=8,
        big=2**40,
        flag=True,
        eps=1e-6,
        activation=ActivationType.Swiglu,
        flavor=Flavor.Plain,
    )
    assert render_unit(spec) == (
        '#include "common/params.cuh"\n'
        '#include "common/types.cuh"\n\n'
        "struct Config {\n"
        "  static constexpr int kTileN = 8;\n"
        "  static constexpr long long kBig = 1099511627776;\n"
        "  static constexpr bool kFlag = true;\n"
        "  static constexpr float kEps = 0x1.0c6f7a0000000p-20f  /* 1e-06 */;\n"
        "  static constexpr cupy_moe::ActivationType kActivation = "
        "cupy_moe::ActivationType::Swiglu;\n"
        "  static constexpr cupy_moe::Flavor kFlavor = cupy_moe::Flavor::Plain;\n"
        "};\n\n"
        "#define CUPY_MOE_CHECK_PARAMS(P) \\\n"
        "  CUPY_MOE_CHECK_FIELD(P, x, cupy_moe::AnyPointer); \\\n"
        "  static_assert(sizeof(P{.x = {}}) == 8, \\\n"
        '                #P " is not of the host\'s size"); \\\n'
        "  CUPY_MOE_CHECK_MEMBERS(P, x)\n\n"
        '#include "probe.cu"\n'
    )


@pytest.mark.parametrize(
    ("value", "error"),
    [("text", TypeError), (None, TypeError), (2**63, ValueError), (1e39, ValueError)],
)
def test_values_without_a_cpp_form_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tile_n must"):
        spec_of(tile_n=value)


def test_specs_are_equal_if_their_code_is() -> None:
    values = (1, True, 1.0, Level.One)
    assert len({spec_of(x=value) for value in values}) == len(values)
    assert spec_of(x=1) == spec_of(x=1)
    assert hash(spec_of(x=1)) == hash(spec_of(x=1))
    assert spec_of(x=1) != replace(spec_of(x=1), entry="other")
    assert spec_of(x=1) != replace(spec_of(x=1), params=ParamLayout(("x", "i64")))


def test_spec_from_a_dataclass() -> None:
    spec = ProbeConfig(num_threads=64).spec()
    assert (spec.source, spec.entry) == ("probe", "probe")
    assert spec.config == (("num_threads", 64), ("factor", 2.0), ("early_launch", False))
    assert str(spec) == "probe (num_threads=64, factor=2.0, early_launch=False)"


def test_include_closure_follows_quotes_brackets_and_own_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cuh").write_text('#include "sub/b.cuh"\n#include "missing.cuh"\n')
    (tmp_path / "sub" / "b.cuh").write_text('  # include "c.cuh"\n#include <a.cuh>\n')
    (tmp_path / "sub" / "c.cuh").write_text('// #include "d.cuh"\n')
    (tmp_path / "d.cuh").write_text("")
    names = [name for name, _ in include_closure('#include "a.cuh"\n', (tmp_path,))]
    assert names == ["a.cuh", "sub/b.cuh", "sub/c.cuh"]


# --- compilation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_architectures(capability: tuple[int, int], arch: str) -> None:
    assert arch_for(capability) == arch


def test_gpus_before_ampere_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\) or newer, got 7\.5"):
        arch_for((7, 5))


def elf_end(cubin: bytes) -> int:
    """Where the last table of a 64-bit ELF file ends."""
    (phoff, shoff) = struct.unpack_from("<QQ", cubin, 32)
    (phentsize, phnum, shentsize, shnum) = struct.unpack_from("<HHHH", cubin, 54)
    return max(phoff + phentsize * phnum, shoff + shentsize * shnum)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_cubin_is_complete_and_resources_are_read(arch: str, nvrtc: Any) -> None:
    if int(arch[3:].rstrip("a")) not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} is older than {arch}")
    kernel = compile_cubin(ProbeConfig().spec(), arch, verbose_ptxas=True)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert elf_end(kernel.cubin) <= len(kernel.cubin)
    resources = kernel.resources
    assert 8 <= resources.registers <= 64
    assert (resources.spill_stores, resources.spill_loads, resources.static_smem) == (0, 0, 0)


@pytest.mark.usefixtures("nvrtc")
def test_resources_need_a_verbose_log() -> None:
    with pytest.raises(ValueError, match=r"registers.*verbose_ptxas=True"):
        _ = compile_cubin(ProbeConfig().spec(), ARCH).resources


def test_spills_stack_and_shared_memory_are_read() -> None:
    log = (
        "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : Function properties for k\n"
        "ptxas         .     400 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 0 barriers, 400 bytes cumulative stack size, "
        "256 bytes smem\n"
    )
    assert jit.KernelResources(32, 12, 8, 400, 256) == jit.CompiledKernel(b"", log, "k").resources


@pytest.mark.usefixtures("nvrtc")
def test_ptx_for_the_drivers_compiler() -> None:
    ptx = compile_ptx(ProbeConfig().spec(), "compute_80")
    assert b".target sm_80" in ptx
    assert b".entry probe(" in ptx
    assert ptx.endswith(b"}\n\n\0") or ptx.rstrip(b"\0\n").endswith(b"}")
    assert ptx.endswith(b"\0")


def test_architectures_that_nvrtc_does_not_know(nvrtc: Any) -> None:
    version = re.escape(".".join(map(str, nvrtc.getVersion())))
    with pytest.raises(RuntimeError, match=rf"NVRTC {version} cannot compile for sm_35; it knows"):
        compile_cubin(ProbeConfig().spec(), "sm_35")


@pytest.mark.parametrize("arch", ["hopper", "sm90", "sm_", "compute_80x", ""])
def test_names_that_are_no_architectures(arch: str) -> None:
    with pytest.raises(ValueError, match="an architecture is named like sm_80"):
        compile_cubin(ProbeConfig().spec(), arch)


@pytest.mark.usefixtures("nvrtc")
def test_compile_errors_say_what_where_and_with_which_configuration(cache: Path) -> None:
    spec = ProbeConfig(num_threads=2048).spec()
    line = (FOLDER / "probe.cu").read_text().split("more threads")[0].count("\n") + 1
    with pytest.raises(KernelCompileError) as caught:
        compile_cubin(spec, ARCH)
    error = caught.value
    assert str(error) == (
        f"probe (num_threads=2048, factor=2.0, early_launch=False) for {ARCH}, NVRTC "
        f"{error.nvrtc_version}: probe.cu({line}): more threads than a block holds. "
        f"Source kept in {error.source_path}."
    )
    assert (error.kernel, error.arch) == ("probe", ARCH)
    assert "num_threads=2048" in error.config
    assert "static assertion failed" in error.log
    assert error.source_path.parent == cache
    assert error.source_path.read_text() == render_unit(spec)


@pytest.mark.usefixtures("nvrtc")
def test_options_that_the_environment_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compile_cubin(ProbeConfig().spec(), ARCH).cubin
    monkeypatch.setenv("CUPY_MOE_NVRTC_OPTIONS", "-lineinfo '-DTEXT=two words'")
    assert nvrtc_options()[-2:] == ("-lineinfo", "-DTEXT=two words")
    assert b".debug_line" in compile_cubin(ProbeConfig().spec(), ARCH).cubin
    assert b".debug_line" not in plain
    monkeypatch.setenv("CUPY_MOE_NVRTC_OPTIONS", "--no-such-option")
    with pytest.raises(KernelCompileError, match="unrecognized option --no-such-option"):
        compile_cubin(ProbeConfig().spec(), ARCH)
    monkeypatch.setenv("CUPY_MOE_NVRTC_OPTIONS", "'-lineinfo")
    with pytest.raises(ValueError, match="CUPY_MOE_NVRTC_OPTIONS: No closing quotation, got"):
        compile_cubin(ProbeConfig().spec(), ARCH)


def replaced(name: str, kind: str) -> tuple[tuple[str, str], ...]:
    return tuple((f.name, kind if f.name == name else f.kind) for f in PARAMS.fields)


in_field, out_field, *other_fields = replaced("", "")
PARAMS_SWAPPED = (out_field, in_field, *other_fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (replaced("offset", "i32"), "Params::offset is not the host's cupy_moe::i32"),
        (replaced("n", "u32"), "Params::n is not the host's cupy_moe::u32"),
        (replaced("spin_cycles", "ptr"), "Params::spin_cycles is not the host's .*AnyPointer"),
        (replaced("out", "u64"), "Params::out is not the host's cupy_moe::u64"),
        (replaced("n", "i64"), "Params::n is not the host's cupy_moe::i64"),
        ((*replaced("", ""), ("extra", "i32")), 'has no member "extra"'),
        ((*replaced("", ""), ("extra", "i64")), 'has no member "extra"'),
        (replaced("", "")[:-1], "more elements than|number of"),
        (replaced("", "")[:-2], "Params is not of the host's size"),
        (replaced("", "")[1:], "Params is not of the host's size"),
        (PARAMS_SWAPPED, "out-of-order initializers"),
    ],
)
@pytest.mark.usefixtures("nvrtc")
def test_params_that_differ_from_the_layout_do_not_compile(fields: Any, message: str) -> None:
    with pytest.raises(KernelCompileError, match=message):
        compile_cubin(ProbeConfig().spec(params=ParamLayout(*fields)), ARCH)


@pytest.mark.parametrize(
    ("x", "counts", "message"),
    [
        (("ptr", 3), ("i32", 2), None),
        (("ptr", 2), ("i32", 2), "Params::x is not the host's .*AnyPointer\\[2\\]"),
        (("u64", 3), ("i32", 2), "Params::x is not the host's .*u64\\[3\\]"),
        (("ptr",), ("i32", 2), "Params::x is not the host's .*AnyPointer"),
        (("ptr", 3), ("u32", 2), "Params::counts is not the host's .*u32\\[2\\]"),
    ],
)
@pytest.mark.usefixtures("nvrtc")
def test_arrays_in_params_are_checked(
    x: Any, counts: Any, message: str | None, tmp_path: Path
) -> None:
    source = """
        struct Params { const float* x[3]; cupy_moe::i32 counts[2]; };
        CUPY_MOE_CHECK_PARAMS(Params);
        extern "C" __global__ void arrays(const __grid_constant__ Params p) {}
    """
    (tmp_path / "arrays.cu").write_text(source)
    layout = ParamLayout(("x", *x), ("counts", *counts))
    spec = KernelSpec("arrays", "arrays", (), layout, tmp_path)
    with pytest.raises(KernelCompileError, match=message) if message else nullcontext():
        compile_cubin(spec, ARCH)


@pytest.mark.usefixtures("nvrtc")
def test_enumerators_that_the_sources_lack_do_not_compile() -> None:
    @dataclass(frozen=True)
    class WithActivation(ProbeConfig):
        activation: ActivationType = ActivationType.SwigluBias

    with pytest.raises(KernelCompileError, match="SwigluBias"):
        compile_cubin(WithActivation().spec(), ARCH)


# --- loading ----------------------------------------------------------------------------------


def test_a_first_load_during_capture_names_the_warm_up_call() -> None:
    message = r"probe \(num_threads=128.*not loaded on cuda:0 yet.*once before the capture"
    with pytest.raises(RuntimeError, match=message):
        load(ProbeConfig().spec(), 0, capturing=True)
