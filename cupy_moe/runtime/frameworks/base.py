"""What the package asks of an array library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from cupy_moe.runtime.array_ref import HOST, Array, ArrayRef
from cupy_moe.runtime.devices import device_guard, stream_is_capturing

__all__ = ["Framework"]


class Framework(ABC):
    """The array library of a caller.

    Attributes
    ----------
    name : str
    has_graph_pool : bool
        Whether memory allocated during a stream capture belongs to the graph.
    has_signature : bool
        Whether `signature` can be read.
    """

    name: str
    has_graph_pool = False
    has_signature = False

    @abstractmethod
    def describe(self, x: Array, what: str) -> ArrayRef:
        """Make a reference to `x` without a copy; `what` names the argument in errors."""

    def signature(self, x: Array) -> tuple[int, Hashable]:
        """Address of an array, and all else that `describe` tells of it, raw, with the alignment.

        Equal signatures come from equal descriptions and, where elements have gaps between them,
        equal strides; alignments count up to 256 bytes.
        """
        raise NotImplementedError(f"{self.name} arrays have no signature")

    @abstractmethod
    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """Strides of an array in elements."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """Uninitialized C-contiguous array from the library's own allocator."""

    @abstractmethod
    def current_stream(self, device: int) -> int:
        """Handle of the stream on which the library would launch now; 0 is the legacy default."""

    @abstractmethod
    def view(self, ref: ArrayRef) -> Array:
        """NumPy (host) or CuPy (CUDA) array over the same memory, with ml_dtypes dtypes.

        CUDA views are ordered after the work of the library's current stream.
        """

    @abstractmethod
    def export(self, array: Array) -> Array:
        """Array of this library over the memory of a NumPy or CuPy array, on its device."""

    def is_capturing(self, device: int) -> bool:
        """Whether the library's current stream is being captured into a CUDA graph."""
        if device == HOST:
            return False
        with device_guard(device):
            return stream_is_capturing(self.current_stream(device))

    def is_writable(self, ref: ArrayRef) -> bool:
        """Whether the memory may be written."""
        return True

    def record_stream(self, ref: ArrayRef) -> None:  # noqa: B027 (most libraries have no such call)
        """Tell the allocator that the current stream uses memory allocated on another one."""
