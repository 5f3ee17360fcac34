"""Libraries that are known by DLPack alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupy_moe.runtime.array_ref import DTYPES, HOST, Array, ArrayRef, is_contiguous
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.dlpack import BorrowedView, borrow
from cupy_moe.runtime.frameworks.base import Framework
from cupy_moe.runtime.frameworks.ndarrays import CupyFramework, NumpyFramework
from cupy_moe.runtime.requirements import import_cupy

__all__ = ["DlpackFramework"]


class DlpackFramework(Framework):
    """Any other producer of ``__dlpack__``; its arrays are viewed by NumPy or CuPy.

    Results are allocated by that library and handed back through the producer's own
    ``from_dlpack``. A producer without one receives NumPy or CuPy arrays.

    Parameters
    ----------
    name : str
        Name of the producer, for messages.
    importers : sequence of callable
        The producer's functions that turn a NumPy or CuPy array into its own, best first.
    """

    def __init__(self, name: str, importers: tuple[Callable[[Array], Array], ...]) -> None:
        self.name = name
        self._importers = importers

    def describe(self, x: Array, what: str) -> ArrayRef:
        """See `Framework.describe`."""
        view = borrow(x, current_stream=self.current_stream, what=what)
        no_gaps = is_contiguous(view.shape, view.strides)
        return ArrayRef(x, view.ptr, view.shape, view.dtype, view.device, no_gaps, self, view)

    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """See `Framework.strides`."""
        if isinstance(ref, _ForeignResult):
            return ref.local.strides
        return ref.keepalive.strides  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """See `Framework.empty`; the owner is made by the producer when first asked for."""
        return _ForeignResult(_local_framework(device).empty(shape, dtype, device), self)

    def current_stream(self, device: int) -> int:
        """CuPy's current stream: the producer orders its own work before it."""
        return CupyFramework().current_stream(device)

    def is_writable(self, ref: ArrayRef) -> bool:
        """See `Framework.is_writable`."""
        return isinstance(ref, _ForeignResult) or not ref.keepalive.read_only

    def view(self, ref: ArrayRef) -> Array:
        """See `Framework.view`."""
        if isinstance(ref, _ForeignResult):
            return ref.local.owner
        memory = _Interface(ref.keepalive)
        if ref.device == HOST:
            return np.asarray(memory).view(DTYPES[ref.dtype])
        with device_guard(ref.device):
            return import_cupy().asarray(memory).view(DTYPES[ref.dtype])

    def export(self, array: Array) -> Array:
        """See `Framework.export`."""
        if not self._importers:
            return array
        *preferred, last = self._importers
        for importer in preferred:
            try:
                return importer(array)
            except (BufferError, RuntimeError, TypeError, ValueError):
                continue  # e.g. from_dlpack of host bfloat16, which NumPy does not export
        return last(array)


class _ForeignResult(ArrayRef):
    """Array allocated by NumPy or CuPy for a foreign producer.

    The owner is exported on first access, that is after the launches that write it, so that the
    producer's import orders its stream behind ours.
    """

    __slots__ = ("_exported", "local")

    def __init__(self, local: ArrayRef, framework: DlpackFramework) -> None:
        self.local = local
        self._exported: Array = None
        super().__init__(None, local.ptr, local.shape, local.dtype, local.device, True, framework)

    @property
    def owner(self) -> Array:
        """The producer's array."""
        if self._exported is None:
            self._exported = self.framework.export(self.local.owner)
        return self._exported

    @owner.setter
    def owner(self, value: None) -> None:
        assert value is None


class _Interface:
    """Exposes borrowed memory to ``numpy.asarray`` and ``cupy.asarray``."""

    def __init__(self, view: BorrowedView) -> None:
        self._view = view
        name = "__array_interface__" if view.device == HOST else "__cuda_array_interface__"
        setattr(self, name, view.interface)


def _local_framework(device: int) -> Framework:
    return NumpyFramework() if device == HOST else CupyFramework()
