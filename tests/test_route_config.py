"""Choice of the routing kernel's specialization; needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupy_moe.kernels.route import RouteConfig, all_route_configs, route_config
from cupy_moe.types import RoutingMethodType as Method
from tests.routing_problems import Problem, grouped_problems, problem_id, problems

ROOMY = Problem(num_tokens=3, num_experts=256, top_k=1, routing_method=Method.Default)
GROUPED = replace(ROOMY, routing_method=Method.DeepSeekV3, num_groups=8, topk_group=4)


@pytest.mark.parametrize("problem", problems() + grouped_problems(), ids=problem_id)
def test_choice_is_among_the_listed_and_holds_all_experts(problem: Problem) -> None:
    config = route_config(problem)
    assert config in all_route_configs()
    lanes = problem.num_experts // problem.num_groups if problem.is_grouped else 32
    assert lanes <= 32
    assert lanes * config.experts_per_lane >= problem.num_experts


def test_listed_specializations_are_distinct() -> None:
    specs = [config.spec() for config in all_route_configs()]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize(
    ("problem", "rule"),
    [
        (replace(ROOMY, routing_method=Method.RenormalizeNaive), Method.Renormalize),
        (replace(ROOMY, routing_method=Method.Llama4), Method.TopKSigmoid),
        (replace(ROOMY, routing_method=Method.SigmoidRenorm), Method.SigmoidRenorm),
        (
            replace(ROOMY, routing_method=Method.SigmoidRenorm, norm_topk_prob=False),
            Method.Sigmoid,
        ),
        (replace(ROOMY, routing_method=Method.Sigmoid, norm_topk_prob=False), Method.Sigmoid),
        (GROUPED, Method.DeepSeekV3),
        (replace(GROUPED, num_groups=0), Method.MiniMax2),
        (replace(GROUPED, num_groups=1), Method.MiniMax2),
        (replace(GROUPED, routing_method=Method.MiniMax2), Method.MiniMax2),
    ],
)
def test_equal_methods_share_a_rule(problem: Problem, rule: Method) -> None:
    assert route_config(problem).method is rule


def test_element_type_of_an_ignored_bias_makes_no_difference() -> None:
    assert route_config(replace(ROOMY, bias_dtype="bfloat16")) == route_config(ROOMY)
    biased = replace(ROOMY, routing_method=Method.MiniMax2)
    assert route_config(replace(biased, bias_dtype="bfloat16")).bias_bf16
    assert not route_config(biased).bias_bf16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 2049}, r"num_experts must be in \[1, 2048\], got 2049"),
        ({"num_experts": 0}, r"num_experts must be in \[1, 2048\], got 0"),
        ({"top_k": 33}, r"top_k must be in \[1, 32\], got 33"),
        ({"num_experts": 4, "top_k": 5}, r"top_k must be in \[1, 4\], got 5"),
        ({"top_k": 0}, r"top_k must be in \[1, 32\], got 0"),
        ({"routing_method": Method.Unspecified}, "no routing rule belongs"),
    ],
)
def test_what_the_kernel_cannot_hold_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route_config(replace(ROOMY, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"num_groups": 9, "num_experts": 252},
        {"num_groups": 7},
        {"num_groups": 4},  # 64 experts a group
        {"num_groups": 8, "num_experts": 8},  # one expert a group
        {"topk_group": 0},
        {"topk_group": 9},
    ],
)
def test_unsuitable_groups_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at most 8 groups of 2 to 32 experts"):
        route_config(replace(GROUPED, **change))


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (1 << 20, 1 << 18)])
def test_grid_has_a_warp_a_token(num_tokens: int, blocks: int) -> None:
    config = RouteConfig(Method.Default, 8, logits_bf16=False, bias_bf16=False)
    assert config.grid(num_tokens) == (blocks, 1, 1)
