"""What is read from the driver about a device; the driver is simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cupy_moe.runtime import devices


@pytest.mark.parametrize(
    "answer",
    [
        b"NVIDIA H200",
        b"NVIDIA H200" + 100 * b"\0",
        b"NVIDIA H200" + 40 * b"\0" + 3 * b" ",
        b"NVIDIA H200 \0\xff",
    ],
)
def test_device_names_end_where_c_strings_end(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuDeviceGetName=lambda size, device: (0, answer))
    monkeypatch.setattr(devices, "import_driver", lambda: driver)
    assert devices.device_name(0) == "NVIDIA H200"
