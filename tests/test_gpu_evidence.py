"""The GPU report: what the hash sees, when it is written, what tests record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from cupy_moe.testing.compare import compare
from tests import gpu_evidence
from tests.evidence_project import KERNEL_TEST, make_project, report_of, run_suite, write_suite
from tests.gpu_evidence import Evidence, dump, tree_hash


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


# --- the hash ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "cuda_src/route.cu").write_text("// route!"),
        lambda p: (p / "cupy_moe/new.py").write_text(""),
        lambda p: (p / "cuda_src/route.cu").rename(p / "cuda_src/router.cu"),
        lambda p: (p / "cuda_src/route.cu").unlink(),
    ],
    ids=["content", "new empty file", "renamed", "deleted"],
)
def test_hash_sees_every_change_of_the_sources(project: Path, change) -> None:
    before = tree_hash(project)
    change(project)
    assert tree_hash(project) != before


@pytest.mark.parametrize(
    "name",
    ["README.md", "tests/gpu/test_more.py", "cupy_moe/__pycache__/a.pyc", "cupy_moe/.mypy_cache/a"],
)
def test_hash_ignores_what_cannot_change_a_result(project: Path, name: str) -> None:
    before = tree_hash(project)
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_text("anything")
    assert tree_hash(project) == before


def test_hash_tells_where_one_file_ends_and_the_next_begins(project: Path) -> None:
    first, second = project / "cuda_src/a.cuh", project / "cuda_src/b.cuh"
    first.write_text("12")
    second.write_text("3")
    before = tree_hash(project)
    first.write_text("1")
    second.write_text("23")
    assert tree_hash(project) != before


def test_the_real_tree_has_files_in_both_folders() -> None:
    folders = {
        path.relative_to(gpu_evidence.ROOT).parts[0]
        for path in gpu_evidence.source_files(gpu_evidence.ROOT)
    }
    assert folders == set(gpu_evidence.HASHED_FOLDERS)


# --- when the report is written ---------------------------------------------------------------


@pytest.mark.parametrize("args", [(), ("-m", "gpu")], ids=["everything", "the gpu mark"])
def test_whole_suite_writes_the_report(project: Path, args: tuple[str, ...]) -> None:
    run_suite(project, *(args and (f"{args[0]}{args[1]}",)))
    report = json.loads(report_of(project).read_text())
    assert report["status"] == "passed"
    assert report["tree"] == report["measured_tree"] == tree_hash(project)
    assert report["environment"] == {"gpu": "made up"}
    outcomes = {name.rpartition("::")[2]: row[0] for name, row in report["tests"].items()}
    assert outcomes == {"test_kernel[one]": "passed", "test_kernel[two]": "passed"}


@pytest.mark.parametrize("args", [["-kone"], [f"{KERNEL_TEST}::test_kernel"], ["-x"]])
def test_part_of_the_suite_writes_nothing(project: Path, args: list[str], monkeypatch) -> None:
    monkeypatch.chdir(project)
    if args == ["-x"]:  # stops at the first of two failing tests
        write_suite(project, "assert not case")
    run_suite(project, *args)
    assert not report_of(project).exists()


def test_part_of_the_suite_is_written_where_asked(project: Path) -> None:
    path = project / "part.json"
    run_suite(project, "-kone", path=path)
    assert len(json.loads(path.read_text())["tests"]) == 1
    assert not report_of(project).exists()


@pytest.mark.parametrize("option", ["--collect-only", "-mnot gpu"])
def test_nothing_ran_nothing_is_written(project: Path, option: str) -> None:
    run_suite(project, option, path=project / "part.json")
    assert not (project / "part.json").exists()


def test_suite_skipped_for_want_of_a_gpu_is_no_evidence(project: Path) -> None:
    write_suite(project, "pytest.skip('no GPU')")
    run_suite(project)
    assert not report_of(project).exists()


# --- what tests record ------------------------------------------------------------------------


def test_figures_are_rounded_and_valid_json() -> None:
    evidence = Evidence()
    evidence.errors("zeros for ones", compare(np.zeros((2, 2)), np.ones((2, 2))))
    evidence.errors("ones for zeros", compare(np.ones((2, 2)), np.zeros((2, 2))))
    evidence.benchmark("decode", {"us": 123.456789, "tokens": 16, "tile": None})
    report = gpu_evidence.build_report(evidence, {"t": ("passed", 1.23456)}, {}, "hash")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    loaded = json.loads(dump(report), parse_constant=refuse)
    assert loaded["errors"]["zeros for ones"]["rel_l2"] == 1.0
    assert loaded["errors"]["ones for zeros"]["rel_l2"] == str(math.inf)
    assert loaded["benchmarks"]["decode"] == {"us": 123.5, "tokens": 16, "tile": None}
    assert loaded["tests"]["t"] == ["passed", 1.23]


def test_two_rows_of_one_name_are_refused() -> None:
    evidence = Evidence()
    evidence.benchmark("decode", {"us": 1.0})
    with pytest.raises(ValueError, match="decode"):
        evidence.benchmark("decode", {"us": 2.0})


def test_dump_is_deterministic_and_one_entry_a_line() -> None:
    rows = {"b": {"y": 1, "x": 2}, "a": {"x": 1}}
    other = {name: dict(reversed(row.items())) for name, row in reversed(rows.items())}
    first, second = (
        dump({"status": "passed", "errors": rows}),
        dump({"errors": other, "status": "passed"}),
    )
    assert first == second
    assert first.splitlines()[2:4] == ['  "a": {"x": 1},', '  "b": {"x": 2, "y": 1}']
