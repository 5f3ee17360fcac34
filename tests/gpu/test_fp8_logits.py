"""The FP8 layer from router logits equals the routed layer on the experts that it selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.reference.routing import select_experts
from cupy_moe.testing.compare import assert_bit_equal, to_host
from cupy_moe.testing.inputs import make_fp8_layer, make_hidden_states, move_arguments
from cupy_moe.types import RoutingMethodType
from tests.gpu.support import BF16, LIBRARIES, full, logits_moe, routed_moe

pytestmark = pytest.mark.gpu

NUM_EXPERTS = 64
UNTOUCHED = -7


@dataclass(frozen=True)
class Case:
    """One way of routing."""

    method: RoutingMethodType
    top_k: int = 4
    groups: tuple[int, int] | None = None  # number of groups, groups selected
    bias: str | None = None
    logits: str = "float32"
    factor: float | None = None
    norm_topk_prob: bool = True
    scale_input: bool = False
    local: tuple[int, int] | None = None

    def __str__(self) -> str:
        """Everything that differs from the defaults."""
        flags = [
            f"groups{self.groups[0]}of{self.groups[1]}" if self.groups else None,
            self.bias and f"bias_{self.bias}",
            self.factor and "factor",
            None if self.norm_topk_prob else "not_normalized",
            self.scale_input and "input_scale",
            self.local and "local",
        ]
        return "-".join([self.method.name, self.logits, *(flag for flag in flags if flag)])


M = RoutingMethodType
CASES = [
    Case(M.Default),
    Case(M.Renormalize),
    Case(M.DeepSeekV3, bias="float32", factor=2.5),
    Case(M.DeepSeekV3, groups=(8, 4), bias="float32", factor=2.5),
    Case(M.DeepSeekV3, groups=(4, 2), logits="bfloat16", bias="bfloat16"),
    Case(M.Llama4, top_k=1),
    Case(M.Llama4, top_k=1, scale_input=True),
    Case(M.RenormalizeNaive),
    Case(M.TopK),
    Case(M.SigmoidRenorm),
    Case(M.SigmoidRenorm, norm_topk_prob=False),
    Case(M.MiniMax2, bias="float32", factor=0.5),
    Case(M.MiniMax2),
    Case(M.Sigmoid),
    Case(M.TopKSigmoid, logits="bfloat16"),
    Case(M.Renormalize, top_k=8, local=(16, 8)),
]


def make_logits(num_tokens: int, dtype: str) -> np.ndarray:
    """Rows with well separated values, exact in BF16, so that the selection is beyond doubt."""
    rng = np.random.default_rng(5)
    grid = np.linspace(-4, 4, NUM_EXPERTS, endpoint=False).astype(np.float32)  # steps of 1/8
    return np.stack([rng.permutation(grid) for _ in range(num_tokens)]).astype(
        getattr(ml_dtypes, dtype, dtype)
    )


def make_arguments(case: Case, num_tokens: int) -> dict[str, Any]:
    """Arguments of the operation on logits (NumPy)."""
    layer = make_fp8_layer(
        hidden_size=128, intermediate_size=128, num_experts=NUM_EXPERTS, local=case.local
    )
    bias = None
    if case.bias:
        rng = np.random.default_rng(6)
        # Multiples of 1/16 are exact in BF16; sigmoids of the logits differ by other amounts.
        bias = rng.integers(-8, 8, NUM_EXPERTS).astype(np.float32) / 16
        bias = bias.astype(getattr(ml_dtypes, case.bias, case.bias))
    groups, topk_group = case.groups or (None, None)
    return layer.logits_arguments(
        make_hidden_states(num_tokens, layer.hidden_size),
        make_logits(num_tokens, case.logits),
        case.top_k,
        routing_bias=bias,
        n_group=groups,
        topk_group=topk_group,
        routed_scaling_factor=case.factor,
        use_routing_scales_on_input=case.scale_input,
        routing_method_type=int(case.method),
        norm_topk_prob=case.norm_topk_prob,
    )


def expected_routing(case: Case, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights by the reference."""
    bias = arguments["routing_bias"]
    groups, topk_group = case.groups or (0, 0)
    return select_experts(
        arguments["routing_logits"].astype(np.float32),
        None if bias is None else bias.astype(np.float32),
        method=case.method,
        top_k=case.top_k,
        n_group=groups,
        topk_group=topk_group,
        routed_scaling_factor=case.factor or 1.0,
        norm_topk_prob=case.norm_topk_prob,
    )


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_routed_layer(case: Case, library: str, num_tokens: int) -> None:
    host = make_arguments(case, num_tokens)
    arguments = move_arguments(host, library)
    replay = full((num_tokens + 2, case.top_k), UNTOUCHED, np.int16, library)

    rows, weights, row_of_slot = logits_moe(
        **arguments, routing_replay_out=replay, do_finalize=False
    )
    ids = to_host(replay)[:num_tokens].astype(np.int32)
    weights = to_host(weights)
    expected_ids, expected_weights = expected_routing(case, host)
    np.testing.assert_array_equal(ids, expected_ids)
    assert (to_host(replay)[num_tokens:] == UNTOUCHED).all(), "rows beyond the tokens were written"
    assert weights.dtype == BF16
    widened = weights.astype(np.float32)
    assert (np.abs(widened - expected_weights) <= 2**-7 * np.abs(expected_weights) + 1e-30).all()
    offset, count = case.local or (0, NUM_EXPERTS)
    live = ((ids >= offset) & (ids < offset + count)).reshape(-1)
    np.testing.assert_array_equal(to_host(row_of_slot) >= 0, live)
    assert np.isfinite(to_host(rows)[to_host(row_of_slot)[live]].astype(np.float32)).all()

    output = full((num_tokens, 128), np.nan, BF16, library)
    assert logits_moe(**arguments, output=output) is output
    routed = {k: v for k, v in host.items() if k not in ("routing_logits", "norm_topk_prob")}
    routed.update(topk_ids=(ids, weights))
    routed_out = routed_moe(**move_arguments(routed, library))
    assert_bit_equal(output, routed_out, "layer from logits against layer from ids")
    assert (to_host(output).astype(np.float32) != 0).any() == live.any()


def test_every_method_is_covered() -> None:
    assert {case.method for case in CASES} == set(M) - {M.Unspecified}


def test_nan_logits_are_memory_safe() -> None:
    """Which experts such a token gets is not specified; that it stays alone is."""
    case, num_tokens, row = Case(M.Renormalize), 33, 5
    host = make_arguments(case, num_tokens)
    clean = to_host(logits_moe(**move_arguments(host, "torch")))
    host["routing_logits"][row] = np.nan
    arguments = move_arguments(host, "torch")
    replay = full((num_tokens, case.top_k), UNTOUCHED, np.int16, "torch")
    out = to_host(logits_moe(**arguments, routing_replay_out=replay))
    ids = to_host(replay)
    assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
    others = np.arange(num_tokens) != row
    assert_bit_equal(out[others], clean[others], "rows of other tokens")
