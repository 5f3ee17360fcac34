"""How many ranks of this process are on a device: all their blocks must be resident at once."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["count_residents", "enter_device", "leave_device"]

_counts: Counter[int] = Counter()  # open workspaces of all groups, by CUDA ordinal
_lock = threading.Lock()


def enter_device(device: int) -> None:
    """Say that a workspace is opened on a device."""
    with _lock:
        _counts[device] += 1


def leave_device(device: int) -> None:
    """Say that it is closed."""
    with _lock:
        _counts[device] -= 1


def count_residents(device: int) -> int:
    """Count the open workspaces of this process on a device."""
    return _counts[device]
