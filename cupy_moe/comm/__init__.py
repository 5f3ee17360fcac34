"""Operations that the ranks of a tensor-parallel group run together."""

from cupy_moe.comm.errors import PeerTimeoutError
from cupy_moe.comm.finalize_rmsnorm import (
    check_tp_moe_finalize_rmsnorm,
    close_tp_moe_finalize_rmsnorm,
    init_tp_moe_finalize_rmsnorm,
    supports_tp_moe_finalize_rmsnorm,
    tp_moe_finalize_rmsnorm,
)
from cupy_moe.comm.groups import FileStore, Group, StoreGroup, ThreadGroup
from cupy_moe.comm.rules import FinalizeArrays, NormOptions, check_arrays
from cupy_moe.comm.workspace import FinalizeWorkspace

__all__ = [
    "FileStore",
    "FinalizeArrays",
    "FinalizeWorkspace",
    "Group",
    "NormOptions",
    "PeerTimeoutError",
    "StoreGroup",
    "ThreadGroup",
    "check_arrays",
    "check_tp_moe_finalize_rmsnorm",
    "close_tp_moe_finalize_rmsnorm",
    "init_tp_moe_finalize_rmsnorm",
    "supports_tp_moe_finalize_rmsnorm",
    "tp_moe_finalize_rmsnorm",
]
