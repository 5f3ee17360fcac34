"""The FP8 layer on fresh random inputs, against the NumPy backend or the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.testing.compare import assert_within, compare, to_host
from cupy_moe.testing.inputs import (
    ROUTING_PATTERNS,
    Fp8Layer,
    make_fp8_layer,
    make_hidden_states,
    make_topk,
    move_arguments,
)
from cupy_moe.types import ActivationType, RoutingMethodType
from tests.gpu.support import (
    BF16,
    LIBRARIES,
    full,
    reference,
    routed_moe,
    tolerance_of,
    torch_oracle,
)
from tests.gpu_evidence import Evidence

pytestmark = pytest.mark.gpu

ACTIVATIONS = (
    ActivationType.Swiglu,
    ActivationType.Geglu,
    ActivationType.SwigluStep,
    ActivationType.Situ,
    ActivationType.Relu2,
    ActivationType.Identity,
    ActivationType.Silu,
)
# What the NumPy backend may have to do: about a second of decoding, and of multiplying.
NUMPY_ELEMENTS = 1 << 25
NUMPY_PRODUCTS = 1 << 31
# Beyond this many elements inputs are made on the GPU and outputs compared on a sample of rows.
HOST_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Case:
    """Sizes and kinds of one random call."""

    tokens: int
    hidden: int = 256
    inter: int = 384
    experts: int = 8
    top_k: int = 2
    activation: ActivationType = ActivationType.Swiglu
    pattern: str = "uniform"
    dtype: str = "packed"
    invalid: str | None = None
    local: tuple[int, int] | None = None
    clamp_limit: float | None = None
    gains: tuple[float, ...] | None = None
    input_scale: bool = False

    def __str__(self) -> str:
        """Everything that differs from the defaults."""
        sizes = f"T{self.tokens}-H{self.hidden}-I{self.inter}-E{self.experts}-K{self.top_k}"
        words = [self.activation.name, self.pattern, self.dtype, self.invalid]
        words += [self.local and f"local{self.local[0]}+{self.local[1]}"]
        words += [self.clamp_limit and "limit", self.gains and "gains"]
        words += [self.input_scale and "input_scale"]
        return "-".join([sizes, *(word for word in words if word)])

    @property
    def is_large(self) -> bool:
        """Whether the NumPy backend would take too long."""
        weights = 3 * self.hidden * self.inter
        slots = self.tokens * self.top_k
        experts = min(self.experts, slots)
        return experts * weights > NUMPY_ELEMENTS or slots * weights > NUMPY_PRODUCTS

    def arguments(self, library: str) -> dict[str, Any]:
        """Keyword arguments of the call; a layer is shared by the cases that differ elsewhere."""
        layer = cached_layer(
            self.hidden,
            self.inter,
            self.experts,
            self.activation,
            self.local,
            self.clamp_limit,
            self.gains,
        )
        topk = make_topk(
            self.tokens,
            self.top_k,
            self.experts,
            pattern=self.pattern,
            invalid=self.invalid,
            dtype=self.dtype,
            seed=self.tokens,
        )
        method = RoutingMethodType.Llama4 if self.input_scale else RoutingMethodType.Default
        xp = np if self.tokens * self.hidden <= HOST_ELEMENTS else cupy_module()
        arguments = layer.arguments(
            make_hidden_states(self.tokens, self.hidden, seed=self.tokens, xp=xp),
            topk,
            use_routing_scales_on_input=self.input_scale,
            routing_method_type=int(method),
        )
        return move_arguments(arguments, library)


def cupy_module() -> Any:
    """CuPy, which only the tests that run need."""
    import cupy

    return cupy


@lru_cache(maxsize=4)
def cached_layer(
    hidden: int,
    inter: int,
    experts: int,
    activation: ActivationType,
    local: tuple[int, int] | None,
    clamp_limit: float | None,
    gains: tuple[float, ...] | None,
) -> Fp8Layer:
    """Make a layer on the GPU."""
    return make_fp8_layer(
        hidden_size=hidden,
        intermediate_size=inter,
        num_experts=experts,
        activation=activation,
        local=local,
        clamp_limit=clamp_limit,
        gains=gains,
        xp=cupy_module(),
    )


def check(case: Case, library: str, evidence: Evidence) -> None:
    """Call into a poisoned output and hold the result against a reference."""
    arguments = case.arguments(library)
    output = full((case.tokens, case.hidden), np.nan, BF16, library)
    assert routed_moe(**arguments, output=output) is output
    expected = torch_oracle(arguments) if case.is_large else reference(arguments)
    stride = max(1, output.shape[0] * output.shape[1] // HOST_ELEMENTS)
    errors = compare(output[::stride], expected[::stride])
    last = compare(output[-1:], expected[-1:])
    assert_within(last, tolerance_of(arguments), f"{case}, last row")
    evidence.errors(f"fp8 random/{case}", errors)
    assert_within(errors, tolerance_of(arguments), str(case))


# Around every token tile, primes, and more than one tile an expert.
TOKENS = [
    Case(tokens)
    for tokens in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 513, 1000)
]
SHAPES = [
    Case(31, hidden=128, inter=128, experts=1, top_k=1),
    Case(257, hidden=128, inter=1536, experts=1, top_k=1),
    Case(64, hidden=128, inter=384, experts=3, top_k=2),
    Case(9, hidden=1024, inter=768, experts=8, top_k=8),
    Case(2, hidden=4096, inter=384, experts=3, top_k=1),
    Case(64, hidden=256, inter=128, experts=512, top_k=8),
    Case(127, hidden=1024, inter=1536, experts=64, top_k=8),
    Case(7, hidden=4096, inter=768, experts=128, top_k=8),
    Case(1, hidden=4096, inter=1536, experts=128, top_k=8),
    Case(257, hidden=4096, inter=1536, experts=128, top_k=8),
    Case(4000, hidden=1024, inter=768, experts=64, top_k=8),
]
ACTIVATION_CASES = [
    Case(tokens, experts=4, activation=activation, dtype=dtype)
    for activation in ACTIVATIONS
    for tokens, dtype in ((9, "packed"), (300, "float32"))
] + [Case(64, activation=ActivationType.SwigluStep, clamp_limit=0.5, experts=4)]
ROUTINGS = [
    Case(129, pattern=pattern, dtype=dtype, experts=64)
    for pattern in ROUTING_PATTERNS
    for dtype in ("packed", "bfloat16", "float32")
] + [
    Case(1000, pattern="one_expert", experts=128, top_k=1),
    Case(64, pattern="one_expert", top_k=8),
    Case(33, experts=64, top_k=8, local=(16, 32), dtype="float32"),
    Case(33, experts=64, top_k=8, local=(62, 2)),  # fewer local experts than slots of a token
    Case(257, experts=512, top_k=8, local=(508, 4), pattern="skewed"),  # hardly anyone is local
]
INPUT_SCALES = [
    Case(tokens, top_k=1, input_scale=True, dtype=dtype)
    for tokens in (1, 10, 300)
    for dtype in ("packed", "bfloat16", "float32")
] + [Case(33, top_k=1, input_scale=True, dtype="float32", local=(2, 4))]
# The row bound sees every expert's scale: a token visits one expert only.
GAINS = [
    Case(64, top_k=1, experts=8, gains=tuple(2.0**e for e in range(-4, 4)), activation=activation)
    for activation in (ActivationType.Swiglu, ActivationType.Relu2)
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_number_of_tokens(case: Case, library: str, evidence: Evidence) -> None:
    check(replace(case, dtype="float32" if library == "cupy" else "packed"), library, evidence)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case, evidence: Evidence) -> None:
    check(case, "torch", evidence)


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=str)
def test_activations(case: Case, evidence: Evidence) -> None:
    check(case, "cupy", evidence)


@pytest.mark.parametrize("case", ROUTINGS, ids=str)
def test_routing_patterns_and_local_experts(case: Case, evidence: Evidence) -> None:
    check(case, "torch", evidence)


@pytest.mark.parametrize("case", INPUT_SCALES, ids=str)
def test_input_scales(case: Case, evidence: Evidence) -> None:
    check(case, "torch", evidence)


@pytest.mark.parametrize("case", GAINS, ids=str)
def test_scales_of_experts_are_powers_of_two_apart(case: Case, evidence: Evidence) -> None:
    scales = to_host(case.arguments("cupy")["output1_scales_gate_scalar"])
    assert scales.max() / scales.min() > 64
    check(case, "cupy", evidence)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_the_oracle_agrees_with_the_numpy_backend(activation: ActivationType) -> None:
    cases = [
        Case(65, experts=4, activation=activation, invalid="one_slot", dtype="float32"),
        Case(65, experts=8, activation=activation, local=(3, 4), top_k=1, input_scale=True),
    ]
    for case in cases:
        arguments = case.arguments("torch")
        errors = compare(torch_oracle(arguments), reference(arguments))
        assert_within(errors, tolerance_of(arguments), str(case))
        assert errors.bit_equal > 0.999


# --- sizes beyond 32 bits ---------------------------------------------------------------------


def test_rows_beyond_two_to_the_31_elements(evidence: Evidence) -> None:
    """320,000 permuted rows of 7168 columns: row * width needs 64 bits."""
    case = Case(40_000, hidden=7168, inter=128, experts=8, top_k=8)
    assert case.tokens * case.top_k * case.hidden > 2**31
    check(case, "torch", evidence)


def test_more_tokens_than_a_grid_dimension_holds(evidence: Evidence) -> None:
    check(Case(65_536, hidden=128, inter=128, experts=8, top_k=8), "torch", evidence)


def test_last_expert_beyond_two_to_the_32_weights() -> None:
    """Only the last of 512 experts is hit; the weights of all others are NaN."""
    cupy = cupy_module()
    experts, hidden, inter, tokens = 512, 4096, 1024, 33
    one = make_fp8_layer(hidden_size=hidden, intermediate_size=inter, num_experts=1, xp=cupy)
    topk = make_topk(tokens, 1, 1, dtype="float32")
    expected = torch_oracle(one.arguments(make_hidden_states(tokens, hidden), topk))

    arguments = one.arguments(make_hidden_states(tokens, hidden), (topk[0] + experts - 1, topk[1]))
    for name in ("gemm1_weights", "gemm2_weights"):
        rows = arguments[name].view(np.uint8)
        weights = cupy.full((experts, *rows.shape[1:]), 0x7F, np.uint8)
        weights[-1] = rows[0]
        arguments[name] = weights.view(ml_dtypes.float8_e4m3fn)
    assert arguments["gemm1_weights"].size == 2**32
    for name in [n for n in arguments if n.endswith("scalar")]:
        scales = cupy.full(experts, np.nan, np.float32)
        scales[-1] = arguments[name][0]
        arguments[name] = scales
    arguments.update(num_experts=experts, local_num_experts=experts)
    out = routed_moe(**move_arguments(arguments, "cupy"))
    assert_within(compare(out, expected), tolerance_of(arguments))
