"""Array libraries that the array-generic code is tested with; CUDA ones carry the gpu mark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.testing.compare import to_host

__all__ = ["ARRAY_KINDS", "XP_KINDS", "ArrayKind"]

# Integers of the same width, known to every library.
_CARRIER = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class ArrayKind:
    """One array library and device: makes its arrays from NumPy ones and reads them back."""

    def __init__(self, library: str, device: str = "cpu") -> None:
        self.library = library
        self.device = device
        self.name = library if device == "cpu" else f"{library}-{device}"

    def make(self, array: np.ndarray) -> Any:
        """Copy of ``array`` (ml_dtypes types included) in this library, same dtype by name."""
        array = np.array(array, order="C")
        carrier = array.view(_CARRIER[array.dtype.itemsize])
        if self.library == "torch":
            torch = pytest.importorskip("torch")
            dtype = getattr(torch, array.dtype.name)
            return torch.from_numpy(carrier).to(self.device).view(dtype)
        if self.library == "cupy":
            cupy = pytest.importorskip("cupy")
            return cupy.asarray(carrier).view(array.dtype)
        return array

    def host(self, x: Any) -> np.ndarray:
        """NumPy copy of ``x`` after checking that it belongs to this library and device."""
        assert type(x).__module__.partition(".")[0] == self.library, type(x)
        if self.library == "torch":
            assert x.device.type == self.device
        return to_host(x)


def _param(kind: ArrayKind, *, gpu: bool) -> Any:
    return pytest.param(kind, id=kind.name, marks=pytest.mark.gpu if gpu else ())


XP_KINDS = [_param(ArrayKind("numpy"), gpu=False), _param(ArrayKind("cupy"), gpu=True)]
ARRAY_KINDS = [
    *XP_KINDS,
    _param(ArrayKind("torch"), gpu=False),
    _param(ArrayKind("torch", "cuda"), gpu=True),
]
