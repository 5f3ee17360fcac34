"""The GPU report: what the hash sees, when it is written, what the check says."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from cupy_moe.testing.compare import compare
from tests import gpu_evidence
from tests.gpu_evidence import (
    Evidence,
    EvidencePlugin,
    add_run,
    check,
    dump,
    mark_unverified,
    tree_hash,
)

PASSING = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("case", ["one", "two"])
def test_kernel(case):
    assert case

def test_on_the_cpu():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Build a project with two hashed folders and a GPU suite of two tests."""
    for name, text in {
        "cuda_src/common/types.cuh": "// types",
        "cuda_src/route.cu": "// route",
        "cupy_moe/plan.py": "TILE = 8\n",
        "cupy_moe/__pycache__/plan.cpython-312.pyc": "cache",
        "tests/gpu/test_kernel.py": PASSING,
        "README.md": "not hashed",
        "pytest.ini": "[pytest]\nmarkers = gpu: needs a GPU\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


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


@pytest.mark.parametrize("args", [["-kone"], ["tests/gpu/test_kernel.py::test_kernel"], ["-x"]])
def test_part_of_the_suite_writes_nothing(project: Path, args: list[str], monkeypatch) -> None:
    monkeypatch.chdir(project)
    if args == ["-x"]:  # stops at the first of two failing tests
        test = project / "tests/gpu/test_kernel.py"
        test.write_text(PASSING.replace("assert case", "assert not case"))
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
    test = project / "tests/gpu/test_kernel.py"
    test.write_text(PASSING.replace("assert case", "pytest.skip('no GPU')"))
    run_suite(project)
    assert not report_of(project).exists()


def test_failing_suite_writes_a_report_that_fails_the_check(project: Path) -> None:
    test = project / "tests/gpu/test_kernel.py"
    test.write_text(PASSING.replace("assert case", "assert case == 'one'"))
    run_suite(project)
    code, message = check(report_of(project), project)
    assert code == 1
    assert "test_kernel[two]" in message
    assert "test_kernel[one]" not in message


# --- the check --------------------------------------------------------------------------------


def test_check_accepts_the_sources_that_were_run(project: Path) -> None:
    run_suite(project)
    code, message = check(report_of(project), project)
    assert (code, message) == (0, "2 GPU tests passed on made up.")


def test_check_names_skipped_tests(project: Path) -> None:
    test = project / "tests/gpu/test_kernel.py"
    test.write_text(PASSING.replace("assert case", "case == 'one' or pytest.skip('one GPU')"))
    run_suite(project)
    code, message = check(report_of(project), project)
    assert code == 0
    assert "Skipped: " in message
    assert "test_kernel[two]" in message


def test_check_refuses_changed_sources(project: Path) -> None:
    run_suite(project)
    (project / "cuda_src/route.cu").write_text("// changed")
    code, message = check(report_of(project), project)
    assert code == 1
    assert "pytest -m gpu" in message


def test_check_refuses_a_missing_report(project: Path) -> None:
    assert check(report_of(project), project)[0] == 1


def test_marking_is_a_warning_until_the_sources_change_again(project: Path) -> None:
    run_suite(project)
    measured = tree_hash(project)
    (project / "cuda_src/route.cu").write_text("// changed")
    mark_unverified("no GPU at hand", report_of(project), project)
    code, message = check(report_of(project), project)
    assert code == 0
    assert message.startswith("warning: ")
    assert message.endswith(": no GPU at hand")
    report = json.loads(report_of(project).read_text())
    assert report["measured_tree"] == measured  # the figures keep saying what they were measured on
    assert len(report["tests"]) == 2
    (project / "cuda_src/route.cu").write_text("// changed again")
    assert check(report_of(project), project)[0] == 1


@pytest.fixture
def failed_once(project: Path) -> Path:
    """Report of a project in which one of the two tests failed."""
    (project / "tests/gpu/test_kernel.py").write_text(PASSING.replace("assert case", FAULT))
    run_suite(project)
    (project / "tests/gpu/test_kernel.py").write_text(PASSING)
    return report_of(project)


FAULT = 'assert case == "one"'
TWO = "tests/gpu/test_kernel.py::test_kernel[two]"


def test_tests_that_failed_for_their_own_fault_run_again(project: Path, failed_once: Path) -> None:
    assert check(failed_once, project)[0] == 1
    rerun = project / "rerun.json"
    run_suite(project, str(project / TWO), path=rerun)
    add_run(rerun, "The test was wrong.", failed_once)
    code, message = check(failed_once, project)
    assert code == 0
    assert "2 GPU tests passed" in message
    assert message.endswith("1 of them in a run of their own: The test was wrong.")
    (run,) = json.loads(failed_once.read_text())["further_runs"]
    assert [name.rpartition("::")[2] for name in run["tests"]] == ["test_kernel[two]"]


def test_a_rerun_that_fails_again_changes_nothing_for_the_check(
    project: Path, failed_once: Path
) -> None:
    (project / "tests/gpu/test_kernel.py").write_text(PASSING.replace("assert case", FAULT))
    rerun = project / "rerun.json"
    run_suite(project, str(project / TWO), path=rerun)
    add_run(rerun, "why", failed_once)
    assert check(failed_once, project)[0] == 1


def test_runs_of_other_sources_are_refused(project: Path, failed_once: Path) -> None:
    before = failed_once.read_text()
    (project / "cuda_src/route.cu").write_text("// changed")
    rerun = project / "rerun.json"
    run_suite(project, str(project / TWO), path=rerun)
    with pytest.raises(ValueError, match="differ in tree"):
        add_run(rerun, "why", failed_once)
    assert failed_once.read_text() == before


@pytest.mark.parametrize("fails", [False, True])
def test_tests_that_had_passed_run_again(project: Path, fails: bool) -> None:
    run_suite(project)
    fault = PASSING.replace("assert case", FAULT if fails else "assert case")
    (project / "tests/gpu/test_kernel.py").write_text(fault)
    rerun = project / "rerun.json"
    run_suite(project, path=rerun)
    add_run(rerun, "why", report_of(project))
    code, message = check(report_of(project), project)
    assert code == fails
    assert ("test_kernel[two]" in message) == fails


def test_a_test_that_is_interrupted_has_not_passed(project: Path) -> None:
    stops = PASSING.replace("assert case", 'if case == "two": raise KeyboardInterrupt')
    (project / "tests/gpu/test_kernel.py").write_text(stops)
    path = project / "part.json"
    run_suite(project, path=path, ends=pytest.ExitCode.INTERRUPTED)
    names = [name.rpartition("::")[2] for name in json.loads(path.read_text())["tests"]]
    assert names == ["test_kernel[one]"]


def test_a_test_that_failed_before_it_was_interrupted_has_failed(project: Path) -> None:
    fixture = "@pytest.fixture\ndef hangs():\n    yield\n    raise KeyboardInterrupt\n\n"
    fails = PASSING.replace("(case)", "(case, hangs)").replace("assert case", "assert not case")
    (project / "tests/gpu/test_kernel.py").write_text(
        fails.replace("@pytest", fixture + "@pytest", 1)
    )
    path = project / "part.json"
    run_suite(project, path=path, ends=pytest.ExitCode.INTERRUPTED)
    report = json.loads(path.read_text())
    assert [outcome for outcome, _ in report["tests"].values()] == ["failed"]
    assert report["status"] == "failed"


def test_a_rerun_that_skips_does_not_stand_for_a_failed_test(
    project: Path, failed_once: Path
) -> None:
    skips = PASSING.replace("assert case", 'case == "two" and pytest.skip("not today")')
    (project / "tests/gpu/test_kernel.py").write_text(skips)
    rerun = project / "rerun.json"
    run_suite(project, path=rerun)
    outcomes = json.loads(rerun.read_text())
    outcomes["tests"] = {n: e for n, e in outcomes["tests"].items() if n.endswith("[two]")}
    rerun.write_text(json.dumps(outcomes))
    with pytest.raises(ValueError, match=r"skipped: .*test_kernel\[two\]"):
        add_run(rerun, "why", failed_once)
    assert check(failed_once, project)[0] == 1


def test_a_report_of_other_sources_takes_no_run(project: Path) -> None:
    run_suite(project)
    (project / "cuda_src/route.cu").write_text("// changed")
    mark_unverified("no GPU at hand", report_of(project), project)
    before = report_of(project).read_text()
    run = project / "run.json"
    run_suite(project, str(project / TWO), path=run)
    with pytest.raises(ValueError, match="other sources"):
        add_run(run, "why", report_of(project))
    assert report_of(project).read_text() == before


def test_a_suite_that_was_stopped_is_completed_by_another_run(project: Path) -> None:
    run_suite(project, "-kone", path=report_of(project))
    code, message = check(report_of(project), project)
    assert code == 1
    assert message.startswith(
        "1 GPU tests are not in the report, the first is tests/gpu/test_kernel.py::"
    )
    mark_unverified("one test was reached", report_of(project), project)
    assert check(report_of(project), project)[0] == 0
    rest = project / "rest.json"
    run_suite(project, str(project / TWO), path=rest)
    again = project / "again.json"
    run_suite(project, "-kone", path=again)
    with pytest.raises(ValueError, match="has no test that it lacks"):
        add_run(again, "why", report_of(project))
    add_run(rest, "The rest.", report_of(project))
    (further,) = json.loads(report_of(project).read_text())["further_runs"]
    assert further["unverified_before"] == "one test was reached"
    code, message = check(report_of(project), project)
    assert (code, message.partition(".")[0]) == (0, "2 GPU tests passed on made up")


def test_options_of_the_environment_do_not_hide_tests(project: Path, monkeypatch) -> None:
    run_suite(project, "-kone", path=report_of(project))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    assert check(report_of(project), project)[0] == 1


def test_a_suite_that_cannot_be_collected_is_an_error(project: Path) -> None:
    run_suite(project)
    (project / "tests/gpu/test_kernel.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(RuntimeError, match="a_module_that_is_not_there"):
        check(report_of(project), project)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_skipped_for_want_of_gpus_runs_elsewhere(project: Path, fails: bool) -> None:
    suite = project / "tests/gpu/test_kernel.py"
    suite.write_text(PASSING.replace("assert case", 'case == "two" and pytest.skip("two GPUs")'))
    run_suite(project)
    assert "Skipped: " in check(report_of(project), project)[1]
    suite.write_text(PASSING.replace("assert case", FAULT if fails else "assert case"))
    run = project / "run.json"
    run_suite(project, str(project / TWO), path=run)
    add_run(run, "On two GPUs.", report_of(project))
    code, message = check(report_of(project), project)
    assert code == fails
    if not fails:
        assert "2 GPU tests passed" in message
        assert "Skipped" not in message
        assert message.endswith("1 of them in a run of their own: On two GPUs.")


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
