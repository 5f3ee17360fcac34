"""Same inputs, same bits: run after run, alone or in a batch, whatever the memory held before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_moe.testing.compare import assert_bit_equal, assert_within, compare, to_host
from cupy_moe.testing.inputs import move_arguments, to_library
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    data_pointer,
    full,
    poisoned_allocations,
    reference,
    routed_moe,
    small_arguments,
    synchronize,
    tolerance_of,
)

pytestmark = pytest.mark.gpu

BATCH = 1000
# Two of four experts a token: these counts meet every token tile, and both sides of each step.
COUNTS = (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 513, 999)
POISONS = (0xFF, 0x7F, 0x00)


def run(arguments: dict[str, Any], library: str = "torch", **options: Any) -> np.ndarray:
    """Output on the host."""
    return to_host(routed_moe(**move_arguments(arguments, library), **options))


def rows_of(arguments: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Arguments for some of the tokens (packed routing)."""
    names = ("hidden_states", "topk_ids")
    return {k: np.ascontiguousarray(v[rows]) if k in names else v for k, v in arguments.items()}


@pytest.mark.parametrize("tokens", [1, 33, BATCH])
def test_fifty_runs_give_the_same_bits(tokens: int) -> None:
    import torch

    arguments = move_arguments(small_arguments(tokens, pattern="skewed"), "torch")
    first = routed_moe(**arguments)
    assert_within(compare(first, reference(arguments)), tolerance_of(arguments))
    for attempt in range(50):
        again = routed_moe(**arguments)
        assert torch.equal(again.view(torch.int16), first.view(torch.int16)), f"run {attempt}"


@pytest.mark.parametrize("pattern", ["uniform", "one_expert"])
def test_a_row_does_not_depend_on_the_size_of_its_batch(pattern: str) -> None:
    arguments = small_arguments(BATCH, pattern=pattern)
    whole = run(arguments)
    for count in COUNTS:
        part = run(rows_of(arguments, slice(None, count)))
        assert_bit_equal(part, whole[:count], f"the first {count} of {BATCH} tokens")
    for row in (0, 17, BATCH - 1):
        alone = run(rows_of(arguments, slice(row, row + 1)))
        assert_bit_equal(alone, whole[row : row + 1], f"token {row} alone")


@pytest.mark.parametrize("tokens", [33, BATCH])
def test_permuted_tokens_give_permuted_rows(tokens: int) -> None:
    arguments = small_arguments(tokens)
    order = np.random.default_rng(0).permutation(tokens)
    assert_bit_equal(run(rows_of(arguments, order)), run(arguments)[order], "permuted batch")


def test_a_row_does_not_depend_on_what_its_neighbours_hold() -> None:
    """The other tokens become NaN, lose their experts, or crowd one expert."""
    tokens, row = 65, 40
    arguments = small_arguments(tokens)
    alone = run(arguments)[row]
    others = np.arange(tokens) != row
    for name, value in (("hidden_states", 0x7F), ("topk_ids", -1), ("topk_ids", 3 << 16)):
        changed = {**arguments, name: arguments[name].copy()}
        view = changed[name].view(np.uint8) if name == "hidden_states" else changed[name]
        view[others] = value
        assert_bit_equal(run(changed)[row], alone, f"{name} of the others = {value:#x}")


def test_both_libraries_give_the_same_bits() -> None:
    arguments = small_arguments(129, dtype="float32")
    assert_bit_equal(run(arguments, "cupy"), run(arguments, "torch"), "CuPy against torch")


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", POISONS, ids=hex)
@pytest.mark.parametrize("tokens", [1, 127, 4096, 8064])
def test_allocator_filled_before_the_call(tokens: int, byte: int) -> None:
    arguments = move_arguments(small_arguments(tokens, invalid="one_slot"), "cupy")
    clean = to_host(routed_moe(**arguments))
    with poisoned_allocations("cupy", byte):
        poisoned = to_host(routed_moe(**arguments))
    assert_bit_equal(poisoned, clean, f"blocks filled with {byte:#x}")
    if tokens <= 127:
        assert_within(compare(poisoned, reference(arguments)), tolerance_of(arguments))


def test_torch_allocator_filled_with_nan() -> None:
    arguments = move_arguments(small_arguments(127, dtype="float32"), "torch")
    clean = to_host(routed_moe(**arguments))
    with poisoned_allocations("torch"):
        assert_bit_equal(routed_moe(**arguments), clean, "torch's own fill")


@pytest.mark.parametrize("byte", POISONS, ids=hex)
@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20, 1 << 26])
@pytest.mark.parametrize("library", LIBRARIES)
def test_workspace_of_any_size_and_content(library: str, size: int, byte: int) -> None:
    """A workspace may be too small; whatever lies beside it stays as it was."""
    guard, tokens = 4096, 127
    arguments = move_arguments(small_arguments(tokens), library)
    clean = to_host(routed_moe(**arguments))
    memory = to_library(np.full(guard + size + guard, 0xA5, np.uint8), library)
    memory[guard : guard + size] = byte
    workspace = memory[guard : guard + size]
    assert data_pointer(memory) % 256 == 0
    out = routed_moe(**arguments, workspace_buffer=workspace)
    assert_bit_equal(out, clean, f"workspace of {size} bytes")
    after = to_host(memory)
    assert (after[:guard] == 0xA5).all()
    assert (after[guard + size :] == 0xA5).all()


def test_a_large_workspace_replaces_allocations() -> None:
    """With an output and a workspace that holds everything the call allocates nothing."""
    import cupy

    tokens = 127
    arguments = move_arguments(small_arguments(tokens), "cupy")
    output = full((tokens, 256), np.nan, BF16, "cupy")
    workspace = cupy.empty(1 << 26, np.uint8)
    requested: list[int] = []
    allocate = cupy.get_default_memory_pool().malloc

    def watch(size: int) -> Any:
        requested.append(size)
        return allocate(size)

    with cupy.cuda.using_allocator(watch):
        routed_moe(**arguments, output=output)
        assert sum(requested) > 0, (
            "the test sees the scratch allocation of a call without workspace"
        )
        requested.clear()
        routed_moe(**arguments, output=output, workspace_buffer=workspace)
    assert requested == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_is_flat_over_many_calls(library: str) -> None:
    """Sizes repeat; neither the pools nor the caches of the package grow with the calls."""
    import cupy

    calls = [move_arguments(small_arguments(t), library) for t in (1, 8, 33, 127)]

    def used() -> int:
        synchronize()
        free, total = cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    for call in calls * 5:
        routed_moe(**call)
    before = used()
    for call in calls * 500:
        routed_moe(**call)
    assert used() - before < 1 << 20
