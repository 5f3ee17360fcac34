"""``info``: what this machine has for running the kernels, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cupy_moe import __version__
from cupy_moe.runtime import require_gpu
from cupy_moe.runtime.compiler import arch_for, nvrtc_version
from cupy_moe.runtime.devices import (
    check,
    compute_capability,
    device_name,
    driver_cuda_version,
    sm_count,
)
from cupy_moe.runtime.kernel_cache import cache_dir
from cupy_moe.runtime.requirements import import_driver

__all__ = ["add_parser"]

CUDA_EXTRAS = "cuda13"

# Packages of which one is enough, and the extra of this package that installs one.
PACKAGES = (
    (("numpy",), ""),
    (("ml_dtypes",), ""),
    (("cupy-cuda13x", "cupy-cuda12x", "cupy"), CUDA_EXTRAS),
    (("cuda-core",), CUDA_EXTRAS),
    (("cuda-bindings",), CUDA_EXTRAS),
    (("torch",), "torch"),
    (("matplotlib",), "cli"),
)


def _installed(names: tuple[str, ...], extra: str) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or f'{names[0]}: not installed; pip install "cupy-moe[{extra}]"'


def _value(query: Callable[..., object], *arguments: object) -> str:
    try:
        return str(query(*arguments))
    except Exception:  # a diagnosis must survive every broken installation
        return "not available"


def _cache_summary() -> str:
    folder = cache_dir()
    sizes = [path.stat().st_size for path in folder.glob("*") if path.is_file()]
    return f"{folder} ({len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB)"


def software() -> Iterator[tuple[str, str]]:
    """Versions and folders, by what they are of."""
    yield "cupy_moe", __version__
    yield "Python", platform.python_version()
    yield "packages", "\n".join(_installed(*package) for package in PACKAGES)
    yield "NVRTC", _value(nvrtc_version)
    yield "driver's CUDA", _value(driver_cuda_version)
    yield "kernel cache", _value(_cache_summary)


# --- GPUs -----------------------------------------------------------------------------------------


def _architecture(device: int) -> str:
    return arch_for(compute_capability(device))


def _memory(device: int) -> str:
    total = check(import_driver().cuDeviceTotalMem(device), f"memory of cuda:{device}")
    return f"{total / 2**30:.0f} GiB"


def _peers(device: int, count: int) -> str:
    driver = import_driver()
    peers = [
        str(other)
        for other in range(count)
        if other != device
        and check(driver.cuDeviceCanAccessPeer(device, other), f"peers of cuda:{device}")
    ]
    return ", ".join(peers) or "none"


def _green_contexts(device: int) -> str:
    """Whether the driver can hand out part of the multiprocessors."""
    driver = import_driver()
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource = check(driver.cuDeviceGetDevResource(device, kind), f"resources of cuda:{device}")
    return f"yes ({resource.sm.smCount} SMs to split)"


def gpus() -> Table:
    """One row a GPU; creates no context.

    Raises
    ------
    RuntimeError
        What is missing for using a GPU, and how to install it.
    """
    require_gpu()
    count = check(import_driver().cuDeviceGetCount(), "counting devices")
    table = Table("GPU", "name", "architecture", "SMs", "memory", "peers", "green contexts")
    for device in range(count):
        table.add_row(
            str(device),
            device_name(device),
            _value(_architecture, device),
            str(sm_count(device)),
            _memory(device),
            _peers(device, count),
            _value(_green_contexts, device),
        )
    return table


def run(_: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in software():
        table.add_row(label, Text(value))
    console.print(table)
    try:
        console.print(gpus())
    except RuntimeError as error:
        console.print(f"No usable GPU: {error}", style="yellow", markup=False)
        console.print("Arrays in host memory run the NumPy reference.")
    return 0


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("info", help="GPUs, versions, kernel cache, what is missing")
    parser.set_defaults(run=run)
