"""Scratch memory of one call, valid for as long as what was enqueued can run."""

from __future__ import annotations

from cupy_moe.runtime.array_ref import ArrayRef
from cupy_moe.runtime.frameworks import Framework

__all__ = ["allocate"]

_captured: list[ArrayRef] = []


def allocate(framework: Framework, num_bytes: int, device: int) -> ArrayRef:
    """Uninitialized bytes from the allocator of the caller's library.

    Parameters
    ----------
    framework : Framework
        Library of the caller's arrays.
    num_bytes : int
        Size; may be 0.
    device : int
        CUDA ordinal or `HOST`.

    Returns
    -------
    ArrayRef
        ``uint8`` of shape (num_bytes,), aligned to 256 bytes in CUDA memory. Drop it once all
        work that uses it is enqueued on, or joined into, the library's current stream.

    Notes
    -----
    Eager calls: the library reuses the block for later work of the same stream only, so that it
    may be dropped before the work has run. During a capture, torch takes the block from the pool
    of the graph, which keeps it. CuPy has no such pool and would hand the block to the next
    array while the graph can still replay; blocks allocated during a CuPy capture are therefore
    kept for the life of the process.
    """
    ref = framework.empty((num_bytes,), "uint8", device)
    if not framework.has_graph_pool and framework.is_capturing(device):
        _captured.append(ref)
    return ref
