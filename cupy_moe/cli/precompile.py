"""``precompile``: fill the kernel cache for an architecture, with or without a GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from typing import Any

from rich.console import Console

from cupy_moe.cli.options import architecture, positive
from cupy_moe.cli.output import progress_bar
from cupy_moe.plan import all_specializations
from cupy_moe.runtime import require_gpu
from cupy_moe.runtime.compiler import nvrtc_version, require_arch
from cupy_moe.runtime.devices import check, compute_capability
from cupy_moe.runtime.jit import KernelSpec, arch_for, cached_cubin_path, cached_image
from cupy_moe.runtime.kernel_cache import cache_dir
from cupy_moe.runtime.requirements import import_driver

__all__ = ["add_parser"]


@cache
def _specializations(arch: str) -> list[KernelSpec]:
    return all_specializations(arch)


def _compile(index: int, arch: str) -> str | None:
    """Compile in a worker; returns the error, if any, as text."""
    try:
        cached_image(_specializations(arch)[index], arch)
    except RuntimeError as error:
        return str(error)
    return None


def _compile_all(arch: str, indices: list[int], jobs: int) -> Iterator[str | None]:
    """Outcomes in the order in which they are ready.

    NOTE: processes, as NVRTC compiles one program at a time in each; started afresh, as CUDA does
    not survive a fork.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_compile, index, arch) for index in indices]
        for future in as_completed(futures):
            yield future.result()


def present_architectures() -> list[str]:
    """Distinct architectures of this machine's GPUs."""
    require_gpu()
    count = check(import_driver().cuDeviceGetCount(), "counting devices")
    return sorted({arch_for(compute_capability(device)) for device in range(count)})


def _is_stored(index: int, arch: str) -> bool:
    return cached_cubin_path(_specializations(arch)[index], arch).is_file()


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; the exit code is 1 if a kernel does not compile or cannot be stored."""
    architectures = args.arch or present_architectures()
    for arch in architectures:
        require_arch(arch)
    console.print(f"NVRTC {nvrtc_version()}, cache {cache_dir()}")
    errors = []
    with progress_bar(console) as progress:
        for arch in architectures:
            specs = [
                index
                for index, spec in enumerate(_specializations(arch))
                if args.kernel in (None, spec.source)
            ]
            task = progress.add_task(arch, total=len(specs))
            for error in _compile_all(arch, specs, args.jobs):
                progress.advance(task)
                errors += [error] if error else []
            if not errors and not all(_is_stored(index, arch) for index in specs):
                errors.append(f"the kernels for {arch} could not be stored in {cache_dir()}")
    for error in errors:
        console.print(error, style="red", markup=False)
    return 1 if errors else 0


def add_parser(subparsers: Any) -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("precompile", help="compile every kernel for an architecture")
    parser.add_argument(
        "--arch",
        nargs="+",
        type=architecture,
        help="such as sm_80, sm_90a or sm_120a; default: those of the GPUs in this machine",
    )
    parser.add_argument(
        "--kernel",
        choices=sorted({spec.source for spec in _specializations("sm_80")}),
        help="only the specializations of this kernel",
    )
    parser.add_argument(
        "--jobs", type=positive, default=os.cpu_count(), help="processes; default: %(default)s"
    )
    parser.set_defaults(run=run)
