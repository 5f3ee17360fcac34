"""Order of calls on several streams, with events and captures that are only recorded."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_moe.comm import streams
from cupy_moe.comm.streams import StreamOrder

captures: dict[int, int] = {}
identities: dict[int, int] = {}


class Event:
    log: list[tuple[str, int]] = []  # noqa: RUF012 (cleared by the fixture)

    def __init__(self, device: int) -> None:
        pass

    def record(self, stream: int) -> None:
        self.log.append(("record", stream))

    def block(self, stream: int) -> None:
        self.log.append(("block", stream))

    def close(self) -> None:
        self.log.append(("close", 0))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> StreamOrder:
    Event.log.clear()
    captures.clear()
    identities.clear()
    monkeypatch.setattr(streams, "Event", Event)
    monkeypatch.setattr(streams, "stream_is_capturing", captures.__contains__)
    monkeypatch.setattr(streams, "_capture_of", captures.__getitem__)
    monkeypatch.setattr(streams, "_identity_of", lambda stream: identities.get(stream, stream))
    return StreamOrder("op", 0)


def call(order: StreamOrder, stream: int) -> bool:
    """Whether the call is captured."""
    identity = order.before(stream)
    if identity is None:
        return True
    assert identity == identities.get(stream, stream)
    order.after(stream)
    return False


def waits() -> list[Any]:
    return [entry for entry in Event.log if entry[0] == "block"]


def test_calls_on_one_stream_need_no_wait(order: StreamOrder) -> None:
    for _ in range(3):
        call(order, 7)
    assert waits() == []


def test_another_stream_waits_for_the_last_call(order: StreamOrder) -> None:
    for stream in (7, 8, 8, 7):
        call(order, stream)
    assert Event.log == [
        ("record", 7),
        ("block", 8),
        ("record", 8),
        ("record", 8),
        ("block", 7),
        ("record", 7),
    ]


def test_a_new_stream_at_the_address_of_an_old_one(order: StreamOrder) -> None:
    call(order, 7)
    identities[7] = 8
    call(order, 7)
    assert waits() == [("block", 7)]


def test_captured_calls_touch_no_event(order: StreamOrder) -> None:
    call(order, 7)
    Event.log.clear()
    captures[8] = 1
    assert call(order, 8)
    assert call(order, 8)
    assert Event.log == []
    assert not call(order, 7)
    assert waits() == []  # nothing ran on stream 8


def test_one_capture_on_two_streams(order: StreamOrder) -> None:
    captures.update({7: 1, 8: 1})
    call(order, 7)
    with pytest.raises(RuntimeError, match="op: calls of one CUDA graph must be on one stream"):
        call(order, 8)


def test_another_capture_on_another_stream(order: StreamOrder) -> None:
    captures.update({7: 1, 8: 2})
    assert call(order, 7)
    assert call(order, 8)
