"""CUDA devices: current context, properties, driver errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, TypeAlias

from cupy_moe.runtime.array_ref import HOST
from cupy_moe.runtime.requirements import import_cupy, import_driver, require_gpu

DriverValue: TypeAlias = Any  # handles and codes of cuda.bindings, an optional package

__all__ = [
    "check",
    "compute_capability",
    "context_is_current",
    "device_guard",
    "device_name",
    "driver_cuda_version",
    "max_shared_memory",
    "sm_count",
    "stream_is_capturing",
    "stream_is_primary",
]

_LONGEST_NAME = 256  # bytes
_SPECIAL_STREAMS = (0, 1, 2)  # default, legacy, per thread: of the current context


def check(result: tuple[Any, ...], what: str) -> DriverValue:
    """Value of a cuda.bindings driver call.

    Raises
    ------
    RuntimeError
        If the call failed; `what` says what was attempted.
    """
    status, *values = result
    if status:
        raise RuntimeError(f"{what}: {describe_error(status)}")
    return values[0] if len(values) == 1 else tuple(values)


def describe_error(status: DriverValue) -> str:
    """Name and text of a driver error code."""
    driver = import_driver()
    _, text = driver.cuGetErrorString(status)
    return f"{status.name}: {text.decode() if text else 'unknown error'}"


@cache
def _primary_context(device: int) -> tuple[DriverValue, Callable[[], object], object]:
    """Primary context, retained for good; how to ask which is current; the answer if it is this."""
    require_gpu()
    driver = import_driver()
    context = check(driver.cuDevicePrimaryCtxRetain(device), f"using cuda:{device}")
    return context, driver.cuCtxGetCurrent, (driver.CUresult.CUDA_SUCCESS, context)


def context_is_current(device: int) -> bool:
    """Whether a device's primary context is current, so that a `device_guard` would do nothing."""
    _, get_current, this = _primary_context(device)
    return get_current() == this


class device_guard:  # noqa: N801 (reads as a statement)
    """Make a device's primary context current inside a ``with`` block; no-op for `HOST`.

    Contexts are pushed and popped, so leaving the block never creates a context on the device that
    was selected before (``cudaSetDevice`` would).
    """

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: int) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        """Push the context if it is not current."""
        if self._device == HOST or context_is_current(self._device):
            return
        context, *_ = _primary_context(self._device)
        pushed = import_driver().cuCtxPushCurrent(context)
        check(pushed, f"switching to cuda:{self._device}")
        self._pushed = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Pop what was pushed."""
        if self._pushed:
            check(import_driver().cuCtxPopCurrent(), f"leaving cuda:{self._device}")


@cache
def _attribute(device: int, name: str) -> int:
    require_gpu()
    driver = import_driver()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(driver.cuDeviceGetAttribute(attribute, device), f"{name} of cuda:{device}"))


def compute_capability(device: int) -> tuple[int, int]:
    """Compute capability (major, minor)."""
    return (
        _attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
        _attribute(device, "COMPUTE_CAPABILITY_MINOR"),
    )


def sm_count(device: int) -> int:
    """Count the streaming multiprocessors of the whole device."""
    return _attribute(device, "MULTIPROCESSOR_COUNT")


def device_name(device: int) -> str:
    """Name as the vendor writes it, ``NVIDIA H200``."""
    driver = import_driver()
    name = check(driver.cuDeviceGetName(_LONGEST_NAME, device), f"name of cuda:{device}")
    return str(name.partition(b"\0")[0].decode().strip())  # the driver pads with NUL and blanks


def driver_cuda_version() -> str:
    """Newest CUDA version that the driver supports, e.g. ``13.0``."""
    number = check(import_driver().cuDriverGetVersion(), "asking for the driver's CUDA version")
    return f"{number // 1000}.{number % 1000 // 10}"


def max_shared_memory(device: int) -> int:
    """Bytes of shared memory that one block can opt in to."""
    return _attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")


def stream_is_primary(stream: int, device: int) -> bool:
    """Whether a stream belongs to a device's primary context, which is current, and to no other."""
    if stream in _SPECIAL_STREAMS:
        return True
    driver = import_driver()
    context = check(driver.cuStreamGetCtx(stream), f"inspecting stream {stream:#x}")
    return int(context) == int(_primary_context(device)[0])


def stream_is_capturing(stream: int) -> bool:
    """Whether a stream of the current device is being captured into a CUDA graph."""
    return bool(_capture_query()(stream))


@cache
def _capture_query() -> Callable[[int], object]:
    return import_cupy().cuda.runtime.streamIsCapturing  # type: ignore[no-any-return]
