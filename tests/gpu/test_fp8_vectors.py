"""Every golden vector of the FP8 layer, through each array library and each code path."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from cupy_moe.testing.compare import (
    Errors,
    assert_bit_equal,
    assert_median_within,
    assert_within,
    compare,
    to_host,
)
from cupy_moe.testing.golden import GoldenCase, golden_fp8_arguments, load_golden_cases
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import BF16, LIBRARIES, ROOT, full, portable_code, routed_moe, tolerance_of
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

CASES = load_golden_cases(ROOT / "tests" / "data" / "fp8_moe.npz")


# Machine code for this GPU, and PTX of the oldest supported architecture translated by the driver.
CODE_PATHS = {"native": nullcontext, "compute_80": portable_code}


def select(condition: bool) -> list:
    """Golden cases that do (or do not) finalize, as parameters."""
    return [pytest.param(c, id=c.name) for c in CASES if c.parameters["do_finalize"] == condition]


@pytest.mark.parametrize("path", CODE_PATHS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", select(True))
def test_output(case: GoldenCase, library: str, path: str, evidence: Evidence) -> None:
    arguments = move_arguments(golden_fp8_arguments(case), library)
    expected = case.arrays["out"]
    output = full(expected.shape, np.nan, BF16, library)
    with CODE_PATHS[path]():
        returned = routed_moe(**arguments, output=output)
    assert returned is output
    errors = compare(output, expected)
    evidence.errors(f"fp8 vectors/{case.name}/{library}/{path}", errors)
    assert_within(errors, tolerance_of(arguments, portable=path != "native"), case.name)


@pytest.mark.parametrize("path", CODE_PATHS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", select(False))
def test_rows_before_the_sum(case: GoldenCase, library: str, path: str, evidence: Evidence) -> None:
    arguments = move_arguments(golden_fp8_arguments(case), library)
    with CODE_PATHS[path]():
        rows, weights, row_of_slot = routed_moe(**arguments)
    rows, row_of_slot = to_host(rows), to_host(row_of_slot)
    live = case.arrays["live_u8"].astype(bool)
    assert row_of_slot.shape == (live.size,)
    np.testing.assert_array_equal(row_of_slot.reshape(live.shape) >= 0, live)
    errors = compare(rows[row_of_slot.reshape(live.shape)[live]], case.arrays["z"][live])
    evidence.errors(f"fp8 vectors/{case.name}/{library}/{path}", errors)
    assert_within(errors, tolerance_of(arguments, portable=path != "native"), case.name)
    if isinstance(arguments["topk_ids"], tuple):
        assert weights is arguments["topk_ids"][1]
    else:
        assert_bit_equal(weights, case.arrays["weights"], "expert_weights")


def test_median_of_all_outputs() -> None:
    """Single cases may lose a code at a rounding boundary; most must not."""

    def errors_of(case: GoldenCase) -> Errors:
        output = routed_moe(**move_arguments(golden_fp8_arguments(case), "torch"))
        return compare(output, case.arrays["out"])

    finalizing = [case for case in CASES if case.parameters["do_finalize"]]
    assert_median_within([errors_of(case) for case in finalizing])
