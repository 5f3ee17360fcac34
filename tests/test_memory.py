"""What a memory keeps, and that those who are dropped may use it."""

from __future__ import annotations

import weakref

import pytest

from cupy_moe.runtime.memory import Memory


def test_values_by_key() -> None:
    memory: Memory[str, int] = Memory(3)
    assert memory.get("a") is None
    memory.insert("a", 1)
    memory.insert("b", 2)
    memory.insert("a", 3)
    assert (memory.get("a"), memory.get("b"), len(memory)) == (3, 2, 2)
    memory.cache_clear()
    assert (memory.get("a"), len(memory)) == (None, 0)


def test_what_is_read_stays() -> None:
    """However many others come by; of those never read, the oldest goes."""
    memory: Memory[int, int] = Memory(4)
    memory.insert(-1, 0)
    for key in range(100):
        assert memory.get(-1) == 0
        memory.insert(key, key)
    assert len(memory) == 4
    assert [memory.get(key) for key in (96, 97, 98, 99)] == [None, 97, 98, 99]


def test_what_is_read_no_more_goes() -> None:
    memory: Memory[int, int] = Memory(4)
    for key in range(4):
        memory.insert(key, key)
        memory.get(key)
    for key in range(4, 12):
        memory.insert(key, key)
    assert [key for key in range(12) if memory.get(key) is not None] == [8, 9, 10, 11]


def test_a_replaced_value_costs_no_other_its_place() -> None:
    memory: Memory[str, int] = Memory(2)
    memory.insert("a", 1)
    memory.insert("b", 2)
    memory.insert("b", 3)
    assert (memory.get("a"), memory.get("b")) == (1, 3)


class Value:
    pass


@pytest.mark.parametrize("how", ["evicted", "replaced", "cleared"])
def test_finalizers_may_use_the_memory(how: str) -> None:
    """They find it whole, with the new entry, and not locked."""
    memory: Memory[str, Value] = Memory(2)
    found: list[tuple[bool, int, bool]] = []

    def use() -> None:
        is_locked = memory._lock._is_owned()  # type: ignore[attr-defined]
        found.append((memory.get("new") is not None, len(memory), is_locked))
        memory.insert("from the finalizer", Value())

    value = Value()
    finalizer = weakref.finalize(value, use)
    memory.insert("old", value)
    memory.insert("other", Value())
    del value
    assert finalizer.alive
    if how == "cleared":
        memory.cache_clear()
    else:
        memory.insert("new" if how == "evicted" else "old", Value())
    assert found == [(how == "evicted", 0 if how == "cleared" else 2, False)]
    assert memory.get("from the finalizer") is not None
