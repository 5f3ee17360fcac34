"""Arrays in and out: references to a caller's arrays, and NumPy or CuPy views of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from cupy_moe.runtime.array_ref import DTYPES, HOST, Array, ArrayRef, HostArray, Library
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.frameworks import (
    CupyFramework,
    DlpackFramework,
    Framework,
    NumpyFramework,
    TorchFramework,
)

__all__ = [
    "DTYPES",
    "FRAMEWORKS",
    "HOST",
    "ArrayRef",
    "CupyFramework",
    "DlpackFramework",
    "Framework",
    "NumpyFramework",
    "TorchFramework",
    "describe",
    "from_numpy_like",
    "to_numpy",
    "to_xp",
]

_NUMPY = NumpyFramework()
FRAMEWORKS: dict[type, Framework] = {np.ndarray: _NUMPY}
"""Frameworks met so far, by exact type of the array; see `describe`."""


def describe(x: Array, what: str = "array") -> ArrayRef:
    """Make a reference to an array, without a copy and without touching its data.

    Parameters
    ----------
    x : torch.Tensor, cupy.ndarray, numpy.ndarray or any producer of ``__dlpack__``
        Array in host or CUDA memory.
    what : str
        Names the operation and argument in errors.

    Returns
    -------
    ArrayRef
        Its owner is `x` itself.

    Raises
    ------
    TypeError
        If `x` is no array, or its storage, device or dtype is not supported.

    Notes
    -----
    About 1 us for a tensor: torch, CuPy and NumPy arrays are read by attribute, never imported.
    """
    framework = FRAMEWORKS.get(type(x))
    if framework is None:
        framework = _framework_of(x, what)
    return framework.describe(x, what)


def _framework_of(x: Array, what: str) -> Framework:
    kind = type(x)
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if isinstance(x, np.ndarray):
        framework: Framework = _NUMPY
    elif torch is not None and isinstance(x, torch.Tensor):
        _refuse_wrapper(kind, torch, what)
        framework = _singleton(torch.Tensor, lambda: TorchFramework(torch))
    elif cupy is not None and isinstance(x, cupy.ndarray):
        framework = _singleton(cupy.ndarray, CupyFramework)
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        framework = DlpackFramework(kind.__module__.partition(".")[0], _importers(x))
    else:
        raise TypeError(
            f"{what}: expected an array (torch, CuPy, NumPy or any with __dlpack__), "
            f"got {kind.__name__}"
        )
    return FRAMEWORKS.setdefault(kind, framework)


def _singleton(kind: type, make: Callable[[], Framework]) -> Framework:
    return FRAMEWORKS.get(kind) or FRAMEWORKS.setdefault(kind, make())


def _refuse_wrapper(kind: type, torch: Library, what: str) -> None:
    """Refuse subclasses with their own dispatch (DTensor, FakeTensor, ...): no single storage."""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        raise TypeError(
            f"{what}: {kind.__name__} wraps other tensors; pass the local tensor instead "
            "(for a DTensor, x.to_local())"
        )


def _importers(x: Array) -> tuple[Callable[[Array], Array], ...]:
    """How the producer of `x` makes its own array from another: by DLPack, else by copy."""
    if hasattr(x, "__array_namespace__"):
        namespace = x.__array_namespace__()
    else:
        namespace = sys.modules[type(x).__module__.partition(".")[0]]
    found = (getattr(namespace, name, None) for name in ("from_dlpack", "asarray"))
    return tuple(importer for importer in found if importer is not None)


def to_numpy(ref: ArrayRef) -> HostArray:
    """NumPy view, without a copy, of an array in host memory; ml_dtypes dtypes.

    Packed ``float4_e2m1fn_x2`` bytes appear as ``uint8``.

    Raises
    ------
    ValueError
        If the array is in CUDA memory.
    """
    if ref.device != HOST:
        raise ValueError(f"to_numpy: the array is on {ref.device_name}; copy it to the host first")
    return ref.framework.view(ref)  # type: ignore[no-any-return]


def from_numpy_like(ref: ArrayRef, array: HostArray) -> Array:
    """Array of `ref`'s library and device with the contents of a NumPy array.

    Host libraries share the memory of `array` where they can.
    """
    if ref.device == HOST:
        return ref.framework.export(array)
    with device_guard(ref.device):
        return ref.framework.export(CupyFramework().export(array))


def to_xp(x: Array, what: str = "array") -> tuple[Array, Callable[[Array], Array]]:
    """View any array as a NumPy (host) or CuPy (CUDA) one with an ml_dtypes dtype.

    Parameters
    ----------
    x : array
        As for `describe`.
    what : str
        Names the operation and argument in errors.

    Returns
    -------
    array : numpy.ndarray or cupy.ndarray
        Over the same memory.
    restore : callable
        Turns a NumPy or CuPy array into one of the library of `x`, on the device it is on,
        without a copy where the library allows it.

    Notes
    -----
    A CUDA view is ordered after the pending work of its library's current stream. Work on it runs
    on CuPy's current stream; `restore` orders the library's stream after that.
    """
    ref = describe(x, what)

    def restore(array: Array) -> Array:
        with device_guard(_device_of(array)):
            return ref.framework.export(array)

    return ref.framework.view(ref), restore


def _device_of(array: Array) -> int:
    return HOST if isinstance(array, np.ndarray) else int(array.device.id)
