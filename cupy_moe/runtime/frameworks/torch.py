"""PyTorch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cupy_moe.runtime.array_ref import DTYPES, HOST, Array, ArrayRef, Library, dtype_name
from cupy_moe.runtime.devices import device_guard
from cupy_moe.runtime.frameworks.base import Framework
from cupy_moe.runtime.requirements import import_cupy

__all__ = ["TorchFramework"]


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
