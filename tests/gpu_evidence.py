"""Evidence that the GPU suite passed on the sources as they are.

Continuous integration has no GPU. A full run of the GPU suite (``pytest -m gpu``) on a machine that
has one writes ``tests/gpu_report.json``: what ran where, how it ended, how large the errors were
and what the benchmarks measured, together with a hash of everything a kernel's result depends on.
``python tests/gpu_evidence.py --check`` then fails in CI when sources and report have drifted
apart, or when the report lacks a test of the suite. ``--add-run`` adds a run of tests that had
failed for a fault of their own, that were skipped where the suite ran, for want of GPUs, or that it
did not reach: the sources are the same, and the report says so. ``--mark-unverified`` states openly
that the present sources have not been on a GPU yet, or not all of the suite: the figures stay, with
the hash of the tree that they were measured on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from cupy_moe.testing.compare import Errors

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_report.json"
HASHED_FOLDERS = ("cuda_src", "cupy_moe")
SECTIONS = ("environment", "tests", "errors", "benchmarks")
SIGNIFICANT_DIGITS = 4
Describe = Callable[[], Mapping[str, str]]


# --- the tree ---------------------------------------------------------------------------------


def source_files(root: Path) -> Iterator[Path]:
    """Yield the files that the hash covers, sorted by their path relative to ``root``."""
    files = (path for folder in HASHED_FOLDERS for path in (root / folder).rglob("*"))
    yield from sorted(
        (path for path in files if path.is_file() and not _is_cache(path.relative_to(root))),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def _is_cache(relative: Path) -> bool:
    return relative.suffix in {".pyc", ".pyo"} or any(
        part == "__pycache__" or part.startswith(".") for part in relative.parts
    )


def tree_hash(root: Path = ROOT) -> str:
    """Return the SHA-256 over path, length and bytes of every source file, as hex."""
    digest = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


# --- the report -------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Describe the GPU, the driver and the versions of everything a result may depend on."""
    import cupy

    major, minor = cupy.cuda.nvrtc.getVersion()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].partition(b"\0")[0].decode().strip(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": str(properties["multiProcessorCount"]),
        "driver": _nvidia_driver(),
        "cuda_driver_api": _dotted(cupy.cuda.runtime.driverGetVersion()),
        "cuda_runtime": _dotted(cupy.cuda.runtime.runtimeGetVersion()),
        "nvrtc": f"{major}.{minor}",
        "python": platform.python_version(),
        **{
            name: _version(name)
            for name in ("numpy", "ml_dtypes", "torch", "cuda-bindings", "humming-kernels")
        },
        "cupy": cupy.__version__,
    }


def _dotted(cuda_version: int) -> str:
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def _nvidia_driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


class Evidence:
    """Collects the figures that tests report through the ``evidence`` fixture."""

    def __init__(self) -> None:
        self.error_figures: dict[str, dict[str, Any]] = {}
        self.benchmark_rows: dict[str, dict[str, Any]] = {}

    def errors(self, name: str, errors: Errors) -> None:
        """Record the figures of one comparison under a name that is unique in the suite."""
        figures = ("rel_l2", "max_abs_over_max_ref", "bit_equal", "max_row_rel_l2")
        self._add(self.error_figures, name, {f: getattr(errors, f) for f in figures})

    def benchmark(self, name: str, row: Mapping[str, Any]) -> None:
        """Record one row of plain numbers (units in the keys: ``us``, ``tb_per_s``, ...)."""
        self._add(self.benchmark_rows, name, dict(row))

    @staticmethod
    def _add(section: dict[str, dict[str, Any]], name: str, row: dict[str, Any]) -> None:
        if name in section:
            raise ValueError(f"evidence: two rows are named {name!r}")
        section[name] = {key: _rounded(value) for key, value in row.items()}


def _rounded(value: Any) -> Any:
    """Keep what is significant; JSON has no infinity and no NaN, so they become words."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else str(value)


def build_report(
    evidence: Evidence,
    outcomes: Mapping[str, tuple[str, float]],
    where: Mapping[str, str],
    tree: str,
) -> dict[str, Any]:
    """Assemble the report; its status is "passed" if tests passed and none failed.

    Skipped tests stay visible in the report and in the sentence that ``--check`` prints.
    """
    ends = {outcome for outcome, _ in outcomes.values()}
    passed = "passed" in ends and ends <= {"passed", "skipped"}
    return {
        "status": "passed" if passed else "failed",
        "tree": tree,
        "measured_tree": tree,
        "environment": dict(where),
        "tests": {name: [outcome, round(s, 2)] for name, (outcome, s) in outcomes.items()},
        "errors": evidence.error_figures,
        "benchmarks": evidence.benchmark_rows,
    }


def dump(report: Mapping[str, Any]) -> str:
    """Format as JSON with sorted keys and one entry a line, so that differences read well."""
    parts = [
        f"{json.dumps(key)}: {_dump_section(value) if key in SECTIONS else json.dumps(value)}"
        for key, value in sorted(report.items())
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _dump_section(section: Mapping[str, Any]) -> str:
    rows = [
        f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(section.items())
    ]
    return "{\n" + ",\n".join(rows) + "\n}" if rows else "{}"


# --- the pytest plugin ------------------------------------------------------------------------


class EvidencePlugin:
    """Writes the report at the end of a session that ran the whole GPU suite.

    Parameters
    ----------
    root : Path
        The project; the GPU suite is every test below its ``tests`` that carries the gpu mark.
    path : Path or None
        Where to write whatever was run (``--gpu-report``); None writes only a whole suite.
    describe : callable
        Gives the environment section.
    """

    def __init__(
        self, root: Path = ROOT, path: Path | None = None, describe: Describe = environment
    ) -> None:
        self.root = root
        self.path = path
        self.describe = describe
        self.evidence = Evidence()
        self.outcomes: dict[str, tuple[str, float]] = {}
        self.phases: dict[str, tuple[str, float]] = {}  # of the test that is running
        self.selected: set[str] = set()
        self.whole = True

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Notice a selection that leaves part of the GPU suite out."""
        if any(item.get_closest_marker("gpu") for item in items):
            self.whole = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what is going to run, and whether that is everything below ``tests``."""
        self.selected = {item.nodeid for item in session.items if item.get_closest_marker("gpu")}
        here = session.config.invocation_params.dir
        asked = {(here / arg).resolve() for arg in session.config.args}
        self.whole &= asked <= {self.root, self.root / "tests"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep each GPU test's worst outcome and total duration, once it has ended."""
        if report.nodeid not in self.selected:
            return
        outcome, seconds = self.phases.pop(report.nodeid, ("passed", 0.0))
        outcome = report.outcome if outcome == "passed" else outcome
        kept = self.outcomes if report.when == "teardown" else self.phases
        kept[report.nodeid] = (outcome, seconds + report.duration)

    def pytest_sessionfinish(self) -> None:
        """Write the report if there is one to write."""
        # Of a test that was interrupted only that it had failed by then is known.
        self.outcomes |= {name: kept for name, kept in self.phases.items() if kept[0] == "failed"}
        finished = bool(self.selected) and self.selected == set(self.outcomes)
        path = self.path or (self.root / "tests" / REPORT.name if self.whole and finished else None)
        ran = any(outcome != "skipped" for outcome, _ in self.outcomes.values())
        if path is None or not ran:
            return
        report = build_report(self.evidence, self.outcomes, self.describe(), tree_hash(self.root))
        path.write_text(dump(report))


# --- the command ------------------------------------------------------------------------------


def gpu_tests(root: Path = ROOT) -> set[str]:
    """Names of the tests of the GPU suite, as pytest collects them here."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=root,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        check=False,
    )
    names = {line for line in run.stdout.splitlines() if "::" in line}
    if run.returncode != 0 or not names:
        last = (run.stdout + run.stderr)[-2000:]
        raise RuntimeError(f"the GPU suite cannot be collected:\n{last}")
    return names


def check(report_path: Path = REPORT, root: Path = ROOT) -> tuple[int, str]:
    """Return an exit code and a sentence on whether the report speaks about these sources."""
    if not report_path.is_file():
        return 1, f"{report_path.name} is missing: run `pytest -m gpu` on a machine with a GPU."
    report = json.loads(report_path.read_text())
    if report["tree"] != tree_hash(root):
        return 1, (
            "cuda_src/ or cupy_moe/ changed after the GPU report was written: run `pytest -m gpu` "
            "on a GPU machine, or state `python tests/gpu_evidence.py --mark-unverified WHY`."
        )
    if report["status"] == "unverified":
        return 0, f"warning: the GPU suite has not passed on these sources: {report['unverified']}"
    if report["status"] != "passed":
        return 1, f"the GPU suite failed on these sources: {', '.join(_ended(report, 'failed'))}"
    if missing := sorted(gpu_tests(root) - report["tests"].keys()):
        return 1, (
            f"{len(missing)} GPU tests are not in the report, the first is {missing[0]}: run them "
            "with `--gpu-report FILE` and add that by `python tests/gpu_evidence.py --add-run`."
        )
    passed, skipped = _ended(report, "passed"), _ended(report, "skipped")
    note = f" Skipped: {', '.join(skipped)}." if skipped else ""
    for run in report.get("further_runs", []):
        note += f" {len(run['tests'])} of them in a run of their own: {run['why']}"
    return 0, f"{len(passed)} GPU tests passed on {report['environment']['gpu']}.{note}"


def _ended(report: Mapping[str, Any], outcome: str) -> list[str]:
    return [name for name, (ended, _) in report["tests"].items() if ended == outcome]


def mark_unverified(reason: str, report_path: Path = REPORT, root: Path = ROOT) -> None:
    """Bind the report to the present sources and say why they did not pass the suite on a GPU."""
    report = json.loads(report_path.read_text()) if report_path.is_file() else {}
    report = {"measured_tree": None, **{section: {} for section in SECTIONS}, **report}
    marks = {"status": "unverified", "unverified": reason, "tree": tree_hash(root)}
    report_path.write_text(dump({**report, **marks}))


def add_run(run_path: Path, reason: str, report_path: Path = REPORT) -> None:
    """Add a run of tests on the same sources and kind of machine.

    What failed in it has failed, also where it had passed before. A test that it skips must be new
    to the report. An unverified report is completed by tests that it lacks; why it was unverified
    stays in it.

    Raises
    ------
    ValueError
        If the figures of the report are those of other sources, the runs do not belong together,
        the second one skipped a test of the first, or it adds no test to an unverified report.
    """
    report, run = (json.loads(path.read_text()) for path in (report_path, run_path))
    if report["measured_tree"] != report["tree"]:
        raise ValueError("the report is that of other sources: run the whole suite first")
    for what in ("tree", "environment"):
        if report[what] != run[what]:
            raise ValueError(f"the runs differ in {what}: {report[what]} and {run[what]}")
    if skipped := [test for test in _ended(run, "skipped") if test in report["tests"]]:
        raise ValueError(f"tests of the report that the second run skipped: {', '.join(skipped)}")
    further = {"why": reason, "tests": list(run["tests"])}
    if "unverified" in report:
        if run["tests"].keys() <= report["tests"].keys():
            raise ValueError("the report is unverified, and the run has no test that it lacks")
        further["unverified_before"] = report.pop("unverified")
    for section in ("tests", "errors", "benchmarks"):
        report[section] |= run[section]
    report["further_runs"] = [*report.get("further_runs", []), further]
    report["status"] = "failed" if _ended(report, "failed") else "passed"
    report_path.write_text(dump(report))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="does the report match the sources?")
    action.add_argument("--mark-unverified", metavar="WHY", help="say why the suite did not pass")
    action.add_argument(
        "--add-run",
        nargs=2,
        metavar=("REPORT", "WHY"),
        help="add a run of tests, as of those that had failed, were skipped or not reached",
    )
    args = parser.parse_args()
    if args.mark_unverified is not None:
        mark_unverified(args.mark_unverified)
    if args.add_run is not None:
        add_run(Path(args.add_run[0]), args.add_run[1])
    code, message = check()
    print(message, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
