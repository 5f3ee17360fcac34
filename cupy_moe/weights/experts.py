"""Expert weights as the quantizers take them: checked, one expert after another."""

from __future__ import annotations

from collections.abc import Callable

from cupy_moe.formats import Array, as_float32, get_xp
from cupy_moe.weights.array_arguments import positive_factor, to_values

__all__ = ["each_expert", "expert_matrices", "per_expert"]

_MULTIPLE = 32  # of rows that are shuffled together, and of columns that share a scale


def expert_matrices(
    name: str, w1: Array, w2: Array, *, gated: bool
) -> tuple[Array, Array, Callable[[Array], Array]]:
    """Both matrices as NumPy or CuPy arrays of fitting shapes, and the way back."""
    w1, restore = to_values(w1, f"{name}: w1")
    w2, _ = to_values(w2, f"{name}: w2")
    rows = "2*intermediate_size" if gated else "intermediate_size"
    if (
        w1.ndim != 3
        or w2.ndim != 3
        or len(w1) == 0
        or len(w1) != len(w2)
        or w1.shape[2] != w2.shape[1]
        or w1.shape[1] != w2.shape[2] * (2 if gated else 1)
    ):
        raise ValueError(
            f"{name}: w1 must be (num_experts, {rows}, hidden_size) and w2 (num_experts, "
            f"hidden_size, intermediate_size), got {tuple(w1.shape)} and {tuple(w2.shape)}."
        )
    hidden_size, intermediate_size = w2.shape[1:]
    if hidden_size % _MULTIPLE or intermediate_size % _MULTIPLE:
        raise ValueError(
            f"{name}: hidden_size and intermediate_size must be multiples of {_MULTIPLE}, got "
            f"{hidden_size} and {intermediate_size}."
        )
    return w1, w2, restore


def each_expert(
    quantize: Callable[[Array], tuple[Array, ...]], w: Array, argument: str
) -> tuple[Array, ...]:
    """Results of ``quantize`` on every expert's matrix, each stacked over experts."""

    def one(number: int) -> tuple[Array, ...]:
        expert = as_float32(w[number])
        if not bool(get_xp(w).isfinite(expert).all()):
            raise ValueError(
                f"{argument} must be finite, got NaN or infinities in expert {number}."
            )
        return quantize(expert)

    results = zip(*map(one, range(len(w))), strict=True)
    return tuple(get_xp(w).stack(result) for result in results)


def per_expert(name: str, argument: str, value: Array, w: Array) -> Array:
    """Positive FP32 factor of each expert."""
    shape = (len(w),)
    shapes = {"a number": (), f"of shape (num_experts,) = {shape}": shape}
    factor = positive_factor(value, w, f"{name}: {argument}", shapes)
    return get_xp(w).broadcast_to(factor, shape).copy()
