"""Every golden vector of the FP4 layers, in every form and through each array library."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from tests.fp4_calls import FORMS, MODES, case_of, fp4_arguments, run
from tests.gpu.fp4_layers import TOLERANCES, compile_kernels, on_library
from tests.gpu.support import BF16, LIBRARIES, full, portable_code
from tests.gpu_evidence import Evidence
from tests.moe_cases import STRATEGIES, cases_of

pytestmark = pytest.mark.gpu

CASES = [(mode, name) for mode in MODES for name in cases_of(f"fp4_moe_{mode}.npz")]
LIBRARY_OF = {"whole": "torch", "tp_n_tp_n": "torch", "tp_n_tp_k": "cupy"}
each_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    compile_kernels()


def expected_key(form: str) -> str:
    return STRATEGIES[0] if form == "whole" else form


def check(mode: str, name: str, form: str, library: str, evidence: Evidence, path: str) -> None:
    case = case_of(mode, name)
    arguments = on_library(fp4_arguments(mode, case, form), library)
    expected = case.arrays[f"{expected_key(form)}_out"]
    output = full(expected.shape, np.nan, BF16, library)
    (returned,) = run(form, arguments | {"output": output})
    assert returned is output
    errors = compare(output, expected)
    evidence.errors(f"fp4 vectors/{mode}/{name}/{form}/{library}/{path}", errors)
    assert_within(errors, TOLERANCES[mode], f"{mode} {name} {form}")


@each_form
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_output(mode: str, name: str, form: str, evidence: Evidence) -> None:
    check(mode, name, form, LIBRARY_OF[form], evidence, "native")


@pytest.mark.parametrize("name", ["swiglu_packed", "swiglu_unpacked_f32", "logits_default_bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_output_in_cupy(mode: str, name: str, evidence: Evidence) -> None:
    check(mode, name, "whole", "cupy", evidence, "native")


@pytest.mark.parametrize("mode", MODES)
def test_output_of_the_oldest_code(mode: str, evidence: Evidence) -> None:
    with portable_code():
        check(mode, "swiglu_packed", "whole", "torch", evidence, "compute_80")


@each_form
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", MODES)
def test_rows_before_the_sum(mode: str, library: str, form: str, evidence: Evidence) -> None:
    case = case_of(mode, "swiglu_unfinalized")
    arguments = on_library(fp4_arguments(mode, case, form, do_finalize=False), library)
    rows, weights, row_of_slot = (to_host(x) for x in run(form, arguments))
    live = case.arrays["live_u8"].astype(bool).ravel()
    np.testing.assert_array_equal(row_of_slot >= 0, live)
    expected = case.arrays[f"{expected_key(form)}_z"].reshape(live.size, -1)
    errors = compare(rows[row_of_slot[live]], expected[live])
    evidence.errors(f"fp4 vectors/{mode}/rows/{form}/{library}", errors)
    assert_within(errors, TOLERANCES[mode], f"{mode} {form}")
    assert_bit_equal(weights, case.arrays["weights"])


@pytest.mark.parametrize("form", ["whole", "tp_n_tp_k"])
@pytest.mark.parametrize("name", [n for mode, n in CASES if mode == "bf16" and "logits" in n])
def test_ids_are_replayed(name: str, form: str) -> None:
    case = case_of("bf16", name)
    ids = case.arrays["ids_i32"]
    replay = full((len(ids) + 2, ids.shape[1]), -7, np.int16, "torch")
    arguments = on_library(fp4_arguments("bf16", case, form), "torch")
    run(form, arguments | {"routing_replay_out": replay})
    np.testing.assert_array_equal(to_host(replay)[: len(ids)], ids)
    assert (to_host(replay)[len(ids) :] == -7).all()
