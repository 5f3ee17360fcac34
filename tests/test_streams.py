"""CuPy's view of other libraries' streams; CuPy is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe.runtime import streams
from cupy_moe.runtime.streams import cupy_stream

destroyed: list[int] = []


class ExternalStream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Stream:
    """As in releases whose wrapper takes the stream with it."""

    null = ExternalStream(0)

    @classmethod
    def from_external(cls, owner: Any) -> Stream:
        stream = cls()
        version, stream.ptr = owner.__cuda_stream__()
        assert version == 0
        return stream

    def __del__(self) -> None:
        destroyed.append(self.ptr)


def deprecated(ptr: int) -> None:
    raise AssertionError("ExternalStream is deprecated where from_external exists")


NEW = SimpleNamespace(Stream=Stream, ExternalStream=deprecated)
OLD = SimpleNamespace(Stream=SimpleNamespace(null=Stream.null), ExternalStream=ExternalStream)


@pytest.fixture(params=[OLD, NEW], ids=["13", "14"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(streams, "import_cupy", lambda: SimpleNamespace(cuda=request.param))
    cupy_stream.cache_clear()
    yield request.param
    cupy_stream.cache_clear()


def test_every_release_of_cupy_wraps_a_stream(cuda: Any) -> None:
    assert cupy_stream(0x5000).ptr == 0x5000
    assert cupy_stream(0x6000).ptr == 0x6000


def test_the_default_stream_is_cupys_own(cuda: Any) -> None:
    assert cupy_stream(0) is cuda.Stream.null


def test_the_stream_outlives_its_wrapper(cuda: Any) -> None:
    destroyed.clear()
    cupy_stream(0x7000)
    gc.collect()
    assert destroyed == []


def test_the_installed_cupy_does_not_complain() -> None:
    pytest.importorskip("cupy")
    cupy_stream.cache_clear()
    stream = cupy_stream(0x5000)  # never used, so it need not exist
    assert stream.ptr == 0x5000
    assert cupy_stream(0x5000) is stream
