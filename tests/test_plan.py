"""Plans are pure: any problem gets a tiling that divides it, and buffers for its worst routing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_moe.bench.sweep import problem_of
from cupy_moe.bench.workloads import WORKLOADS
from cupy_moe.kernels.gemm_tiles import MainloopKind
from cupy_moe.kernels.place_tokens import PlaceTokensConfig
from cupy_moe.plan import all_specializations, plan_moe
from cupy_moe.problem import Addresses, DeviceTraits, MoeProblem
from cupy_moe.stage_inputs import Functions, StageInputs
from cupy_moe.tiling import Tiling, choose_tiling, tile_candidates
from cupy_moe.types import ActivationType, MoeFormat

H200 = DeviceTraits("sm_90a", 132)
A100 = DeviceTraits("sm_80", 108)
LAYER = problem_of(WORKLOADS["W-A"], 1)


@st.composite
def problems(draw: st.DrawFn) -> MoeProblem:
    experts = draw(st.integers(1, 512))
    moe_format = draw(st.sampled_from(MoeFormat))
    other = ActivationType.Situ if moe_format.has_block_scales else ActivationType.Relu2
    strategies = [None, "tp_n_tp_n", "tp_n_tp_k"] if moe_format.has_block_scales else [None]
    return replace(
        LAYER,
        num_tokens=draw(st.integers(1, 70_000)),
        hidden_size=256 * draw(st.integers(1, 32)),
        intermediate_size=128 * draw(st.integers(1, 64)),
        num_experts=experts,
        top_k=draw(st.integers(1, min(experts, 16))),
        local_num_experts=draw(st.integers(1, experts)),
        activation=draw(st.sampled_from([ActivationType.Swiglu, other])),
        do_finalize=draw(st.booleans()),
        moe_format=moe_format,
        strategy=draw(st.sampled_from(strategies)),
        partition_sms=(64, 8),
    )


@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.arch)
@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_any_problem_gets_one_of_its_candidates(device: DeviceTraits, problem: MoeProblem) -> None:
    tiling = choose_tiling(problem, device)
    assert tiling in tile_candidates(problem, device)
    plan = plan_moe(problem, device)
    has_blocks, gathers = problem.moe_format.has_block_scales, plan.fc1.gather_tokens
    assert (plan.place is not None) == (has_blocks or not gathers)
    assert ("tokens" in plan.scratch.offsets) == (has_blocks and gathers)
    count = 1 if problem.strategy is None else 2
    for config, parts in ((plan.fc1, plan.fc1_parts), (plan.fc2, plan.fc2_parts)):
        assert len(parts) == count
        for part in parts:
            assert part.rows % config.tile_m == 0
            # Blocks look their first tile up before they know how many there are.
            num_m_tiles = -(-part.rows // (config.tile_m * config.cluster))
            num_clusters, rest = divmod(part.grid, config.cluster)
            assert rest == 0
            assert 1 <= num_clusters <= num_m_tiles * (plan.capacity // plan.tile_n)
    assert sum(part.rows for part in plan.fc1_parts) == problem.fc1_rows
    assert sum(part.rows * part.k for part in plan.fc2_parts) == (
        problem.hidden_size * problem.intermediate_size
    )
    if count == 2:  # a grid fits its partition
        assert plan.fc1_parts[1].grid <= 8 * plan.fc1.min_blocks


@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.arch)
@settings(max_examples=50, deadline=None)
@given(problem=problems())
def test_every_candidate_is_compiled_ahead_of_time(
    device: DeviceTraits, problem: MoeProblem
) -> None:
    compiled = set(all_specializations(device.arch))
    for tiling in tile_candidates(problem, device):
        plan = plan_moe(problem, device, tiling)
        configs = [plan.permute, plan.place, plan.fc1, plan.fc2, plan.add_rows]
        configs.append(plan.finalize)
        assert {config.spec() for config in configs if config is not None} <= compiled


@pytest.mark.parametrize(
    ("moe_format", "strategy", "gathered", "permuted"),
    [
        (MoeFormat.Fp8, None, None, "gemm2_output"),
        (MoeFormat.Bf16, None, "tokens", "gemm2_output"),
        (MoeFormat.Bf16, "tp_n_tp_n", "tokens", "gemm2_output"),
        (MoeFormat.Bf16, "tp_n_tp_k", "tokens", "permuted_tokens"),
    ],
)
@pytest.mark.parametrize("gather", [False, True])
def test_where_fc1_reads_tokens(
    moe_format: MoeFormat, strategy: str | None, gathered: str | None, permuted: str, gather: bool
) -> None:
    sizes = {"num_tokens": 64, "strategy": strategy, "partition_sms": (66, 66)}
    problem = replace(LAYER, moe_format=moe_format, **sizes)
    plan = plan_moe(problem, H200, Tiling(16, 128, 128, gather=gather))
    layer = StageInputs(
        problem=problem,
        plan=plan,
        functions=Functions(*[None] * len(fields(Functions))),
        at=Addresses(hidden_states=-1),
        device=0,
        pdl=True,
        routed_scaling_factor=1.0,
        scratch=plan.scratch.offsets,
    )
    buffer = gathered if gather else permuted
    assert layer.tokens == (plan.scratch.offsets[buffer] if buffer else -1)
    assert plan.place == (PlaceTokensConfig(moe_format) if buffer else None)


def test_main_loop_follows_the_architecture() -> None:
    assert plan_moe(LAYER, H200).fc1.mainloop_kind is MainloopKind.Wgmma
    assert plan_moe(LAYER, A100).fc1.mainloop_kind is MainloopKind.Mma
    assert plan_moe(LAYER, DeviceTraits("sm_100a", 148)).fc1.mainloop_kind is MainloopKind.Mma


@pytest.mark.parametrize(
    ("tokens", "tile_n", "takes_tiles"),
    [(1, 8, False), (16, 8, True), (64, 16, True), (256, 32, True), (8192, 128, True)],
)
def test_choices_that_were_measured(tokens: int, tile_n: int, takes_tiles: bool) -> None:
    plan = plan_moe(replace(LAYER, num_tokens=tokens), H200)
    assert (plan.tile_n, plan.take_tiles) == (tile_n, takes_tiles)


def test_a_tiling_that_does_not_fit_is_refused() -> None:
    """A warp sorts 32 slots at most; rows must be whole tiles."""
    sorting = Tiling(8, 64, 64, sort=True)
    assert plan_moe(replace(LAYER, num_tokens=4), H200, sorting).permute is None
    for changes in ({"num_tokens": 5}, {"hidden_size": 96}):
        with pytest.raises(ValueError, match="sorting does not fit"):
            plan_moe(replace(LAYER, **changes), H200, sorting)


@pytest.mark.parametrize(
    ("tokens", "on_h200", "on_a100"),
    [
        (1, 8, 8),
        (64, 8, 8),
        (128, 16, 16),
        (256, 24, 32),
        (1024, 96, 64),
        (2048, 160, 64),
        (4096, 160, 64),
        (8192, 192, 64),
    ],
)
def test_most_experts_of_fp4_layers_have_few_tiles(tokens: int, on_h200: int, on_a100: int) -> None:
    problem = replace(LAYER, num_tokens=tokens, moe_format=MoeFormat.Bf16)
    assert choose_tiling(problem, H200).tile_n == on_h200
    assert choose_tiling(problem, A100).tile_n == on_a100


@pytest.mark.parametrize(("hidden", "tile_m"), [(3072, 256), (23 * 128, 128)])
def test_many_tokens_of_fp4_layers_share_as_many_weight_rows_as_divide(
    hidden: int, tile_m: int
) -> None:
    problem = replace(LAYER, num_tokens=1024, hidden_size=hidden, moe_format=MoeFormat.Bf16)
    tiling = choose_tiling(problem, H200)
    assert (tiling.fc1_tile_m, tiling.fc2_tile_m, tiling.gather) == (256, tile_m, False)


def test_few_tiles_of_fp4_layers_are_small_ones() -> None:
    sizes = {"num_tokens": 1, "moe_format": MoeFormat.Bf16}
    assert choose_tiling(replace(LAYER, **sizes), H200).fc1_tile_m == 64
    many = choose_tiling(replace(LAYER, **sizes | {"num_tokens": 64}), H200)
    assert (many.fc1_tile_m, many.fc2_tile_m) == (128, 128)


def test_partitions_are_tiled_for_their_own_multiprocessors() -> None:
    """Small partitions have more waves, of which larger tiles leave less idle."""
    sizes = {"num_tokens": 1, "moe_format": MoeFormat.Bf16, "strategy": "tp_n_tp_n"}
    plans = [plan_moe(replace(LAYER, **sizes, partition_sms=(n, n)), H200) for n in (8, 66)]
    assert [
        choose_tiling(replace(LAYER, **sizes, partition_sms=(n, 132)), H200) for n in (8, 66)
    ] == [choose_tiling(replace(LAYER, **sizes, partition_sms=(n, n)), H200) for n in (8, 66)]
    for plan, sms in zip(plans, (8, 66), strict=True):
        assert all(part.grid <= sms * plan.fc1.min_blocks for part in plan.fc1_parts)
