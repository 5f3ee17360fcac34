"""Groups of ranks: the one exchange that setting up a workspace needs, over what the caller has."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from cupy_moe.validate import integer

__all__ = [
    "FileStore",
    "Group",
    "MpiGroup",
    "SingleRank",
    "Store",
    "StoreGroup",
    "ThreadGroup",
    "TorchGroup",
    "as_group",
]

_POLL_S = 0.002


class Group(ABC):
    """Ranks of a tensor-parallel group, numbered within it.

    Attributes
    ----------
    rank, size : int
        Within the group. A rank is no device number.
    key : object
        Equal for two objects that stand for the same group.
    is_thread : bool
        Whether other threads of this process are other ranks.
    """

    rank: int
    size: int
    key: object
    is_thread = False

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Exchange bytes of any length; collective. Entry q is what rank q gave."""

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self.all_gather(b"")

    def rendezvous(self, timeout_s: float) -> None:
        """Like `barrier`, for ranks that need not come.

        A kind of group without a bounded wait of its own waits as long as its `barrier` does.

        Raises
        ------
        TimeoutError
            A rank has not come in time, in seconds.
        """
        self.barrier()


def _wait_until(is_done: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"a rank has not come within {timeout_s:g} s")
        time.sleep(_POLL_S)


class SingleRank(Group):
    """A group of one."""

    rank, size, key = 0, 1, None

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Group.all_gather`."""
        return [data]


class TorchGroup(Group):
    """A ``torch.distributed`` process group, or a sub-group that this process belongs to.

    ``device`` is the CUDA ordinal of this rank, negative for none: a group of NCCL exchanges
    through the current device of torch, which may be another one.
    """

    def __init__(self, group: Any = None, device: int = -1) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._device = torch, dist, device
        self.key = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.key), dist.get_world_size(self.key)
        if self.rank < 0:
            raise ValueError("TorchGroup: this process does not belong to the process group.")

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Group.all_gather`."""
        gathered: list[Any] = [None] * self.size
        with self._current_device():
            self._dist.all_gather_object(gathered, data, group=self.key)
        return gathered

    def rendezvous(self, timeout_s: float) -> None:
        """See `Group.rendezvous`."""
        with self._current_device():
            work = self._dist.barrier(group=self.key, async_op=True)
            _wait_until(work.is_completed, timeout_s)
            work.wait()  # raises what went wrong

    def _current_device(self) -> AbstractContextManager[Any]:
        if self._device < 0 or not self._torch.cuda.is_available():
            return nullcontext()
        return self._torch.cuda.device(self._device)  # type: ignore[no-any-return]


class MpiGroup(Group):
    """An mpi4py communicator."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = self.key = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Group.all_gather`."""
        return list(self._communicator.allgather(data))

    def rendezvous(self, timeout_s: float) -> None:
        """See `Group.rendezvous`."""
        _wait_until(self._communicator.Ibarrier().Test, timeout_s)


class Store(Protocol):
    """Keys and values that all ranks see; the stores of ``torch.distributed`` are such."""

    def set(self, key: str, value: bytes) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""

    def check(self, keys: list[str]) -> bool:
        """Tell at once whether all keys have been set."""


class FileStore:
    """A store in a folder that all ranks see: one file a key.

    Parameters
    ----------
    folder : path
        Empty before the first rank starts, used by one group of processes only.
    timeout_s : float
        The longest wait for a key, in seconds.
    """

    def __init__(self, folder: str | Path, timeout_s: float = 300.0) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(value)
        Path(file.name).replace(self._folder / key)  # readers see the whole value or none

    def get(self, key: str) -> bytes:
        """See `Store.get`.

        Raises
        ------
        TimeoutError
            Nobody has set the key in time.
        """
        path, end = self._folder / key, time.monotonic() + self._timeout_s
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"FileStore: nobody has set {key} within {self._timeout_s:g} s; "
                    "is every rank running with the same folder?"
                )
            time.sleep(_POLL_S)
        return path.read_bytes()

    def check(self, keys: list[str]) -> bool:
        """See `Store.check`."""
        return all((self._folder / key).exists() for key in keys)


class StoreGroup(Group):
    """Plain processes that share a store.

    Parameters
    ----------
    rank, size : int
    store : Store
        `FileStore`, or a store of ``torch.distributed`` such as ``TCPStore``.
    name : str
        Tells groups apart that share one store.
    """

    def __init__(self, rank: int, size: int, store: Store, name: str = "cupy_moe") -> None:
        if not 0 <= rank < size:
            raise ValueError(f"StoreGroup: rank must be in [0, size = {size}), got {rank}.")
        self.rank, self.size, self.key = rank, size, (id(store), name)
        self._store, self._name, self._exchanges = store, name, 0

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Group.all_gather`."""
        return [bytes(self._store.get(key)) for key in self._give(data)]

    def rendezvous(self, timeout_s: float) -> None:
        """See `Group.rendezvous`. Who comes late finds that the others have come."""
        keys = self._give(b"")
        _wait_until(lambda: self._store.check(keys), timeout_s)

    def _give(self, data: bytes) -> list[str]:
        """Start the next exchange; the keys of all ranks in it."""
        keys = [f"{self._name}.{self._exchanges}.{q}" for q in range(self.size)]
        self._exchanges += 1
        self._store.set(keys[self.rank], data)
        return keys


class ThreadGroup:
    """Ranks that are threads of this process.

    Parameters
    ----------
    size : int
    timeout_s : float
        The longest wait for another thread, in seconds.

    Attributes
    ----------
    ranks : list of Group
        Entry q is for the thread that is rank q.

    Raises
    ------
    TypeError, ValueError
        ``size`` is no number of ranks.
    """

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        if integer("ThreadGroup", "size", size) < 1:
            raise ValueError(f"ThreadGroup: size must be at least 1, got {size}.")
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._data: list[bytes] = [b""] * size
        self.ranks: list[Group] = [_ThreadRank(self, rank, size) for rank in range(size)]

    def abort(self) -> None:
        """Break the waits of all threads, now and later: one of them cannot go on."""
        self._barrier.abort()

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        """Give the bytes of one rank and take those of all."""
        self._data[rank] = data
        self._barrier.wait()
        gathered = list(self._data)
        self._barrier.wait()  # nobody gives the next ones before all have taken these
        return gathered

    def wait(self, timeout_s: float) -> None:
        """Wait for all threads; a wait that ends early breaks all others, now and later."""
        try:
            self._barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"a thread has not come within {timeout_s:g} s") from None


class _ThreadRank(Group):
    is_thread = True

    def __init__(self, group: ThreadGroup, rank: int, size: int) -> None:
        self.rank, self.size, self.key = rank, size, group
        self._group = group

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._group.exchange(self.rank, data)

    def rendezvous(self, timeout_s: float) -> None:
        self._group.wait(timeout_s)


def as_group(group: Any, device: int = -1) -> Group:
    """Adapter for whatever stands for a group.

    Parameters
    ----------
    group : None, Group, torch.distributed.ProcessGroup or mpi4py.MPI.Comm
        None is the world of ``torch.distributed`` where that is initialized, else one rank.
    device : int
        CUDA ordinal of this rank, negative for none.

    Raises
    ------
    TypeError
        It is none of these.
    """
    if isinstance(group, Group):
        return group
    dist = sys.modules.get("torch.distributed")
    has_torch = dist is not None and dist.is_available()
    if group is None:
        if has_torch and dist.is_initialized():  # type: ignore[union-attr]
            return TorchGroup(None, device)
        return SingleRank()
    if has_torch and isinstance(group, dist.ProcessGroup):  # type: ignore[union-attr]
        return TorchGroup(group, device)
    if hasattr(group, "allgather") and hasattr(group, "Get_rank"):
        return MpiGroup(group)
    raise TypeError(
        "init_tp_moe_finalize_rmsnorm: group must be a torch.distributed process group, an mpi4py "
        f"communicator or a cupy_moe.comm group, got {type(group).__name__}."
    )
