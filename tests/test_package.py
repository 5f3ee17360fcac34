"""What a wheel and a source distribution contain."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def sources(folder: str, *suffixes: str) -> set[str]:
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_wheel_holds_package_and_cuda_sources(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert sources("cupy_moe", ".py") | {"cupy_moe/py.typed"} <= names
    assert {f"cupy_moe/{name}" for name in sources("cuda_src", ".cu", ".cuh")} <= names
    assert not any(name.startswith(("tests/", "notebooks/")) for name in names)


def test_sdist_holds_everything(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    everything = sources("cupy_moe", ".py") | sources("cuda_src", ".cu", ".cuh")
    everything |= sources("tests", ".py", ".npz", ".cu", ".cuh") | sources("notebooks", ".ipynb")
    assert everything | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
