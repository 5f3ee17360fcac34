"""Selection of GPU tests, and the evidence that a run of them leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_evidence import Evidence, EvidencePlugin

MIN_COMPUTE_CAPABILITY = 80


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpu-report``."""
    parser.addoption(
        "--gpu-report",
        type=Path,
        help="write the evidence of whatever GPU tests ran to this path; without it, a run of the "
        "whole GPU suite writes tests/gpu_report.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the evidence plugin."""
    config.pluginmanager.register(EvidencePlugin(path=config.option.gpu_report), "gpu-evidence")


def missing_gpu() -> str | None:
    """Say why GPU tests cannot run here; None if they can. Creates no CUDA context."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        capability = int(cupy.cuda.Device(0).compute_capability) if count else 0
    except Exception as error:  # absent package, driver or device: all mean no
        return f"no usable GPU: {type(error).__name__}: {error}"
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"no GPU of compute capability 8.0 or newer (found {count} devices)"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU leave GPU tests out, or skip them where they were asked for by the marker."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if gpu_items else None
    if reason is None or config.option.collectonly:
        return
    if "gpu" in config.option.markexpr:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    config.hook.pytest_deselected(items=gpu_items)
    items[:] = [item for item in items if item not in gpu_items]


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """Collector of error figures and benchmark rows for the GPU report."""
    return request.config.pluginmanager.get_plugin("gpu-evidence").evidence
