"""The GPU report: what the check says, and how other runs complete it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evidence_project import (
    KERNEL_TEST,
    PASSING,
    make_project,
    report_of,
    run_suite,
    write_suite,
)
from tests.gpu_evidence import add_run, check, mark_unverified, tree_hash


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def test_check_accepts_the_sources_that_were_run(project: Path) -> None:
    run_suite(project)
    code, message = check(report_of(project), project)
    assert (code, message) == (0, "2 GPU tests passed on made up.")


def test_check_names_skipped_tests(project: Path) -> None:
    write_suite(project, "case == 'one' or pytest.skip('one GPU')")
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
    write_suite(project, FAULT)
    run_suite(project)
    write_suite(project)
    return report_of(project)


FAULT = 'assert case == "one"'
TWO = f"{KERNEL_TEST}::test_kernel[two]"


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
    write_suite(project, FAULT)
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
    write_suite(project, FAULT if fails else "assert case")
    rerun = project / "rerun.json"
    run_suite(project, path=rerun)
    add_run(rerun, "why", report_of(project))
    code, message = check(report_of(project), project)
    assert code == fails
    assert ("test_kernel[two]" in message) == fails


def test_a_test_that_is_interrupted_has_not_passed(project: Path) -> None:
    write_suite(project, 'if case == "two": raise KeyboardInterrupt')
    path = project / "part.json"
    run_suite(project, path=path, ends=pytest.ExitCode.INTERRUPTED)
    names = [name.rpartition("::")[2] for name in json.loads(path.read_text())["tests"]]
    assert names == ["test_kernel[one]"]


def test_a_test_that_failed_before_it_was_interrupted_has_failed(project: Path) -> None:
    fixture = "@pytest.fixture\ndef hangs():\n    yield\n    raise KeyboardInterrupt\n\n"
    fails = PASSING.replace("(case)", "(case, hangs)").replace("assert case", "assert not case")
    (project / KERNEL_TEST).write_text(fails.replace("@pytest", fixture + "@pytest", 1))
    path = project / "part.json"
    run_suite(project, path=path, ends=pytest.ExitCode.INTERRUPTED)
    report = json.loads(path.read_text())
    assert [outcome for outcome, _ in report["tests"].values()] == ["failed"]
    assert report["status"] == "failed"


def test_a_rerun_that_skips_does_not_stand_for_a_failed_test(
    project: Path, failed_once: Path
) -> None:
    write_suite(project, 'case == "two" and pytest.skip("not today")')
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


def test_what_a_stopped_suite_did_not_reach_may_skip(project: Path) -> None:
    write_suite(project, 'case == "one" or pytest.skip("no peer")')
    run_suite(project, "-kone", path=report_of(project))
    rest = project / "rest.json"
    run_suite(project, path=rest)
    add_run(rest, "The rest.", report_of(project))
    code, message = check(report_of(project), project)
    assert code == 0
    assert "1 GPU tests passed on made up. Skipped: " in message


def test_options_of_the_environment_do_not_hide_tests(project: Path, monkeypatch) -> None:
    run_suite(project, "-kone", path=report_of(project))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    assert check(report_of(project), project)[0] == 1


def test_a_suite_that_cannot_be_collected_is_an_error(project: Path) -> None:
    run_suite(project)
    (project / KERNEL_TEST).write_text("import a_module_that_is_not_there")
    with pytest.raises(RuntimeError, match="a_module_that_is_not_there"):
        check(report_of(project), project)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_skipped_for_want_of_gpus_runs_elsewhere(project: Path, fails: bool) -> None:
    write_suite(project, 'case == "two" and pytest.skip("two GPUs")')
    run_suite(project)
    assert "Skipped: " in check(report_of(project), project)[1]
    write_suite(project, FAULT if fails else "assert case")
    run = project / "run.json"
    run_suite(project, str(project / TWO), path=run)
    add_run(run, "On two GPUs.", report_of(project))
    code, message = check(report_of(project), project)
    assert code == fails
    if not fails:
        assert "2 GPU tests passed" in message
        assert "Skipped" not in message
        assert message.endswith("1 of them in a run of their own: On two GPUs.")


def test_failing_suite_writes_a_report_that_fails_the_check(project: Path) -> None:
    write_suite(project, FAULT)
    run_suite(project)
    code, message = check(report_of(project), project)
    assert code == 1
    assert "test_kernel[two]" in message
    assert "test_kernel[one]" not in message
