"""Routing problems, golden cases, and logits whose selection does not hang on rounding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupy_moe.formats import decode_bf16, encode_bf16
from cupy_moe.types import RoutingMethodType as Method

__all__ = [
    "GOLDEN_CASES",
    "GROUPS",
    "METHODS",
    "Problem",
    "draw",
    "golden",
    "grouped_problems",
    "problem_id",
    "problems",
]

GOLDEN = np.load(Path(__file__).parent / "data" / "routing.npz")
GOLDEN_CASES = {case["name"]: case for case in json.loads(str(GOLDEN["cases"]))["cases"]}
DTYPES = {"f32": "float32", "bf16": "bfloat16", None: None}

METHODS = [method for method in Method if method is not Method.Unspecified]
BIASED = (Method.DeepSeekV3, Method.MiniMax2)
SIZES = (1, 2, 31, 32, 33, 128, 129, 256, 512, 1000, 2048)
GROUPS = [  # num_experts, num_groups, topk_group, top_k
    (4, 2, 1, 2),
    (8, 4, 2, 4),
    (32, 8, 4, 16),
    (60, 5, 3, 8),
    (64, 2, 1, 22),
    (96, 3, 2, 6),
    (100, 4, 4, 22),
    (256, 8, 4, 8),
]
KEY_GAP = 4e-6  # ids are exact where neighbouring keys differ by more (times max(1, |key|))


@dataclass(frozen=True)
class Problem:
    num_tokens: int
    num_experts: int
    top_k: int
    routing_method: Method
    num_groups: int = 0
    topk_group: int = 0
    norm_topk_prob: bool = True
    logits_dtype: str = "float32"
    bias_dtype: str | None = None
    routed_scaling_factor: float = 1.0

    @property
    def is_grouped(self) -> bool:
        return self.routing_method is Method.DeepSeekV3 and self.num_groups > 1


# --- drawing logits whose selection does not hang on rounding -------------------------------------


def rounded_bias(problem: Problem, bias: np.ndarray | None) -> np.ndarray:
    if bias is None or problem.routing_method not in BIASED:
        return np.zeros(problem.num_experts, np.float32)
    return decode_bf16(encode_bf16(bias)) if problem.is_grouped else bias


def keys(problem: Problem, logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Selection keys in FP64, before groups are excluded."""
    x = logits.astype(np.float64)
    if problem.routing_method is Method.Default:
        exponentials = np.exp(x - x.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)
    if problem.routing_method in (Method.SigmoidRenorm, Method.Sigmoid, *BIASED):
        return 0.5 * np.tanh(0.5 * x) + 0.5 + bias
    return x


def clearly_larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - b > KEY_GAP * np.maximum(1.0, np.abs(a))


def limit_to_groups(problem: Problem, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys with -inf outside the best groups, and per token whether that choice is clear."""
    grouped = scores.reshape(len(scores), problem.num_groups, -1)
    sums = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    order = np.argsort(-sums, axis=1, kind="stable")
    ranked = np.take_along_axis(sums, order, axis=1)
    kept = problem.topk_group
    clear = np.ones(len(scores), bool)
    if kept < problem.num_groups:
        clear = clearly_larger(ranked[:, kept - 1], ranked[:, kept])
    limited = grouped.copy()
    np.put_along_axis(limited, order[:, kept:, None], -np.inf, axis=1)
    return limited.reshape(scores.shape), clear


def decided(problem: Problem, logits: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Per token: whether its experts and their order do not hang on rounding.

    That is, neighbours among the top_k + 1 largest keys differ clearly, or tie exactly because
    logit and bias are equal; and the choice of groups is clear.
    """
    offset = rounded_bias(problem, bias)
    scores = keys(problem, logits, offset)
    clear = np.ones(len(logits), bool)
    if problem.is_grouped:
        scores, clear = limit_to_groups(problem, scores)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : problem.top_k + 1]
    ranked, x = (np.take_along_axis(a, order, axis=1) for a in (scores, logits))
    tied = (x[:, :-1] == x[:, 1:]) & (offset[order[:, :-1]] == offset[order[:, 1:]])
    return clear & (tied | clearly_larger(ranked[:, :-1], ranked[:, 1:])).all(axis=1)


def draw(problem: Problem, seed: int, *, mean: float = 0.0) -> tuple[np.ndarray, np.ndarray | None]:
    """Draw logits (T, E), and a bias if the problem has one, redrawing undecided tokens."""
    rng = np.random.default_rng(seed)

    def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
        values = values.astype(np.float32)
        return decode_bf16(encode_bf16(values)) if dtype == "bfloat16" else values

    bias = None
    if problem.bias_dtype is not None:
        bias = as_dtype(mean + 0.3 * rng.standard_normal(problem.num_experts), problem.bias_dtype)
    logits = np.zeros((problem.num_tokens, problem.num_experts), np.float32)
    redraw = np.ones(problem.num_tokens, bool)
    for _ in range(200):
        fresh = 2 * rng.standard_normal((np.count_nonzero(redraw), problem.num_experts))
        logits[redraw] = as_dtype(fresh, problem.logits_dtype)
        redraw = ~decided(problem, logits, bias)
        if not redraw.any():
            return logits, bias
    raise AssertionError(f"no decided logits for {problem}")


# --- golden vectors -------------------------------------------------------------------------------


def golden(name: str) -> tuple[Problem, np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
    """Problem, logits, bias, expected ids and BF16 bits of the expected weights of a case."""
    case = GOLDEN_CASES[name]
    factor = case["routed_scaling_factor"]
    problem = Problem(
        num_tokens=case["tokens"],
        num_experts=case["num_experts"],
        top_k=case["top_k"],
        routing_method=Method(case["method"]),
        num_groups=case["n_group"] or 0,
        topk_group=case["topk_group"] or 0,
        norm_topk_prob=case["norm_topk_prob"],
        logits_dtype=DTYPES[case["logits_dtype"]],
        bias_dtype=DTYPES[case["bias_dtype"]],
        routed_scaling_factor=1.0 if factor is None else factor,
    )
    bias = GOLDEN[f"{name}/bias_f32"] if problem.bias_dtype else None
    ids = GOLDEN[f"{name}/ids_i32"]
    weights = GOLDEN[f"{name}/weights_bf16_u16"]
    return problem, GOLDEN[f"{name}/logits_f32"], bias, ids, weights


# --- lists of problems ----------------------------------------------------------------------------


def problems() -> list[Problem]:
    """Every method x number of experts x top_k, the element types alternating."""
    found = []
    for method in METHODS:
        for i, num_experts in enumerate(SIZES):
            for top_k in (1, 8, 32):
                if top_k > num_experts or (method is Method.Llama4 and top_k > 1):
                    continue
                bias_dtype = ("float32", "bfloat16", None)[(i + top_k) % 3]
                found.append(
                    Problem(
                        num_tokens=37,
                        num_experts=num_experts,
                        top_k=top_k,
                        routing_method=method,
                        norm_topk_prob=i % 4 != 3,
                        logits_dtype=("float32", "bfloat16")[i % 2],
                        bias_dtype=bias_dtype if method in BIASED else None,
                        routed_scaling_factor=2.5 if method in BIASED else 1.0,
                    )
                )
    return found


def problem_id(problem: Problem) -> str:
    bias = f"-bias_{problem.bias_dtype}" if problem.bias_dtype else ""
    groups = f"-G{problem.num_groups}of{problem.topk_group}" if problem.num_groups else ""
    return (
        f"{problem.routing_method.name}-E{problem.num_experts}-K{problem.top_k}{groups}"
        f"-{problem.logits_dtype}{bias}"
    )


def grouped_problems() -> list[Problem]:
    return [
        Problem(
            num_tokens=37,
            num_experts=num_experts,
            top_k=top_k,
            routing_method=Method.DeepSeekV3,
            num_groups=num_groups,
            topk_group=topk_group,
            logits_dtype=logits_dtype,
            bias_dtype=bias_dtype,
            routed_scaling_factor=2.5,
        )
        for num_experts, num_groups, topk_group, top_k in GROUPS
        for logits_dtype in ("float32", "bfloat16")
        for bias_dtype in ("float32", "bfloat16")
    ]
