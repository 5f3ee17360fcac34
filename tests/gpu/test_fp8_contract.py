"""What the FP8 layer promises beside numbers: storage, refusals, the unfinalized form, its cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.inputs import make_hidden_states, make_topk, move_arguments, to_library
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    data_pointer,
    full,
    plan_routed_moe,
    poisoned_allocations,
    reference,
    routed_moe,
    run_python,
    small_arguments,
    small_layer,
    synchronize,
    tolerance_of,
)
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

HIDDEN = 256
# Host time in launches of a torch kernel: hosts differ and are shared, ratios hold. The figures are
# evidence; the limits leave room for a busy host.
CALL_LIMIT = 4.0
PLANNED_RUN_LIMIT = 1.0
FIRST_CALL_LIMIT_S = 0.5


# --- output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("library", LIBRARIES)
def test_output_is_filled_in_place_and_returned(library: str, tokens: int) -> None:
    arguments = move_arguments(small_arguments(tokens, invalid="one_slot"), library)
    output = full((tokens, HIDDEN), np.nan, BF16, library)
    address = data_pointer(output)
    returned = routed_moe(**arguments, output=output)
    assert returned is output
    assert data_pointer(returned) == address
    assert_within(compare(output, reference(arguments)), tolerance_of(arguments))


@pytest.mark.parametrize("library", LIBRARIES)
def test_new_output_has_the_library_dtype_and_shape_of_the_call(library: str) -> None:
    arguments = move_arguments(small_arguments(33), library)
    out = routed_moe(**arguments)
    assert type(out) is type(arguments["hidden_states"])
    assert tuple(out.shape) == (33, HIDDEN)
    assert to_host(out).dtype == BF16
    again = routed_moe(**arguments)
    assert data_pointer(again) != data_pointer(out), "two results live side by side"


def wrong_outputs(library: str, tokens: int) -> dict[str, tuple[type[Exception], Any]]:
    """Outputs that must be refused, with the error to expect."""
    good = (tokens, HIDDEN)
    wide = full((tokens, 2 * HIDDEN), 1.0, BF16, library)
    return {
        "one row too many": (ValueError, full((tokens + 1, HIDDEN), 1.0, BF16, library)),
        "too narrow": (ValueError, full((tokens, HIDDEN // 2), 1.0, BF16, library)),
        "flat": (ValueError, full((tokens * HIDDEN,), 1.0, BF16, library)),
        "float32": (TypeError, full(good, 1.0, np.float32, library)),
        "float16": (TypeError, full(good, 1.0, np.float16, library)),
        "columns of a wider array": (ValueError, wide[:, :HIDDEN]),
        "every second column": (ValueError, wide[:, ::2]),
        "transposed": (ValueError, full((HIDDEN, tokens), 1.0, BF16, library).T),
        "in host memory": (ValueError, np.full(good, 1.0, BF16)),
    }


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", wrong_outputs("numpy", 2))
def test_wrong_output_is_refused_and_untouched(name: str, library: str) -> None:
    tokens = 33
    error, output = wrong_outputs(library, tokens)[name]
    before = to_host(output).copy()
    arguments = move_arguments(small_arguments(tokens), library)
    with pytest.raises(error, match=r"trtllm_fp8_per_tensor_scale_routed_moe: output"):
        routed_moe(**arguments, output=output)
    synchronize()
    assert_bit_equal(output, before, "the refused output")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("input_name", ["hidden_states", "gemm2_weights", "topk_ids"])
def test_output_over_an_input_is_refused(input_name: str, library: str) -> None:
    """The last bytes of the output are the first ones of the input."""
    tokens = 33
    host = small_arguments(tokens)
    raw = np.ascontiguousarray(host[input_name]).view(np.uint8).reshape(-1)
    output_bytes = 2 * tokens * HIDDEN
    lead = output_bytes - 64
    memory = to_library(np.concatenate([np.zeros(lead, np.uint8), raw]), library)
    arguments = move_arguments(host, library)
    target = arguments[input_name]
    overlapping = memory[lead:].view(target.dtype).reshape(tuple(target.shape))
    output = memory[:output_bytes].view(to_library(np.zeros(1, BF16), library).dtype)
    arguments[input_name] = overlapping
    before = to_host(memory).copy()
    with pytest.raises(ValueError, match="overlap"):
        routed_moe(**arguments, output=output.reshape((tokens, HIDDEN)))
    synchronize()
    assert_bit_equal(memory, before, "memory after the refusal")


# --- the unfinalized form ---------------------------------------------------------------------


@dataclass(frozen=True)
class Unfinalized:
    """One call with ``do_finalize=False``."""

    tokens: int
    top_k: int = 2
    dtype: str = "packed"
    pattern: str = "uniform"
    invalid: str | None = None

    def __str__(self) -> str:
        """All fields."""
        return f"T{self.tokens}-K{self.top_k}-{self.dtype}-{self.pattern}-{self.invalid}"


UNFINALIZED = [
    Unfinalized(1, top_k=4),
    Unfinalized(9, dtype="float32"),
    Unfinalized(33, invalid="half_the_rows", dtype="bfloat16"),
    Unfinalized(33, invalid="all_rows"),
    Unfinalized(127, pattern="one_expert", top_k=1),
    Unfinalized(300, pattern="skewed", invalid="one_slot"),
    Unfinalized(1000, pattern="half_empty", dtype="float32"),
]


def segment_tile(rows: np.ndarray, experts: np.ndarray) -> int:
    """Largest tile size that explains where the experts' segments start."""
    starts = [int(rows[experts == e].min()) for e in np.unique(experts)]
    return int(np.gcd.reduce([*starts, 128]))


@pytest.mark.parametrize("case", UNFINALIZED, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_weights_and_map(case: Unfinalized, library: str) -> None:
    """Injective, live slots only, experts ascending in tile-aligned segments, slots ascending."""
    options = {"dtype": case.dtype, "pattern": case.pattern, "invalid": case.invalid}
    host = small_arguments(case.tokens, top_k=case.top_k, **options)
    arguments = move_arguments(host, library)
    with poisoned_allocations(library):
        result = routed_moe(**arguments, do_finalize=False)
    assert isinstance(result, list)
    rows, weights, index = result
    packed = case.dtype == "packed"
    ids = host["topk_ids"] >> 16 if packed else host["topk_ids"][0]
    num_experts = small_layer().num_experts
    flat = ids.reshape(-1)
    live = (flat >= 0) & (flat < num_experts)
    index = to_host(index)
    assert (index.shape, index.dtype) == ((case.tokens * case.top_k,), np.int32)
    np.testing.assert_array_equal(index >= 0, live)
    assert (index[~live] == -1).all()

    used, experts = index[live], flat[live]
    assert np.unique(used).size == used.size, "two slots share a row"
    order = np.argsort(used)
    assert (np.diff(experts[order]) >= 0).all(), "experts do not ascend"
    for expert in np.unique(experts):
        segment = used[experts == expert]  # by ascending slot
        np.testing.assert_array_equal(segment, segment[0] + np.arange(segment.size))
    capacity = rows.shape[0]
    if used.size:
        tile = segment_tile(used, experts)
        assert tile in (8, 16, 32, 64, 128)
        slots, hit = flat.size, min(flat.size, num_experts)
        bounds = [(hit + (slots - hit) // b) * b for b in (8, 16, 32, 64, 128)]
        assert used.max() < capacity <= max(bounds)

    host_rows = to_host(rows)
    assert host_rows.dtype == BF16
    assert host_rows.shape[1] == HIDDEN
    live_rows = host_rows[used].astype(np.float32)
    assert np.isfinite(live_rows).all()
    if packed:
        assert_bit_equal(weights, unpacked_weights(host["topk_ids"]), "expert_weights")
        live_weights = to_host(weights).reshape(-1)[live]
    else:
        assert weights is arguments["topk_ids"][1]
        live_weights = host["topk_ids"][1].reshape(-1)[live]
    sums = np.zeros((case.tokens, HIDDEN), np.float32)
    tokens = np.flatnonzero(live) // case.top_k
    np.add.at(sums, tokens, live_weights.astype(np.float32)[:, None] * live_rows)
    assert_within(compare(sums.astype(BF16), reference(host)), tolerance_of(host))
    finalized = routed_moe(**arguments)
    assert compare(finalized, sums.astype(BF16)).bit_equal > 0.99


def unpacked_weights(packed: np.ndarray) -> np.ndarray:
    """Low halves of packed words."""
    return (packed & 0xFFFF).astype(np.uint16).view(BF16)


def test_output_is_ignored_without_the_sum() -> None:
    arguments = move_arguments(small_arguments(9), "torch")
    output = full((3, 5), 1.0, np.float32, "torch")
    routed_moe(**arguments, do_finalize=False, output=output)
    assert (to_host(output) == 1.0).all()


def test_input_scaling_keeps_the_weights_it_already_used() -> None:
    layer, tokens = small_layer(), 33
    ids, weights = make_topk(tokens, 1, layer.num_experts, dtype="float32")
    hidden = make_hidden_states(tokens, layer.hidden_size)
    options = {"routing_method_type": 3, "use_routing_scales_on_input": True}
    arguments = move_arguments(layer.arguments(hidden, (ids, weights), **options), "cupy")
    rows, returned, index = routed_moe(**arguments, do_finalize=False)
    assert returned is arguments["topk_ids"][1]
    assert_bit_equal(to_host(rows)[to_host(index)], routed_moe(**arguments), "rows are the output")


@pytest.mark.parametrize("do_finalize", [True, False])
@pytest.mark.parametrize("library", LIBRARIES)
def test_replay_buffer_of_given_routing_stays_untouched(library: str, do_finalize: bool) -> None:
    replay = full((40, 2), -7, np.int16, library)
    arguments = move_arguments(small_arguments(33), library)
    routed_moe(**arguments, routing_replay_out=replay, do_finalize=do_finalize)
    assert (to_host(replay) == -7).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_tokens(library: str) -> None:
    arguments = move_arguments(small_arguments(0), library)
    out = routed_moe(**arguments)
    assert tuple(out.shape) == (0, HIDDEN)
    assert to_host(out).dtype == BF16
    output = full((0, HIDDEN), 0.0, BF16, library)
    assert routed_moe(**arguments, output=output) is output
    shapes = [tuple(a.shape) for a in routed_moe(**arguments, do_finalize=False)]
    assert shapes == [(0, HIDDEN), (0, 2), (0,)]
    with pytest.raises(ValueError, match="output"):
        routed_moe(**arguments, output=full((1, HIDDEN), 0.0, BF16, library))


# --- cost on the host, processes, devices -----------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_host_time_of_a_call(library: str, evidence: Evidence) -> None:
    arguments = move_arguments(small_arguments(1), library)
    output = full((1, HIDDEN), 0.0, BF16, library)
    row = host_time(lambda: routed_moe(**arguments, output=output))
    evidence.benchmark(f"host time of a call/{library}", row)
    if library == "torch":
        assert row["us_min"] <= CALL_LIMIT * row["us_of_a_torch_launch"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_host_time_of_a_planned_run(library: str, evidence: Evidence) -> None:
    plan = plan_routed_moe(**move_arguments(small_arguments(1), library))
    row = host_time(plan.run)
    evidence.benchmark(f"host time of a planned run/{library}", row)
    if library == "torch":
        assert row["us_min"] <= PLANNED_RUN_LIMIT * row["us_of_a_torch_launch"]


def host_time(call: Callable[[], object], calls: int = 100) -> dict[str, float]:
    """Time until a call returns, in batches that fit the queue of launches."""
    for _ in range(20):
        call()
    batches = []
    for _ in range(15):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        batches.append((time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return {
        "us_min": min(batches),
        "us_median": float(np.median(batches)),
        "us_of_a_torch_launch": us_of_a_torch_launch(),
        "calls": calls,
    }


def us_of_a_torch_launch() -> float:
    """Host time of torch's cheapest kernel, best of 15 batches: how fast this host is now."""
    import torch

    number, batches = torch.zeros(1, device="cuda"), []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            number.add_(1)
        batches.append((time.perf_counter() - start) / 200 * 1e6)
    torch.cuda.synchronize()
    return min(batches)


FIRST_CALL = """
import time
start = time.perf_counter()
import torch
import cupy
import cupy_moe.fused_moe
imported = time.perf_counter() - start
from cupy_moe.testing.compare import assert_within, compare
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import reference, routed_moe, small_arguments, tolerance_of
arguments = move_arguments(small_arguments(9), "torch")
torch.cuda.synchronize()
start = time.perf_counter()
out = routed_moe(**arguments)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
assert_within(compare(out, reference(arguments)), tolerance_of(arguments))
print("SECONDS", seconds, imported)
"""


def test_first_call_of_a_process_with_a_warm_cache(tmp_path: Any, evidence: Evidence) -> None:
    """Loading kernels from the cache must not compile; the arrays and libraries exist already."""
    times = {}
    for cache in ("cold", "warm"):
        printed = run_python(FIRST_CALL, CUPY_MOE_CACHE_DIR=str(tmp_path))
        line = next(line for line in printed.splitlines() if line.startswith("SECONDS"))
        times[cache] = float(line.split()[1])
    evidence.benchmark(
        "first call in a process", {f"seconds_{cache}_cache": s for cache, s in times.items()}
    )
    assert any(tmp_path.iterdir()), "nothing was cached"
    assert times["warm"] <= FIRST_CALL_LIMIT_S


SECOND_DEVICE = """
import cupy
from cupy_moe.testing.compare import assert_within, compare
from cupy_moe.testing.inputs import move_arguments
from tests.gpu.support import reference, routed_moe, small_arguments, tolerance_of
host = small_arguments(65)
cupy.cuda.Device(1).use()
there = move_arguments(host, "cupy")
out = routed_moe(**there)
assert out.device.id == 1
assert_within(compare(out, reference(host)), tolerance_of(host))
from cuda.bindings import driver
error, flags, active = driver.cuDevicePrimaryCtxGetState(0)
assert int(error) == 0 and active == 0, "a context was made on device 0"
cupy.cuda.Device(0).use()
out = routed_moe(**there)  # another device is current now
assert out.device.id == 1
with cupy.cuda.Device(1):
    assert_within(compare(out, reference(host)), tolerance_of(host))
out = routed_moe(**move_arguments(host, "cupy"))
assert out.device.id == 0
assert_within(compare(out, reference(host)), tolerance_of(host))
print("works")
"""


def test_second_device_first() -> None:
    """Kernels load where the arrays are, and nowhere else."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    assert "works" in run_python(SECOND_DEVICE).splitlines()
