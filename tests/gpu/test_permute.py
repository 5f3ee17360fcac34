"""The permutation kernel against ``reference.routing``: every configuration, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cupy_moe.kernels.permute import (
    PermuteConfig,
    all_permute_configs,
    bind_permute,
    permute_config,
)
from cupy_moe.reference.routing import build_permutation
from cupy_moe.runtime.devices import compute_capability
from cupy_moe.runtime.jit import arch_for, load
from cupy_moe.runtime.launch import enqueue

pytestmark = pytest.mark.gpu

INT32 = np.iinfo(np.int32)
GUARD = 64  # elements behind every output, which must survive
SLOT_COUNTS = (1, 7, 8, 31, 33, 1000, 1024, 1025, 8191, 65_536, 100_003, 600_000)
PATTERNS = ("uniform", "skewed", "one_expert", "blocks", "half_foreign", "all_foreign", "extremes")


@dataclass(frozen=True)
class Case:
    """Sizes of one permutation and how its ids are drawn."""

    num_slots: int
    local_num_experts: int = 64
    tile_n: int = 16
    pattern: str = "uniform"
    offset: int = 5

    def ids(self) -> np.ndarray:
        """Global ids, of local experts or not, all of them 16-bit."""
        rng = np.random.default_rng(self.num_slots + self.local_num_experts)
        size, experts = self.num_slots, self.local_num_experts
        uniform = rng.integers(0, experts, size)
        local = {
            "skewed": np.where(rng.random(size) < 0.9, experts // 2, uniform),
            "one_expert": np.full(size, experts - 1),
            "blocks": np.arange(size) * experts // size,
        }.get(self.pattern, uniform)
        foreign = rng.choice([-1, -self.offset - 1, experts, -32_768, 32_767 - self.offset], size)
        share = {"half_foreign": 0.5, "all_foreign": 1.0, "extremes": 0.25}.get(self.pattern, 0.0)
        ids = np.where(rng.random(size) < share, foreign, local) + self.offset
        return np.clip(ids, -32_768, 32_767).astype(np.int32)


@dataclass(frozen=True)
class Permuted:
    """Outputs on the host, guards and all."""

    expert_weights: np.ndarray
    expanded_to_permuted: np.ndarray
    permuted_to_expanded: np.ndarray
    tile_info: np.ndarray
    schedule: np.ndarray


def arch() -> str:
    return arch_for(compute_capability(0))


def configs() -> list[PermuteConfig]:
    return [c for c in all_permute_configs("sm_90a") if not c.packed_ids]


def runnable(config: PermuteConfig, num_experts: int = 64) -> PermuteConfig:
    if config.cluster_size > 1 and compute_capability(0) < (9, 0):
        pytest.skip("no clusters before compute capability 9.0")
    assert config.smem_bytes(num_experts) <= 99 * 1024
    return config


def chosen(case: Case, *, packed: bool) -> PermuteConfig:
    return permute_config(
        packed_ids=packed,
        num_slots=case.num_slots,
        local_num_experts=case.local_num_experts,
        arch=arch(),
    )


# --- expected -------------------------------------------------------------------------------------


def weight_bits(case: Case) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.integers(0, 1 << 16, case.num_slots, dtype=np.uint16)  # NaN and -0.0 among them


def with_guard(values: np.ndarray, dtype: Any, poison: int) -> np.ndarray:
    guard = np.full(GUARD * np.dtype(dtype).itemsize, poison, np.uint8).view(dtype)
    return np.concatenate([values.astype(dtype), guard])


def expected(case: Case, ids: np.ndarray, *, packed: bool, poison: int) -> Permuted:
    experts, tile = case.local_num_experts, case.tile_n
    permutation = build_permutation(
        ids.reshape(-1, 1),
        num_experts=case.offset + experts,
        local_expert_offset=case.offset,
        local_num_experts=experts,
        tile=tile,
    )
    tiles = -(-permutation.counts // tile)
    tile_expert = np.repeat(np.arange(experts), tiles)
    first_tile = (np.cumsum(tiles) - tiles)[tile_expert]
    index = np.arange(tiles.sum()) - first_tile
    rows = np.minimum(permutation.counts[tile_expert] - index * tile, tile)
    tile_info = np.stack([tile_expert, first_tile, tiles[tile_expert], rows], axis=1)
    untouched = np.full(2 * case.num_slots, poison, np.uint8).view(np.uint16)
    return Permuted(
        with_guard(weight_bits(case) if packed else untouched, np.uint16, poison),
        with_guard(permutation.expanded_to_permuted, np.int32, poison),
        with_guard(permutation.permuted_to_expanded, np.int32, poison),
        with_guard(tile_info.ravel(), np.int32, poison),
        with_guard(np.array([tiles.sum(), 0, 0, 0, 0]), np.int32, poison),
    )


# --- running --------------------------------------------------------------------------------------


def launch(config: PermuteConfig, case: Case, ids: Any, out: dict[str, Any], **how: Any) -> None:
    bound = bind_permute(
        load(config.spec(), 0),
        config,
        topk_ids=ids.data.ptr,
        **{name: array.data.ptr for name, array in out.items()},
        num_slots=case.num_slots,
        local_num_experts=case.local_num_experts,
        local_expert_offset=case.offset,
        tile_n=case.tile_n,
        **how,
    )
    enqueue([bound])


def assert_permuted(
    config: PermuteConfig, case: Case, ids: np.ndarray | None = None, *, poison: int = 0xFF
) -> None:
    """Run on poisoned outputs with guards and compare every element."""
    import cupy

    ids = case.ids() if ids is None else ids
    model = expected(case, ids, packed=config.packed_ids, poison=poison)
    words = ids << 16 | weight_bits(case) if config.packed_ids else ids
    out = {
        name: cupy.full(array.nbytes, poison, np.uint8).view(array.dtype)
        for name, array in vars(model).items()
    }
    device_words = cupy.asarray(words.astype(np.int32))
    stream = cupy.cuda.get_current_stream().ptr
    launch(config, case, device_words, out, stream=stream, pdl=False)
    for name, array in vars(model).items():
        np.testing.assert_array_equal(cupy.asnumpy(out[name]), array, err_msg=name)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("num_slots", SLOT_COUNTS)
def test_chosen_configuration(num_slots: int, packed: bool) -> None:
    for experts, tile in ((1, 8), (64, 16), (256, 128), (384, 8), (2048, 64)):
        case = Case(num_slots, experts, tile)
        assert_permuted(chosen(case, packed=packed), case)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", configs(), ids=str)
@pytest.mark.parametrize("num_slots", [1, 33, 1000, 65_536, 100_003])
def test_every_configuration(config: PermuteConfig, num_slots: int, pattern: str) -> None:
    config = runnable(config)
    for packed in (False, True):
        assert_permuted(replace(config, packed_ids=packed), Case(num_slots, pattern=pattern))


@pytest.mark.parametrize("tile_n", [1, 8, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("num_experts", [1, 2, 37, 512])
def test_tiles(tile_n: int, num_experts: int) -> None:
    for num_slots in (5, 700, 20_000):
        case = Case(num_slots, num_experts, tile_n, "skewed")
        assert_permuted(chosen(case, packed=False), case)


@pytest.mark.parametrize("num_slots", [64, 70_000])
def test_ids_at_the_ends_of_their_types(num_slots: int) -> None:
    """Local experts up to the largest 16-bit id; neighbors of the range are not local."""
    case = Case(num_slots, local_num_experts=8, offset=32_760)
    edges = np.array([32_760, 32_767, 32_759, -32_768, -1, 0, 32_763], np.int32)
    assert_permuted(chosen(case, packed=True), case, np.resize(edges, num_slots))


@pytest.mark.parametrize("num_slots", [64, 70_000])
def test_no_plain_id_wraps_into_the_local_range(num_slots: int) -> None:
    case = Case(num_slots, local_num_experts=64, offset=100)
    edges = [INT32.min, INT32.min + 100, INT32.max, INT32.max - 99, -1, 0, 99, 164, 100, 163]
    ids = np.resize(np.array(edges, np.int32), num_slots)
    assert_permuted(chosen(case, packed=False), case, ids)


def test_many_slots_a_warp() -> None:
    case = Case(20_000_003, 256, 128)
    assert_permuted(chosen(case, packed=True), case)


# --- repeats and order on a stream ----------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [8, 4096, 65_536])
def test_result_does_not_depend_on_the_run_or_what_was_in_the_outputs(num_slots: int) -> None:
    case = Case(num_slots, 256, 8, "half_foreign")
    for run in range(20):
        assert_permuted(chosen(case, packed=True), case, poison=(0x00, 0x7F, 0xFF)[run % 3])


@pytest.mark.parametrize("num_slots", [8, 40_000])
def test_dependent_launches_wait_for_their_producers(num_slots: int) -> None:
    """Ids written just before, and the same outputs again and again."""
    import cupy

    case = Case(num_slots)
    config = chosen(case, packed=False)
    host = case.ids()
    model = expected(case, host, packed=False, poison=0xFF)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source, ids = cupy.asarray(host), cupy.empty(num_slots, np.int32)
        ballast = cupy.ones(1 << 24, np.float32)
        out = {n: cupy.full(a.nbytes, 0xFF, np.uint8).view(a.dtype) for n, a in vars(model).items()}
        copies = []
        for _ in range(50):
            ids.fill(-1)
            ballast += 1
            ids[:] = source
            pdl = compute_capability(0) >= (9, 0)
            launch(config, case, ids, out, stream=stream.ptr, pdl=pdl)
            copies.append(out["expanded_to_permuted"].copy())
    stream.synchronize()
    for copy in copies:
        np.testing.assert_array_equal(cupy.asnumpy(copy), model.expanded_to_permuted)
