"""compute-sanitizer over small calls: no access out of bounds, no race, no misused barrier."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.gpu.support import ROOT

pytestmark = pytest.mark.gpu

# The tool and the cases it runs; racecheck instruments every shared-memory access.
TOOLS = {"memcheck": "all", "racecheck": "few", "synccheck": "few"}
# Where a warp meets and one lane arrives for it, racecheck reports what the other lanes have read.
BUILDS = {"racecheck": "-DCUPY_MOE_EVERY_LANE_ARRIVES"}
REFUSALS = ("Device not supported", "not supported on this")


def find_sanitizer() -> str | None:
    """``compute-sanitizer`` on PATH or in the default CUDA folder."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_no_errors(tool: str) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
    if tool == "memcheck":
        # Libraries probe the driver with calls that fail; ours raise, and the cases would not end.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "tests.gpu.sanitizer_cases", TOOLS[tool]]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUPY_MOE_NVRTC_OPTIONS": BUILDS.get(tool, ""),
        },
        check=False,
    )
    output = f"{result.stdout}\n{result.stderr}"
    if any(refusal in output for refusal in REFUSALS):
        pytest.skip(f"compute-sanitizer cannot run on this machine: {output[-300:]}")
    assert "CASES DONE" in output, output[-4000:]
    assert re.search(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", output), output
    assert result.returncode == 0, output[-4000:]
