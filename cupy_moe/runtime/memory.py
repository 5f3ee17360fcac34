"""A cache for values that cannot be computed from their keys alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

__all__ = ["Memory"]

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Memory(Generic[KeyT, ValueT]):
    """A dictionary that drops its oldest entry when full. Threads may share it.

    Parameters
    ----------
    max_entries : int

    Attributes
    ----------
    get : callable
        That of the dictionary: a value by key, else None, without a lock.
    """

    __slots__ = ("_entries", "_lock", "get", "max_entries")

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()
        self._lock = Lock()
        self.get = self._entries.get

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._entries)

    def insert(self, key: KeyT, value: ValueT) -> None:
        """Add or replace an entry."""
        with self._lock:
            if len(self._entries) >= self.max_entries:
                self._entries.popitem(last=False)
            self._entries[key] = value

    def cache_clear(self) -> None:
        """Drop all entries; named like that of the caches of the standard library."""
        with self._lock:
            self._entries.clear()
