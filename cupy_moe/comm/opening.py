"""Workspaces for arrays in GPU or in host memory, or the common verdict that there is none."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TypeAlias

from cupy_moe.comm.agreement import agree, on_all, vote
from cupy_moe.comm.groups import Group
from cupy_moe.comm.host import HostWorkspace
from cupy_moe.comm.launches import device_shapes
from cupy_moe.comm.rules import WorkspaceSizes
from cupy_moe.comm.workspace import FinalizeWorkspace
from cupy_moe.kernels.finalize_rmsnorm import RANKS
from cupy_moe.runtime.arrays import HOST
from cupy_moe.runtime.devices import compute_capability
from cupy_moe.validate import MIN_COMPUTE_CAPABILITY

__all__ = ["Workspace", "open_workspace"]

Workspace: TypeAlias = "FinalizeWorkspace | HostWorkspace"

_logger = logging.getLogger("cupy_moe")


def open_workspace(
    operation: str, group: Group, device: int, sizes: WorkspaceSizes
) -> Workspace | None:
    """Make the workspace of a rank; every rank of the group together.

    Parameters
    ----------
    operation : str
        Names the operation in errors.
    group : Group
    device : int
        CUDA ordinal, or ``HOST`` for arrays in host memory.
    sizes : WorkspaceSizes

    Returns
    -------
    workspace or None
        None on every rank if any of them does not support it; the reason is logged.

    Raises
    ------
    ValueError, RuntimeError
        See `FinalizeWorkspace`; on every rank.
    """
    agree(group, operation, (sizes, "host memory" if device == HOST else "GPUs"))
    unsupported = vote(group, on_all(group, operation, lambda: _unsupported(group, device, sizes)))
    if unsupported:
        _logger.warning("%s: not supported: %s", operation, "; ".join(unsupported))
        return None
    if device == HOST:
        return HostWorkspace(
            group,
            hidden_size=sizes.hidden_size,
            top_k=sizes.top_k,
            timeout_s=sizes.timeout_s,
        )
    return FinalizeWorkspace(group, device, **asdict(sizes))


def _unsupported(group: Group, device: int, sizes: WorkspaceSizes) -> str | None:
    """Name what this rank cannot do."""
    if group.size not in RANKS:
        return f"{group.size} ranks"
    if device == HOST:
        return None
    if compute_capability(device) < MIN_COMPUTE_CAPABILITY:
        return f"the GPU of cuda:{device}"
    if not device_shapes(device, group.size, sizes.hidden_size, sizes.top_k):
        return f"hidden size {sizes.hidden_size} with top_k {sizes.top_k} on cuda:{device}"
    return None
