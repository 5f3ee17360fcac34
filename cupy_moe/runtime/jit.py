"""Compiled kernels of this machine: the file cache, and functions loaded on devices.

A specialization is compiled once for an architecture and kept in a file (`kernel_cache`). Its key
covers the translation unit, the contents of every file in its include closure, the options, the
NVRTC version and the architecture, but no install path.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from cupy_moe.runtime.compile_log import KernelResources
from cupy_moe.runtime.compiler import (
    CompiledKernel,
    KernelCompileError,
    arch_for,
    compile_cubin,
    compile_image,
    compile_ptx,
    nvrtc_options,
    nvrtc_version,
)
from cupy_moe.runtime.devices import (
    DriverValue,
    check,
    compute_capability,
    device_guard,
    max_shared_memory,
)
from cupy_moe.runtime.kernel_cache import cache_dir, read_image, write_image
from cupy_moe.runtime.kernel_source import KernelSpec, include_closure, render_unit, source_dir
from cupy_moe.runtime.requirements import import_driver

__all__ = [
    "CompiledKernel",
    "Function",
    "KernelCompileError",
    "KernelResources",
    "KernelSpec",
    "arch_for",
    "cached_cubin_path",
    "cached_image",
    "compile_cubin",
    "compile_ptx",
    "load",
    "render_unit",
    "source_dir",
]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A kernel loaded on one device, for the life of the process.

    It may use all shared memory that the device grants a block.
    """

    name: str
    device: int
    handle: DriverValue  # CUfunction


def _cache_key(spec: KernelSpec, arch: str) -> str:
    """Everything the image depends on."""
    unit = render_unit(spec)
    lines = [spec.entry, arch, nvrtc_version(), *nvrtc_options(), unit]
    for name, path in include_closure(unit, spec.include_dirs):
        lines.append(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return "\n".join(lines)


def _image_path(spec: KernelSpec, arch: str, key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()
    suffix = "ptx" if arch.startswith("compute_") else "cubin"
    return cache_dir() / f"{spec.source}-{arch}-{digest[:16]}.{suffix}"


def cached_cubin_path(spec: KernelSpec, arch: str) -> Path:
    """Where the compiled kernel is kept, whether or not it is there yet.

    The file is the cubin and a checksum; see `cupy_moe.runtime.kernel_cache`.
    """
    return _image_path(spec, arch, _cache_key(spec, arch))


def cached_image(spec: KernelSpec, arch: str) -> bytes:
    """Compiled kernel from the cache, else compile and store it.

    Raises
    ------
    KernelCompileError, RuntimeError
        See `compile_cubin`.

    Notes
    -----
    Safe from any number of processes: each writes its own file and renames it. Where the folder
    cannot be written, the image lives in this process only and a warning says so once.
    """
    key = _cache_key(spec, arch)
    path = _image_path(spec, arch, key)
    image = read_image(path, key)
    if image is None:
        image, _ = compile_image(spec, arch)
        write_image(path, key, image)
    return image


_functions: dict[tuple[KernelSpec, int, str | None], Function] = {}
_locks: dict[tuple[KernelSpec, int, str | None], threading.Lock] = {}


def load(
    spec: KernelSpec, device: int, *, capturing: bool = False, arch: str | None = None
) -> Function:
    """Kernel ready to launch on a device; compiled and loaded at the first request.

    Parameters
    ----------
    spec : KernelSpec
        What to load.
    device : int
        CUDA ordinal. No other device is touched.
    capturing : bool
        Whether the caller's stream is being captured into a CUDA graph.
    arch : str, optional
        Compile for this architecture instead of the device's own. A virtual one (``compute_80``)
        goes through the driver's compiler.

    Raises
    ------
    RuntimeError
        If the kernel is not loaded yet and a capture is running, if the driver refuses the image,
        or if a GPU requirement is missing.
    KernelCompileError
        If the kernel does not compile.
    """
    key = (spec, device, arch)
    function = _functions.get(key)
    if function is not None:
        return function
    if capturing:
        raise RuntimeError(
            f"{spec} is not loaded on cuda:{device} yet, and CUDA cannot load a kernel while a "
            "stream is captured. Make the same call once before the capture (a warm-up call with "
            "the same shapes and options), then capture."
        )
    with _locks.setdefault(key, threading.Lock()):
        if key not in _functions:
            _functions[key] = _load(spec, device, arch or arch_for(compute_capability(device)))
    return _functions[key]


def _load(spec: KernelSpec, device: int, arch: str) -> Function:
    driver = import_driver()
    image = cached_image(spec, arch)
    what = f"loading {spec} for {arch} on cuda:{device}"
    with device_guard(device):
        module = check(driver.cuModuleLoadData(image), what)
        handle = check(driver.cuModuleGetFunction(module, spec.entry.encode()), what)
        attributes = driver.CUfunction_attribute
        static = check(
            driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle), what
        )
        limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(handle, limit, max_shared_memory(device) - static), what)
    return Function(spec.entry, device, handle)


# A lock held by another thread of the parent would stay locked in the child.
os.register_at_fork(after_in_child=_locks.clear)
