"""Scheme choice, receive buffers and cluster shapes of the tensor-parallel finalize; pure sizes."""

from __future__ import annotations

import itertools

import pytest

from cupy_moe.comm.launches import Launcher
from cupy_moe.comm.layout import (
    GENERATIONS,
    SchemeLimits,
    WorkspaceLayout,
    choose_scheme,
    default_limits,
)
from cupy_moe.kernels.finalize_rmsnorm import (
    MAX_GROUPS,
    MAX_HIDDEN_SIZE,
    MAX_PEERS,
    MAX_THREADS,
    MAX_TOP_K,
    MAX_WARPS,
    RANKS,
    FinalizeScheme,
    choose_shape,
    possible_shapes,
    static_smem,
)

SMEM = 232448
SEVERAL = [n for n in RANKS if n > 1]
LAYOUTS = [
    WorkspaceLayout(ranks, hidden, top_k, tokens, SchemeLimits(3, 9))
    for ranks, (hidden, top_k), tokens in itertools.product(
        SEVERAL, [(4096, 8), (8, 1), (2880, 6), (16384, 32)], [1, 100, 1024]
    )
]


@pytest.mark.parametrize("num_ranks", SEVERAL)
def test_scheme_depends_on_tokens_and_ranks_only(num_ranks: int) -> None:
    limits = SchemeLimits(2, 5)
    chosen = [choose_scheme(t, num_ranks, limits) for t in range(1, 8)]
    assert chosen == [
        *[FinalizeScheme.EveryRank] * 2,
        *[FinalizeScheme.ExpertOwner] * 3,
        *[FinalizeScheme.TokenOwner] * 2,
    ]


def test_one_rank_sends_nothing() -> None:
    assert choose_scheme(10**6, 1, default_limits(1)) is FinalizeScheme.EveryRank
    layout = WorkspaceLayout(1, 4096, 8, 1024, default_limits(1))
    assert layout.num_bytes <= 1024


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_buffers_do_not_overlap_and_are_filled_once(layout: WorkspaceLayout) -> None:
    end = 0
    for offset, count, _ in sorted(layout.fills()):
        assert offset == end
        end = offset + 4 * count
    assert end == layout.num_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_copies_of_every_buffer_lie_before_the_next_one(layout: WorkspaceLayout) -> None:
    peers = layout.num_ranks - 1
    for scheme, b in layout.buffers().items():
        senders = layout.num_ranks if scheme is FinalizeScheme.ExpertOwner else peers
        rows_end = b.rows_offset + GENERATIONS * peers * b.rows_slots * b.row_group_bytes
        assert b.rows_offset + GENERATIONS * b.rows_copy_bytes == rows_end <= b.results_offset
        end = b.results_offset + GENERATIONS * senders * b.results_slots * b.result_bytes
        assert b.results_offset + GENERATIONS * b.results_copy_bytes == end <= b.generations_offset
        assert b.generations_offset + 4 * MAX_WARPS * MAX_GROUPS * b.capacity <= b.end
        assert b.rows_offset % 256 == b.results_offset % 256 == b.generations_offset % 256 == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_send_where_the_others_expect_it(layout: WorkspaceLayout) -> None:
    """Every buffer of every rank has one sender, and the next rank is the first receiver."""
    size = layout.num_ranks
    workspaces = [(rank + 1) << 40 for rank in range(size)]
    for scheme, b in layout.buffers().items():
        rows, results = set(), set()
        for rank in range(size):
            launcher = Launcher.__new__(Launcher)
            launcher._layout, launcher._rank = layout, rank
            launcher._buffers = layout.buffers()
            peers = workspaces[:rank] + workspaces[rank + 1 :]
            places = launcher._destinations(scheme, peers)
            for turn in range(size - 1):
                receiver = (rank + 1 + turn) % size
                number = rank if rank < receiver else rank - 1  # among the receiver's peers
                base = workspaces[receiver] + b.rows_offset
                assert places[turn] == base + number * b.rows_copy_bytes // (size - 1)
                rows.add(places[turn])
                is_sum = scheme is FinalizeScheme.ExpertOwner
                sender, senders = (rank, size) if is_sum else (number, size - 1)
                base = workspaces[receiver] + b.results_offset
                place = places[MAX_PEERS + turn]
                assert place == base + sender * b.results_copy_bytes // senders
                results.add(place)
            assert not any(places[size - 1 : MAX_PEERS])
        if b.capacity:
            assert len(rows) == size * (size - 1)
        if b.results_slots:
            assert len(results) == size * (size - 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_launch_has_whole_rounds_of_owners(layout: WorkspaceLayout) -> None:
    assert layout.token_capacity % layout.num_ranks == 0
    assert layout.token_capacity >= layout.max_tokens


def test_sizes_beyond_two_gibibytes() -> None:
    layout = WorkspaceLayout(2, 16384, 32, 4096, default_limits(2))
    assert layout.num_bytes > 2**32
    assert layout.buffers()[FinalizeScheme.TokenOwner].results_offset > 2**32


def test_memory_of_the_default_sizes() -> None:
    for num_ranks in SEVERAL:
        layout = WorkspaceLayout(num_ranks, 4096, 8, 1024, default_limits(num_ranks))
        assert layout.num_bytes < 300 * 2**20


@pytest.mark.parametrize("hidden_size", [8, 256, 264, 2880, 4096, 7168, 16384])
@pytest.mark.parametrize("top_k", [1, 8, 32])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_shapes_hold_a_row(num_ranks: int, hidden_size: int, top_k: int) -> None:
    shapes = possible_shapes(num_ranks, hidden_size, top_k, SMEM, True)
    assert shapes
    for num_blocks, shape in shapes.items():
        of_columns = num_blocks * shape.num_threads // shape.num_groups
        assert of_columns * 8 >= hidden_size
        assert of_columns // 32 <= MAX_WARPS
        assert shape.num_threads <= MAX_THREADS
        assert shape.num_groups <= max(1, top_k)
        assert shape.smem + static_smem(True) <= SMEM


def test_largest_row_needs_clusters() -> None:
    assert min(possible_shapes(2, MAX_HIDDEN_SIZE, MAX_TOP_K, SMEM, True)) == 8
    assert not possible_shapes(2, MAX_HIDDEN_SIZE, MAX_TOP_K, SMEM, False)
    assert list(possible_shapes(2, 4096, 8, 100 * 1024, False)) == [1]


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 8), (16, 8), (17, 4), (64, 2), (133, 1)])
def test_tokens_are_spread_over_the_multiprocessors(tokens: int, blocks: int) -> None:
    shapes = possible_shapes(2, 4096, 8, SMEM, True)
    assert choose_shape(shapes, tokens, 132).num_blocks == blocks


@pytest.mark.parametrize(("tokens", "groups"), [(1, 4), (16, 4), (17, 4), (64, 2), (133, 1)])
def test_slots_take_the_warps_that_columns_leave(tokens: int, groups: int) -> None:
    shape = choose_shape(possible_shapes(2, 4096, 8, SMEM, True), tokens, 132)
    assert shape.num_groups == groups
    assert shape.num_threads == min(MAX_THREADS, 4 * 512 // shape.num_blocks)
    assert shape.smem == (2 if groups > 1 else 1) * 8 * 4096 * 2 // shape.num_blocks


@pytest.mark.parametrize(("tokens", "groups"), [(1, 8), (16, 8), (17, 4), (64, 2), (133, 1)])
def test_slots_of_many_ranks_take_more(tokens: int, groups: int) -> None:
    for num_ranks in (4, 8):
        shape = choose_shape(possible_shapes(num_ranks, 4096, 8, SMEM, True), tokens, 132)
        assert shape.num_groups == groups
        assert shape.num_threads == 512
