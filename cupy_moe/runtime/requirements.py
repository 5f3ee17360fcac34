"""Optional packages that GPU execution needs, and what to install when one is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache
from types import ModuleType

from cupy_moe.runtime.array_ref import Library

__all__ = ["import_core", "import_cupy", "import_driver", "require_gpu"]

_INSTALL = (
    'Install with  pip install "cupy-moe[cuda13]"  (driver R580 or newer) or  '
    'pip install "cupy-moe[cuda12]".'
)
_CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


@cache
def import_cupy() -> Library:
    """Import CuPy.

    Raises
    ------
    RuntimeError
        If it is not installed or cannot be imported.
    """
    return _import("cupy", "CuPy")


@cache
def import_driver() -> Library:
    """Import ``cuda.bindings.driver``.

    Raises
    ------
    RuntimeError
        If cuda-bindings is not installed or cannot be imported.
    """
    return _import("cuda.bindings.driver", "cuda-bindings")


@cache
def import_core() -> Library:
    """Import ``cuda.core``.

    Raises
    ------
    RuntimeError
        If cuda-core is not installed or cannot be imported.
    """
    return _import("cuda.core", "cuda-core")


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(
            f"cupy_moe needs {package} for arrays in GPU memory: {_sentence(error)} {_INSTALL}"
        ) from error


@cache
def require_gpu() -> None:
    """Check once that everything GPU execution needs is there.

    Returns at once after the first success. Creates no CUDA context, but initializes the driver:
    processes forked afterwards cannot use CUDA.

    Raises
    ------
    RuntimeError
        Says what is missing: CuPy, a single CuPy wheel, NVRTC, cuda-bindings, the driver or a
        device; and what to install.
    """
    _require_single_cupy()
    import_cupy()
    _require_nvrtc()
    _require_device(import_driver())


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.')}."


def _require_single_cupy() -> None:
    found = {name: version for name in _CUPY_WHEELS if (version := _installed_version(name))}
    if len(found) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        raise RuntimeError(
            f"cupy_moe: {len(found)} CuPy packages are installed ({listed}) and overwrite each "
            f"other's files. Run  pip uninstall -y {' '.join(found)}  first. {_INSTALL}"
        )


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_nvrtc() -> None:
    try:
        import_cupy().cuda.nvrtc.getVersion()
    except Exception as error:  # the loader's exception type differs between CuPy versions
        found = ", ".join(
            f"{name} {version}"
            for name in (*_CUPY_WHEELS, "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
            if (version := _installed_version(name))
        )
        raise RuntimeError(
            f"cupy_moe: NVRTC, which compiles the kernels, cannot be loaded: {_sentence(error)} "
            f"Found: {found}. NVRTC and CuPy must be of the same CUDA major version. {_INSTALL}"
        ) from error


def _require_device(driver: Library) -> None:
    try:
        status, *_ = driver.cuInit(0)
    except Exception as error:  # cuda-bindings reports a missing libcuda by its own types
        raise RuntimeError(
            f"cupy_moe: the NVIDIA driver is not installed or too old: {_sentence(error)} "
            "Pass arrays in host memory to run the NumPy reference instead."
        ) from error
    count = 0 if status else driver.cuDeviceGetCount()[1]
    if not count:
        reason = status.name if status else "no device is visible"
        raise RuntimeError(
            f"cupy_moe: no usable CUDA device ({reason}); check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES."
        )
