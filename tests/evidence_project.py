"""A small project with a GPU suite, and runs of it, for the tests of the GPU evidence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu_evidence import EvidencePlugin

__all__ = ["KERNEL_TEST", "PASSING", "make_project", "report_of", "run_suite", "write_suite"]

KERNEL_TEST = "tests/gpu/test_kernel.py"

PASSING = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("case", ["one", "two"])
def test_kernel(case):
    assert case

def test_on_the_cpu():
    pass
"""


def make_project(tmp_path: Path) -> Path:
    """Build a project with two hashed folders and a GPU suite of two tests."""
    for name, text in {
        "cuda_src/common/types.cuh": "// types",
        "cuda_src/route.cu": "// route",
        "cupy_moe/plan.py": "TILE = 8\n",
        "cupy_moe/__pycache__/plan.cpython-312.pyc": "cache",
        KERNEL_TEST: PASSING,
        "README.md": "not hashed",
        "pytest.ini": "[pytest]\nmarkers = gpu: needs a GPU\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def write_suite(project: Path, statement: str = "assert case") -> None:
    """Let both tests of the GPU suite do this."""
    (project / KERNEL_TEST).write_text(PASSING.replace("assert case", statement))


def run_suite(
    project: Path, *args: str, path: Path | None = None, ends: int | None = None
) -> EvidencePlugin:
    """Run pytest on the project inside this process, with a made-up environment section."""
    plugin = EvidencePlugin(project, path, describe=lambda: {"gpu": "made up"})
    arguments = args if any(not a.startswith("-") for a in args) else (*args, str(project))
    common = ["-q", "-p", "no:cacheprovider", "--rootdir", str(project)]
    code = pytest.main([*common, "-c", str(project / "pytest.ini"), *arguments], plugins=[plugin])
    sys.modules.pop("test_kernel", None)  # the next project has another file of this name
    usual = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    assert code in (usual if ends is None else {ends})
    return plugin


def report_of(project: Path) -> Path:
    """Return where a whole run writes."""
    return project / "tests" / "gpu_report.json"
