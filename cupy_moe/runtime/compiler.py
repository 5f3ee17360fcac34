"""NVRTC: a specialization to machine code or PTX, without a GPU and without a cache."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from cupy_moe.runtime.array_ref import Library
from cupy_moe.runtime.compile_log import KernelResources, first_error, parse_resources
from cupy_moe.runtime.errors import PortableError
from cupy_moe.runtime.kernel_cache import cache_dir, write_text
from cupy_moe.runtime.kernel_source import KernelSpec, format_config, render_unit
from cupy_moe.runtime.requirements import import_cupy

__all__ = [
    "CompiledKernel",
    "KernelCompileError",
    "arch_for",
    "capability_of",
    "compile_cubin",
    "compile_image",
    "compile_ptx",
    "nvrtc_options",
    "nvrtc_version",
    "require_arch",
]

_OPTIONS = ("-std=c++20", "-default-device")
_OPTIONS_VARIABLE = "CUPY_MOE_NVRTC_OPTIONS"
_OLDEST_CAPABILITY = (8, 0)
_UNIT_NAME = "unit.cu"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one specialization, and what the compiler said.

    Attributes
    ----------
    cubin : bytes
        ELF image.
    log : str
        NVRTC's log; with ``verbose_ptxas`` it holds the figures of `resources`.
    entry : str
        Name of the kernel.
    """

    cubin: bytes
    log: str
    entry: str

    @property
    def resources(self) -> KernelResources:
        """Registers, spills, stack and static shared memory of the entry.

        Raises
        ------
        ValueError
            If it was compiled without ``verbose_ptxas=True``.
        """
        return parse_resources(self.log, self.entry)


class KernelCompileError(PortableError):
    """A kernel did not compile.

    Attributes
    ----------
    kernel, config, arch, nvrtc_version, log : str
        What was compiled how, and the compiler's full log.
    source_path : Path or None
        Where the translation unit was kept; None if it could not be written.
    """

    def __init__(self, spec: KernelSpec, arch: str, log: str, source_path: Path | None) -> None:
        self.kernel = spec.entry
        self.config = format_config(spec.config)
        self.arch = arch
        self.nvrtc_version = nvrtc_version()
        self.log = log
        self.source_path = source_path
        kept = f" Source kept in {source_path}." if source_path else ""
        super().__init__(
            f"{spec} for {arch}, NVRTC {self.nvrtc_version}: "
            f"{first_error(log, spec.include_dirs)}.{kept}"
        )


def arch_for(capability: tuple[int, int]) -> str:
    """NVRTC architecture for a compute capability, with its architecture-specific instructions.

    Parameters
    ----------
    capability : tuple of int
        Major and minor, e.g. (9, 0) for ``sm_90a`` and (8, 6) for ``sm_86``.

    Raises
    ------
    NotImplementedError
        Below 8.0, which lacks ``cp.async`` and BF16 tensor cores.
    """
    major, minor = capability
    if capability < _OLDEST_CAPABILITY:
        raise NotImplementedError(
            f"cupy_moe needs compute capability 8.0 (Ampere) or newer, got {major}.{minor}"
        )
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def capability_of(arch: str) -> tuple[int, int]:
    """Compute capability that the code of an architecture (``sm_90a``, ``compute_80``) needs.

    Raises
    ------
    ValueError
        If it is not the name of one.
    """
    return divmod(_arch_number(arch), 10)


def compile_cubin(spec: KernelSpec, arch: str, *, verbose_ptxas: bool = False) -> CompiledKernel:
    """Compile to machine code, past the cache; needs NVRTC but no GPU.

    Parameters
    ----------
    spec : KernelSpec
        What to compile.
    arch : str
        Real architecture, e.g. ``sm_90a``.
    verbose_ptxas : bool
        Log registers and spills, see `CompiledKernel.resources`.

    Raises
    ------
    KernelCompileError
        With the first error and where the source was kept.
    ValueError, RuntimeError
        See `require_arch`.
    """
    extra = ("--ptxas-options=-v",) if verbose_ptxas else ()
    cubin, log = compile_image(spec, arch, extra)
    return CompiledKernel(cubin, log, spec.entry)


def compile_ptx(spec: KernelSpec, arch: str) -> bytes:
    """Compile to PTX for a virtual architecture (``compute_80``), past the cache.

    The driver translates it for any newer GPU. Zero-terminated; raises like `compile_cubin`.
    """
    return compile_image(spec, arch)[0]


def compile_image(
    spec: KernelSpec, arch: str, extra_options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compile for a real or a virtual architecture: what a driver loads, and NVRTC's log."""
    require_arch(arch)
    nvrtc = _nvrtc()
    include = tuple(f"-I{folder}" for folder in spec.include_dirs)
    options = (*nvrtc_options(), f"--gpu-architecture={arch}", *include, *extra_options)
    start = time.perf_counter()
    program = nvrtc.createProgram(render_unit(spec), _UNIT_NAME, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0") or str(error)
            raise KernelCompileError(spec, arch, log, _keep_source(spec)) from error
        log = nvrtc.getProgramLog(program).rstrip("\0")
        if arch.startswith("compute_"):
            image = nvrtc.getPTX(program)
            image = image.encode() if isinstance(image, str) else image
        else:
            image = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    _log.debug("compiled %s for %s in %.2f s", spec, arch, time.perf_counter() - start)
    # NOTE: CuPy hands both out as if zero-terminated and drops the last byte, which is a zero of
    # the ELF section table or of the PTX text. The driver forgives it, disassemblers do not.
    return image + b"\0", log


def require_arch(arch: str) -> None:
    """Refuse an architecture that NVRTC does not know.

    Raises
    ------
    ValueError
        If it is not the name of one.
    RuntimeError
        If this NVRTC is too old, or too new, for it; or if NVRTC is missing.
    """
    number, known = _arch_number(arch), _nvrtc().getSupportedArchs()
    if number not in known:
        raise RuntimeError(
            f"cupy_moe: NVRTC {nvrtc_version()} cannot compile for {arch}; it knows sm_"
            f"{', sm_'.join(map(str, known))}. Install NVRTC of another CUDA release."
        )


def _arch_number(arch: str) -> int:
    """90 of ``sm_90a``."""
    name = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if name is None:
        raise ValueError(
            f"cupy_moe: an architecture is named like sm_80, sm_90a or compute_80, got {arch!r}"
        )
    return int(name[1])


def _nvrtc() -> Library:
    return import_cupy().cuda.nvrtc


def nvrtc_options() -> tuple[str, ...]:
    """NVRTC options of every kernel, next to architecture and include path.

    ``CUPY_MOE_NVRTC_OPTIONS`` adds some, split as by a shell: ``-lineinfo`` for profilers,
    ``-DCUPY_MOE_EVERY_LANE_ARRIVES`` for racecheck. It is read whenever a kernel is compiled or
    looked up in the cache; loaded kernels stay as they are.

    Raises
    ------
    ValueError
        If the variable cannot be split.
    """
    added = os.environ.get(_OPTIONS_VARIABLE, "")
    try:
        return (*_OPTIONS, *shlex.split(added))
    except ValueError as error:
        raise ValueError(f"{_OPTIONS_VARIABLE}: {error}, got {added!r}") from error


def nvrtc_version() -> str:
    """Major and minor version, e.g. ``13.0``."""
    return ".".join(map(str, _nvrtc().getVersion()))


def _keep_source(spec: KernelSpec) -> Path | None:
    digest = hashlib.sha256(render_unit(spec).encode()).hexdigest()
    path = cache_dir() / f"{spec.source}-{digest[:8]}.cu"
    return path if write_text(path, render_unit(spec)) else None
