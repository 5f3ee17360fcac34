"""One adapter per array library: describe, allocate, current stream, conversion.

An adapter exists only once an array of its library was seen, so nothing here imports a library
that the caller does not already use (CuPy excepted, when CUDA arrays of another library are viewed
through it).
"""

from __future__ import annotations

from cupy_moe.runtime.frameworks.base import Framework
from cupy_moe.runtime.frameworks.foreign import DlpackFramework
from cupy_moe.runtime.frameworks.ndarrays import CupyFramework, NumpyFramework
from cupy_moe.runtime.frameworks.torch import TorchFramework

__all__ = [
    "CupyFramework",
    "DlpackFramework",
    "Framework",
    "NumpyFramework",
    "TorchFramework",
]
