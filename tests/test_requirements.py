from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe.runtime import require_gpu, requirements

PIP = r'pip install "cupy-moe\[cuda13\]".*pip install "cupy-moe\[cuda12\]"'


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Forget what earlier calls found, before and after."""
    functions = (requirements.import_cupy, requirements.import_core, requirements.import_driver)
    for function in (*functions, require_gpu):
        function.cache_clear()
    yield
    for function in (*functions, require_gpu):
        function.cache_clear()


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for everything that a GPU needs; tests take parts away."""
    nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
    cupy = SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc))
    driver = SimpleNamespace(cuInit=lambda _: (0,), cuDeviceGetCount=lambda: (0, 1))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    installed = {"cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(requirements, "_installed_version", installed.get)
    return SimpleNamespace(nvrtc=nvrtc, driver=driver, installed=installed)


def failing(error: Exception) -> Any:
    def call(*_args: Any) -> None:
        raise error

    return call


def test_complete_setup_passes_and_is_checked_once(complete: SimpleNamespace) -> None:
    require_gpu()
    complete.driver.cuInit = failing(AssertionError("checked twice"))
    require_gpu()


@pytest.mark.parametrize(
    ("module", "package"), [("cupy", "CuPy"), ("cuda.bindings.driver", "cuda-bindings")]
)
def test_missing_package(
    module: str, package: str, complete: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete.installed
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=f"needs {package} .*{PIP}"):
        require_gpu()


def test_two_cupy_wheels(complete: SimpleNamespace) -> None:
    complete.installed["cupy-cuda12x"] = "13.6.0"
    message = (
        r"2 CuPy packages are installed \(cupy-cuda12x 13.6.0, cupy-cuda13x 14.2.0\).*"
        rf"pip uninstall -y cupy-cuda12x cupy-cuda13x .*{PIP}"
    )
    with pytest.raises(RuntimeError, match=message):
        require_gpu()


def test_nvrtc_that_cannot_be_loaded(complete: SimpleNamespace) -> None:
    complete.nvrtc.getVersion = failing(RuntimeError("libnvrtc.so.13: cannot open"))
    complete.installed["nvidia-cuda-nvrtc-cu12"] = "12.9.86"
    message = (
        r"NVRTC.*libnvrtc.so.13: cannot open.*Found: cupy-cuda13x 14.2.0, "
        rf"nvidia-cuda-nvrtc-cu12 12.9.86.*same CUDA major version.*{PIP}"
    )
    with pytest.raises(RuntimeError, match=message):
        require_gpu()


def test_no_driver(complete: SimpleNamespace) -> None:
    complete.driver.cuInit = failing(RuntimeError("libcuda.so.1 not found"))
    with pytest.raises(RuntimeError, match=r"driver is not installed or too old: libcuda"):
        require_gpu()


def test_no_device(complete: SimpleNamespace) -> None:
    complete.driver.cuDeviceGetCount = lambda: (0, 0)
    with pytest.raises(RuntimeError, match=r"no device is visible.*CUDA_VISIBLE_DEVICES"):
        require_gpu()
    complete.driver.cuInit = lambda _: (SimpleNamespace(name="CUDA_ERROR_NO_DEVICE"),)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NO_DEVICE"):
        require_gpu()


def test_installed_version_reads_the_distribution() -> None:
    assert requirements._installed_version("numpy") == importlib.metadata.version("numpy")
    assert requirements._installed_version("cupy-moe-no-such-package") is None
