"""What the benchmark runs: sizes, routings, and the arithmetic of bytes, flops and floors."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_moe.bench.ceilings import Ceilings, DenseRate
from cupy_moe.bench.peers.assignments import aligned_order, expert_order, local_assignments
from cupy_moe.bench.workloads import (
    TOKENS,
    WORKLOADS,
    Work,
    Workload,
    make_routings,
    work_of,
)

SMALL = Workload("small", "none", 256, 128, num_experts=16, top_k=4, local_num_experts=8)


def local_part(workload: Workload, ids: np.ndarray) -> np.ndarray:
    return ids[ids < workload.local_num_experts]


# --- sizes ----------------------------------------------------------------------------------------


def test_workloads_are_those_of_the_models() -> None:
    sizes = {
        key: (w.hidden_size, w.intermediate_size, w.num_experts, w.top_k, w.local_num_experts)
        for key, w in WORKLOADS.items()
    }
    assert sizes == {
        "W-A": (4096, 1536, 128, 8, 128),
        "W-B": (7168, 2048, 256, 8, 32),
        "mixtral": (4096, 14336, 8, 2, 8),
        "llama4": (5120, 8192, 16, 1, 16),
    }
    assert WORKLOADS["W-A"].title == "H4096 I1536 E128 K8"
    assert WORKLOADS["W-B"].title == "H7168 I2048 E32of256 K8"


def test_a_workload_has_whole_local_slots() -> None:
    assert (WORKLOADS["W-A"].local_slots, WORKLOADS["W-B"].local_slots) == (8, 1)
    with pytest.raises(ValueError, match=r"multiple of num_experts, got 3 \* 4 and 16"):
        Workload("odd", "none", 256, 128, num_experts=16, top_k=3, local_num_experts=4)


# --- bytes, flops, floor --------------------------------------------------------------------------


def test_work_of_two_calls_by_hand() -> None:
    """Calls of two tokens; experts 8 and above are on other ranks."""
    first = np.array([[0, 1, 8, 9], [0, 2, 10, 11]], np.int32)  # 3 experts, 4 assignments
    second = np.array([[7, 8, 9, 10], [12, 13, 14, 15]], np.int32)  # 1 expert, 1 assignment
    work = work_of(SMALL, [first, second])
    assert (work.experts_hit, work.assignments) == (2.0, 2.5)
    # 2 experts of (2 * 128 * 256 + 256 * 128) bytes, 2 * 256 in, 2 * 2 * 256 out
    assert work.num_bytes == 2 * 98304 + 512 + 1024
    # 2.5 rows times 256 -> 256 and 128 -> 256, two operations each
    assert work.flops == 2.5 * (2 * 256 * 256 + 2 * 128 * 256)


def test_work_of_one_token() -> None:
    """Eight experts of 18.9 MB: 151 MB and 302 MFLOP."""
    work = work_of(WORKLOADS["W-A"], make_routings(WORKLOADS["W-A"], 1))
    assert work.num_bytes == 8 * 3 * 4096 * 1536 + 3 * 4096 == 151_007_232
    assert work.flops == 2 * 8 * 3 * 4096 * 1536 == 301_989_888


def test_floor_is_the_larger_bound() -> None:
    dense = DenseRate("BF16", "torch.matmul", flops_per_s=1.5e15, sustained_flops_per_s=1.2e15)
    ceilings = Ceilings(read_bytes_per_s=4e12, dense=dense)

    def work(num_bytes: float, flops: float) -> Work:
        return Work(experts_hit=1, assignments=1, num_bytes=num_bytes, flops=flops)

    assert ceilings.floor_us(work(400e6, 3e9)) == pytest.approx(100)  # memory; 2 us
    assert ceilings.floor_us(work(4e6, 3e12)) == pytest.approx(2000)  # tensor cores
    assert ceilings.read_us(work(4e6, 3e12)) == pytest.approx(1)


# --- routings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", WORKLOADS)
@pytest.mark.parametrize("tokens", [t for t in TOKENS if t <= 1024])
def test_routings_are_legal(key: str, tokens: int) -> None:
    workload = WORKLOADS[key]
    routings = make_routings(workload, tokens)
    assert len(routings) >= 4
    for ids in routings:
        assert ids.shape == (tokens, workload.top_k)
        assert ids.dtype == np.int32
        assert ids.min() >= 0
        assert ids.max() < workload.num_experts
        assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()  # distinct in a token


@pytest.mark.parametrize(
    ("key", "tokens", "num_calls"),
    [("W-A", 1, 16), ("W-B", 1, 32), ("mixtral", 1, 4), ("llama4", 1, 16)],
)
def test_calls_of_one_token_share_no_expert(key: str, tokens: int, num_calls: int) -> None:
    """Together they hit every local expert once, so that no weights are in the L2 cache."""
    workload = WORKLOADS[key]
    routings = make_routings(workload, tokens)
    assert len(routings) == num_calls
    hit = np.concatenate([local_part(workload, ids) for ids in routings])
    assert sorted(hit) == list(range(workload.local_num_experts))


@pytest.mark.parametrize("key", ["W-A", "W-B", "llama4"])
def test_calls_of_four_tokens_share_no_expert(key: str) -> None:
    workload = WORKLOADS[key]
    routings = make_routings(workload, 4)
    hits = [np.unique(local_part(workload, ids)) for ids in routings]
    assert np.unique(np.concatenate(hits)).size == sum(hit.size for hit in hits)
    for ids in routings:  # equal work in every call
        assert local_part(workload, ids).size == 4 * workload.local_slots


def test_calls_of_four_tokens_are_uniform() -> None:
    """Four tokens with 8 of 128 hit 128 * (1 - (15 / 16)^4) = 29.1 experts, not always 32."""
    hits = [
        work_of(WORKLOADS["W-A"], make_routings(WORKLOADS["W-A"], 4, seed)).experts_hit
        for seed in range(50)
    ]
    assert np.mean(hits) == pytest.approx(128 * (1 - (15 / 16) ** 4), rel=0.01)


@pytest.mark.parametrize("tokens", [1, 4, 16, 1024, 8192])
def test_a_rank_gets_one_assignment_a_token_on_average(tokens: int) -> None:
    work = work_of(WORKLOADS["W-B"], make_routings(WORKLOADS["W-B"], tokens))
    # the local experts among 8 of 256, hypergeometric, averaged over four calls
    deviation = np.sqrt(8 * (1 / 8) * (7 / 8) * (248 / 255) / (4 * tokens))
    assert work.assignments / tokens == pytest.approx(1, abs=5 * deviation)
    if tokens <= 4:
        assert work.assignments == tokens


def test_large_batches_hit_every_expert_equally() -> None:
    (ids, *_) = make_routings(WORKLOADS["W-A"], 8192)
    counts = np.bincount(ids.reshape(-1), minlength=128)
    assert counts.mean() == 512
    assert np.abs(counts - 512).max() < 6 * np.sqrt(512)


def test_routings_follow_from_the_seed() -> None:
    first, again, other = (make_routings(SMALL, 64, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


# --- what peers are given -------------------------------------------------------------------------


def test_local_assignments() -> None:
    ids = np.array([[9, 3, 8, 1], [8, 9, 10, 11], [7, 12, 3, 13]], np.int32)
    assigned = local_assignments(SMALL, ids)
    assert assigned.tokens.tolist() == [0, 0, 2, 2]
    assert assigned.experts.tolist() == [3, 1, 7, 3]
    assert assigned.row_of_slot.tolist() == [[-1, 0, -1, 1], [-1, -1, -1, -1], [2, -1, 3, -1]]
    assert not assigned.is_every_slot


def test_assignments_in_the_order_of_the_experts() -> None:
    """Of the same routing: experts 3, 1, 7, 3 of tokens 0, 0, 2, 2."""
    ids = np.array([[9, 3, 8, 1], [8, 9, 10, 11], [7, 15, 3, 14]], np.int32)
    assigned = expert_order(local_assignments(SMALL, ids))
    assert assigned.experts.tolist() == [1, 3, 3, 7]
    assert assigned.tokens.tolist() == [0, 0, 2, 2]
    assert assigned.row_of_slot.tolist() == [[-1, 1, -1, 0], [-1, -1, -1, -1], [3, -1, 2, -1]]


def test_all_slots_are_rows_where_all_experts_are_local() -> None:
    (ids, *_) = make_routings(WORKLOADS["mixtral"], 8)
    assigned = local_assignments(WORKLOADS["mixtral"], ids)
    assert assigned.is_every_slot
    assert np.array_equal(assigned.row_of_slot.reshape(-1), np.arange(16))
    assert np.array_equal(assigned.experts, ids.reshape(-1))


def test_aligned_order_by_hand() -> None:
    experts = np.array([2, 0, 2, 2, 0, 2, 2], np.int32)
    rows, block_experts = aligned_order(experts, num_experts=4, block=4)
    assert block_experts.tolist() == [0, 2, 2]
    assert rows.tolist() == [1, 4, 7, 7, 0, 2, 3, 5, 6, 7, 7, 7]


def test_aligned_order_of_many_rows() -> None:
    experts = np.random.default_rng(0).integers(0, 32, 1000).astype(np.int32)
    rows, block_experts = aligned_order(experts, num_experts=32, block=16)
    assert sorted(rows[rows < 1000]) == list(range(1000))
    of_row = np.repeat(block_experts, 16)
    assert np.array_equal(of_row[rows < 1000], experts[rows[rows < 1000]])
