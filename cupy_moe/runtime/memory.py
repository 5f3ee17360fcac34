"""A cache for values that cannot be computed from their keys alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import RLock
from typing import Generic, TypeVar

__all__ = ["Memory"]

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Memory(Generic[KeyT, ValueT]):
    """A dictionary that drops an old entry when full. Threads may share it.

    The oldest entry goes that was not read since it was last the oldest ("second chance"): almost
    what least recent use would choose, without moving the entry at every read.

    Parameters
    ----------
    max_entries : int
    """

    __slots__ = ("_entries", "_lock", "max_entries")

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[KeyT, _Entry[ValueT]] = OrderedDict()
        self._lock = RLock()  # keys may run Python code, and so do signal handlers

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._entries)

    def get(self, key: KeyT) -> ValueT | None:
        """Value by key, else None, without a lock."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.was_read = True
        return entry.value

    def insert(self, key: KeyT, value: ValueT) -> None:
        """Add or replace an entry."""
        entry, dropped = _Entry(value), []  # those go after the lock: they may run any code
        with self._lock:
            dropped.append(self._entries.pop(key, None))
            while len(self._entries) >= self.max_entries:
                oldest, candidate = self._entries.popitem(last=False)
                if candidate.was_read:
                    candidate.was_read = False
                    self._entries[oldest] = candidate
                else:
                    dropped.append(candidate)
            self._entries[key] = entry

    def cache_clear(self) -> None:
        """Drop all entries; named like that of the caches of the standard library."""
        with self._lock:
            dropped, self._entries = self._entries, OrderedDict()
        dropped.clear()


class _Entry(Generic[ValueT]):
    """A value, and whether it was read since it was last the oldest."""

    __slots__ = ("value", "was_read")

    def __init__(self, value: ValueT) -> None:
        self.value = value
        self.was_read = False
