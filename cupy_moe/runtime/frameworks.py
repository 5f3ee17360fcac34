"""One adapter per array library: describe, allocate, current stream, conversion.

An adapter exists only once an array of its library was seen, so nothing here imports a library
that the caller does not already use (CuPy excepted, when CUDA arrays of another library are viewed
through it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from cupy_moe.runtime.array_ref import (
    DTYPES,
    HOST,
    Array,
    ArrayRef,
    Library,
    dtype_name,
    is_contiguous,
)
from cupy_moe.runtime.devices import device_guard, stream_is_capturing
from cupy_moe.runtime.dlpack import BorrowedView, borrow
from cupy_moe.runtime.requirements import import_cupy

__all__ = [
    "CupyFramework",
    "DlpackFramework",
    "Framework",
    "NumpyFramework",
    "TorchFramework",
]


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


class NumpyFramework(Framework):
    """Host arrays of NumPy."""

    name = "numpy"

    def describe(self, x: Array, what: str) -> ArrayRef:
        """See `Framework.describe`."""
        ptr = x.__array_interface__["data"][0]
        dtype = dtype_name(x.dtype, what)
        return ArrayRef(x, ptr, x.shape, dtype, HOST, _has_no_gaps(x, what), self)

    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """See `Framework.strides`."""
        return _element_strides(ref.owner)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """See `Framework.empty`."""
        assert device == HOST
        return self.describe(np.empty(shape, DTYPES[dtype]), "empty")

    def current_stream(self, device: int) -> int:
        """Host arrays have no stream."""
        raise NotImplementedError("NumPy arrays are in host memory and have no CUDA stream")

    def is_writable(self, ref: ArrayRef) -> bool:
        """See `Framework.is_writable`."""
        return bool(ref.owner.flags.writeable)

    def view(self, ref: ArrayRef) -> Array:
        """See `Framework.view`: the array itself."""
        return ref.owner

    def export(self, array: Array) -> Array:
        """NumPy arrays as they are, CuPy arrays copied to the host."""
        return array if isinstance(array, np.ndarray) else array.get()


class CupyFramework(Framework):
    """CUDA arrays of CuPy."""

    name = "cupy"
    has_signature = True

    def __init__(self) -> None:
        self._cupy = import_cupy()

    def describe(self, x: Array, what: str) -> ArrayRef:
        """See `Framework.describe`."""
        data = x.data
        dtype = dtype_name(x.dtype, what)
        return ArrayRef(x, data.ptr, x.shape, dtype, data.device_id, _has_no_gaps(x, what), self)

    def signature(self, x: Array) -> tuple[int, Hashable]:
        """See `Framework.signature`."""
        data = x.data
        address = data.ptr
        return address, (address & 255, data.device_id, x.shape, x.strides, x.dtype)

    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """See `Framework.strides`."""
        return _element_strides(ref.owner)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """See `Framework.empty`."""
        with device_guard(device):
            array = self._cupy.empty(shape, DTYPES[dtype])
        return ArrayRef(array, array.data.ptr, shape, dtype, device, True, self)

    def current_stream(self, device: int) -> int:
        """See `Framework.current_stream`."""
        return int(self._cupy.cuda.get_current_stream(device).ptr)

    def view(self, ref: ArrayRef) -> Array:
        """See `Framework.view`: the array itself."""
        return ref.owner

    def export(self, array: Array) -> Array:
        """CuPy arrays as they are, NumPy arrays copied to the current device."""
        if isinstance(array, np.ndarray):
            # Raw bytes: the copy needs no conversion between ml_dtypes of the two libraries.
            raw = np.ascontiguousarray(array).view(_unsigned(array.dtype.itemsize))
            return self._cupy.asarray(raw).reshape(array.shape).view(array.dtype)
        return array


class TorchFramework(Framework):
    """PyTorch tensors in host or CUDA memory."""

    name = "torch"
    has_graph_pool = True
    has_signature = True

    def __init__(self, torch: Library) -> None:
        self._torch = torch
        # Unsigned 16 to 64 bits and some 8-bit floats appeared over time: take what this torch has.
        self._dtypes = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._devices: dict[int, Any] = {}
        self._raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        # NOTE: the public Stream object costs 1.5 us; compilers built on torch use this call too.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def describe(self, x: Array, what: str) -> ArrayRef:
        """See `Framework.describe`; autograd is ignored, as by ``x.detach()``."""
        try:
            ptr = x.data_ptr()
            dtype = self._names[x.dtype]
        except (RuntimeError, KeyError) as error:
            raise self._refusal(x, what) from error
        device = x.get_device() if x.is_cuda else HOST
        if device == HOST and not x.is_cpu:
            raise self._refusal(x, what)
        return ArrayRef(x, ptr, x.shape, dtype, device, x.is_contiguous(), self)

    def signature(self, x: Array) -> tuple[int, Hashable]:
        """See `Framework.signature`."""
        address, gaps = x.data_ptr(), x.is_contiguous() or x.stride()
        return address, (address & 255, x.device, x.shape, gaps, x.dtype)

    def _refusal(self, x: Array, what: str) -> TypeError:
        if x.layout is not self._torch.strided:
            rule, got = "dense (strided)", x.layout
        elif x.dtype not in self._names:
            rule, got = f"of dtype {', '.join(self._dtypes)}", x.dtype
        else:
            rule, got = "in host or CUDA memory", f"{type(x).__name__} on {x.device}"
        return TypeError(f"{what}: tensors must be {rule}, got {got}")

    def strides(self, ref: ArrayRef) -> tuple[int, ...]:
        """See `Framework.strides`."""
        return ref.owner.stride()  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> ArrayRef:
        """See `Framework.empty`."""
        # NOTE: sizes one by one and a device object: a tuple and a number cost 0.7 us more.
        where = self._devices.get(device) or self._device(device)
        tensor = self._torch.empty(*shape, dtype=self._dtypes[dtype], device=where)
        return ArrayRef(tensor, tensor.data_ptr(), shape, dtype, device, True, self)

    def _device(self, device: int) -> Any:
        made = self._torch.device("cpu" if device == HOST else f"cuda:{device}")
        return self._devices.setdefault(device, made)

    def current_stream(self, device: int) -> int:
        """See `Framework.current_stream`."""
        if self._raw_stream is None:
            return int(self._torch.cuda.current_stream(device).cuda_stream)
        return int(self._raw_stream(device))

    def record_stream(self, ref: ArrayRef) -> None:
        """See `Framework.record_stream`."""
        ref.owner.record_stream(self._torch.cuda.current_stream(ref.device))

    def view(self, ref: ArrayRef) -> Array:
        """See `Framework.view`."""
        raw = ref.owner.detach().view(self._raw[ref.itemsize])
        if ref.device == HOST:
            return raw.numpy().view(DTYPES[ref.dtype])
        with device_guard(ref.device):
            return import_cupy().from_dlpack(raw).view(DTYPES[ref.dtype])

    def export(self, array: Array) -> Array:
        """See `Framework.export`."""
        torch, dtype = self._torch, self._dtypes.get(dtype_name(array.dtype, "export"))
        if dtype is None:
            raise TypeError(f"torch {torch.__version__} has no dtype {array.dtype.name}")
        raw = array.view(np.dtype(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 else "u1"))
        if isinstance(raw, np.ndarray):
            return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype)
        return torch.from_dlpack(raw).view(dtype)


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


def _unsigned(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"u{itemsize}")


def _has_no_gaps(x: Array, what: str) -> bool:
    """Whether a NumPy or CuPy array is contiguous; refuses strides between the elements."""
    if x.flags.c_contiguous:
        return True
    itemsize = x.dtype.itemsize
    if any(stride % itemsize for stride in x.strides):
        raise ValueError(
            f"{what}: strides {x.strides} bytes must be multiples of the item size {itemsize}; "
            "pass a contiguous copy"
        )
    return False


def _element_strides(x: Array) -> tuple[int, ...]:
    """Strides of a NumPy or CuPy array in elements."""
    itemsize = x.dtype.itemsize
    return tuple(stride // itemsize for stride in x.strides)
