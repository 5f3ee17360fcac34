"""End of a tensor-parallel layer: sum over ranks, RMSNorm of each expert row, weighted sum."""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict, dataclass
from typing import Any

from cupy_moe.comm.agreement import on_all
from cupy_moe.comm.groups import Group, as_group
from cupy_moe.comm.host import HostWorkspace
from cupy_moe.comm.opening import Workspace, open_workspace
from cupy_moe.comm.repeated import signature_of
from cupy_moe.comm.rules import (
    OPERATION,
    FinalizeArrays,
    WorkspaceSizes,
    check_arrays,
    check_backend,
    check_device,
    check_options,
    check_sizes,
)
from cupy_moe.comm.workspace import FinalizeWorkspace
from cupy_moe.runtime.arrays import HOST
from cupy_moe.runtime.devices import device_guard, stream_is_capturing
from cupy_moe.runtime.requirements import import_cupy, require_gpu
from cupy_moe.validate import ArrayLike

__all__ = [
    "check_tp_moe_finalize_rmsnorm",
    "close_tp_moe_finalize_rmsnorm",
    "init_tp_moe_finalize_rmsnorm",
    "supports_tp_moe_finalize_rmsnorm",
    "tp_moe_finalize_rmsnorm",
]

_INIT = f"init_{OPERATION}"


@dataclass(slots=True)
class _State:
    """What was initialized: for a group, with these sizes, and whether it can be used."""

    group: Group
    sizes: WorkspaceSizes
    device: int
    workspace: Workspace | None  # None: not supported


class _OfThread(threading.local):
    state: _State | None = None


class _Registry:
    """The workspace of the process, or of each thread that is a rank of its own."""

    def __init__(self) -> None:
        self._process: _State | None = None
        self._threads = _OfThread()

    def get(self) -> _State | None:
        return self._threads.state or self._process

    def set(self, state: _State | None, *, of_thread: bool) -> None:
        if of_thread:
            self._threads.state = state
        else:
            self._process = state

    def clear(self) -> None:
        self.set(None, of_thread=self._threads.state is not None)


_registry = _Registry()


def init_tp_moe_finalize_rmsnorm(
    group: Any = None,
    backend: str = "auto",
    *,
    device: int | None = None,
    hidden_size: int | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
) -> bool:
    """Make the workspace of `tp_moe_finalize_rmsnorm`; every rank of the group together.

    Allocates and maps the receive buffers of all ranks and loads the kernels, so that calls can be
    captured into CUDA graphs at once. A second call with the same group, or none, returns the
    first one's answer; what it says of the sizes and the device must be what the first one got.

    Parameters
    ----------
    group : None, torch.distributed.ProcessGroup, mpi4py.MPI.Comm or Group
        The tensor-parallel group, of 1, 2, 4 or 8 ranks. None: the world of ``torch.distributed``
        if that is initialized, else one rank. Plain processes pass a `StoreGroup`; ranks that are
        threads of one process pass their entry of ``ThreadGroup.ranks``, and each has a workspace
        of its own.
    backend : str
        ``"auto"``.
    device : int, optional
        CUDA ordinal of this rank's GPU, -1 for arrays in host memory. Default: the current device
        of torch, if torch is loaded and uses CUDA, else of CuPy; host memory if there is no GPU.
    hidden_size : int, default 4096
        Columns of a row: a multiple of 8, at most 16,384.
    top_k : int, default 8
        Expert slots of a token, at most 32.
    max_tokens : int, default 1024
        Tokens of one launch; a call of more takes several. Receive buffers have three copies of
        ``max_tokens * top_k * hidden_size`` BF16 divided by the number of ranks, from each other
        rank.
    timeout_s : float, default 30
        The longest that a launch waits for other ranks, in seconds.
    transport : str, default "auto"
        ``"ipc"``: stores into mapped memory of the peers. ``"nccl"``: messages, for ranks that
        cannot map each other's memory; calls then wait for other ranks without a limit, and it is
        closing that aborts them. ``"auto"``: the first if all ranks can, else the second; the
        change is logged once.

    Returns
    -------
    bool
        Whether the operation can run, the same on every rank: False for another number of ranks,
        a GPU below compute capability 8.0, or rows of more than 4096 columns below 9.0. The reason
        is logged.

    Raises
    ------
    TypeError, ValueError
        A group of no known kind, a size that no workspace can have, or another one than on other
        ranks.
    RuntimeError
        Initialized for another group, device or sizes already. On any rank a CUDA graph is being
        captured, a package or the device is missing, or memory could not be allocated or mapped;
        every rank is told which one, after all has been given back.

    Notes
    -----
    Collective, and ends with a barrier. Not to be called from several threads of one rank.

    Launches of ranks on one GPU must be resident at once, so ranks of one group and of one process
    divide its multiprocessors. Groups of other processes on the same GPU are not known to each
    other and could wait for each other's room; give them GPUs or green contexts of their own.
    """
    check_backend(_INIT, backend)
    given = {
        "hidden_size": hidden_size,
        "top_k": top_k,
        "max_tokens": max_tokens,
        "timeout_s": timeout_s,
        "transport": transport,
    }
    state = _registry.get()
    if state is not None and (group is None or as_group(group).key == state.group.key):
        sizes = _sizes(state.sizes, given)
        if sizes != state.sizes:
            raise RuntimeError(
                f"{_INIT}: initialized with {state.sizes} already, got {sizes}. Call "
                f"close_{OPERATION} on every rank first."
            )
        if device is not None and device != state.device:
            raise RuntimeError(
                f"{_INIT}: initialized for device {state.device} already, got {device}. Call "
                f"close_{OPERATION} on every rank first."
            )
        return state.workspace is not None
    sizes = _sizes(WorkspaceSizes(), given)
    where = _default_device() if device is None else check_device(_INIT, device)
    ranks = as_group(group, where)
    if state is not None and not (ranks.is_thread and not state.group.is_thread):
        raise RuntimeError(
            f"{_INIT}: initialized for another group already. Call close_{OPERATION} on every rank "
            "first."
        )
    on_all(ranks, _INIT, lambda: _refuse_capture(where))
    workspace = open_workspace(_INIT, ranks, where, sizes)
    _registry.set(_State(ranks, sizes, where, workspace), of_thread=ranks.is_thread)
    return workspace is not None


def _sizes(default: WorkspaceSizes, given: dict[str, Any]) -> WorkspaceSizes:
    said = {name: value for name, value in given.items() if value is not None}
    return check_sizes(_INIT, **{**asdict(default), **said})


def _default_device() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    try:
        return int(import_cupy().cuda.runtime.getDevice())
    except Exception:  # no CuPy, no driver, no device: arrays are in host memory
        return HOST


def _refuse_capture(device: int) -> None:
    if device == HOST:
        return
    require_gpu()
    streams = [int(import_cupy().cuda.get_current_stream(device).ptr)]
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        streams.append(int(sys.modules["torch"].cuda.current_stream(device).cuda_stream))
    with device_guard(device):
        if any(stream_is_capturing(stream) for stream in streams):
            raise RuntimeError(
                f"{_INIT}: a CUDA graph is being captured, and memory cannot be shared with other "
                "ranks meanwhile. Initialize before the capture."
            )


def close_tp_moe_finalize_rmsnorm() -> None:
    """Give the workspace back; every rank of the group together, whatever has failed before.

    No graph with a call of it may be replayed later. Does nothing if nothing is initialized.

    Waits for the other ranks, but not for ever: for as long as a launch of theirs may wait
    (``timeout_s``) and as long again, at least 5 s. Without all of them, memory that a late launch
    of another rank could still write into stays allocated; a warning of the logger ``cupy_moe``
    says so. Waits for the device, so no stream of it may be captured meanwhile.
    """
    state = _registry.get()
    if state is not None:
        _registry.clear()
        if state.workspace is not None:
            state.workspace.close()


def check_tp_moe_finalize_rmsnorm() -> None:
    """Raise if a launch that has run gave up waiting for another rank.

    Does not wait for launches: synchronize first to hear of all of them. The next call of
    `tp_moe_finalize_rmsnorm` does the same.

    Raises
    ------
    PeerTimeoutError
    """
    state = _registry.get()
    if state is not None and state.workspace is not None:
        state.workspace.check()


def supports_tp_moe_finalize_rmsnorm(
    gemm2_permuted: ArrayLike,
    expert_weights: ArrayLike,
    expanded_idx_to_permuted_idx: ArrayLike,
    norm_weight: ArrayLike,
    output: ArrayLike,
    backend: str = "auto",
) -> bool:
    """Whether `tp_moe_finalize_rmsnorm` accepts these arrays; without communication.

    Parameters
    ----------
    gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, norm_weight, output : array
        See `tp_moe_finalize_rmsnorm`.
    backend : str
        ``"auto"``.

    Returns
    -------
    bool
        False before `init_tp_moe_finalize_rmsnorm`.

    Raises
    ------
    ValueError
        An unknown backend.
    """
    check_backend(f"supports_{OPERATION}", backend)
    state = _registry.get()
    if state is None or state.workspace is None:
        return False
    arrays = (
        gemm2_permuted,
        expert_weights,
        expanded_idx_to_permuted_idx,
        norm_weight,
        output,
    )
    try:
        _check(state, arrays)
    except (TypeError, ValueError):
        return False
    return True


def tp_moe_finalize_rmsnorm(
    gemm2_permuted: ArrayLike,
    expert_weights: ArrayLike,
    expanded_idx_to_permuted_idx: ArrayLike,
    norm_weight: ArrayLike,
    output: ArrayLike,
    *,
    eps: float,
    gain_center: float,
    weight_before_norm: bool,
    backend: str = "auto",
) -> None:
    """Sum expert rows over the ranks, normalize each row and add them by routing weight.

    With ``valid_q(t, k) = 0 <= index_q[t, k] < R_q`` on rank q of P::

        row(t, k)  = bf16(sum over q, in rank order from +0.0, of
                          gemm2_q[index_q[t, k], :H] if valid_q(t, k) else 0)
        g          = norm_weight + gain_center
        v          = row * g  if weight_before_norm else  row
        rstd       = rsqrt(mean(v^2) + eps)
        y(t, k)    = v * rstd  if weight_before_norm else  v * rstd * g
        output[t]  = bf16(sum over k of y(t, k) * expert_weights[t, k])

    in FP32 between the two roundings. The rows are the same bits on every rank; so is the output.

    Takes what the layers return with ``do_finalize=False``.

    Parameters
    ----------
    gemm2_permuted : array, shape (R, W >= H), dtype bfloat16
        FC2 rows of this rank, its share of the intermediate dimension, in permuted order. Columns
        from H on and rows that no index names are not read. Rows may be further apart than W.
    expert_weights : array, shape (T, K), dtype bfloat16 or float32
        Routing weights; the same values on every rank.
    expanded_idx_to_permuted_idx : array, shape (T, K) or (T * K,), dtype int32
        Row of each slot on this rank; outside [0, R) the slot has no row here and adds zero.
    norm_weight : array, shape (H,), dtype bfloat16
        The same on every rank.
    output : array, shape (T, H), dtype bfloat16
        Written; must not overlap an input.
    eps, gain_center : float
        The same on every rank.
    weight_before_norm : bool
        Whether the gain is applied before the norm is taken; the same on every rank.
    backend : str
        ``"auto"``.

    Raises
    ------
    ValueError
        The arrays do not satisfy the contract, or nothing is initialized; says which and why.
    TypeError
        A scalar of another kind.
    PeerTimeoutError
        An earlier call gave up waiting for another rank.
    RuntimeError
        Calls of one CUDA graph are captured on several streams.

    Notes
    -----
    Every rank makes the same calls in the same order, with the same T and scalars. Runs on the
    current stream of the output's library and returns at once; arrays in host memory are computed
    before it returns. Eager calls wait for each other on whatever streams they are; replays of
    graphs are ordered by the caller, among themselves and against eager calls. T = 0 does nothing.

    Deterministic for a given number of ranks and T; the last bit of an output element may depend
    on both, as the scheme of communication decides how the slots are added up. A launch that waits
    longer than the workspace's ``timeout_s`` ends, and what it could not finish of its output is
    NaN; a rank that needs what that launch would have sent gives up as well. With NCCL a call waits
    without a limit, until the workspace is closed.
    """
    arrays = (gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, norm_weight, output)
    scalars = (eps, gain_center, weight_before_norm, backend)
    state = _registry.get()
    workspace = None if state is None else state.workspace
    key = None
    if isinstance(workspace, FinalizeWorkspace):
        signature = signature_of(arrays, scalars, workspace.device)
        if signature is not None:
            key, addresses, stream = signature
            if workspace.repeat(key, addresses, stream):
                return
    check_backend(OPERATION, backend)
    options = check_options(eps, gain_center, weight_before_norm)
    if state is None or workspace is None:
        reason = "not initialized" if state is None else "not supported by this group or GPU"
        raise ValueError(
            f"{OPERATION}: tensors do not satisfy the TP MoE finalize contract: the operation is "
            f"{reason}. Call {_INIT} on every rank first."
        )
    checked = _check(state, arrays)
    if checked.num_tokens == 0:
        return
    if isinstance(workspace, HostWorkspace):
        workspace.run(checked, options)
    else:
        stream = checked.output.framework.current_stream(workspace.device)
        workspace.run(checked, options, stream, key)


def _check(state: _State, arrays: tuple[ArrayLike, ...]) -> FinalizeArrays:
    assert state.workspace is not None
    sizes, device = state.sizes, state.workspace.device
    return check_arrays(*arrays, device=device, hidden_size=sizes.hidden_size, top_k=sizes.top_k)
