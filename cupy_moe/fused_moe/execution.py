"""From checked arguments to a layer that can run: the problem of a call, and its backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Protocol

from cupy_moe.fused_moe.fp4_operands import Fp4Operands, Strategy
from cupy_moe.fused_moe.settings import MoeSettings
from cupy_moe.kernels.permute import MAX_LOCAL_EXPERTS
from cupy_moe.problem import MoeOperands, MoeProblem, MoeResult, RoutingSource
from cupy_moe.results import allocate_result
from cupy_moe.runtime.arrays import HOST
from cupy_moe.types import MoeFormat, RoutingMethodType
from cupy_moe.validate import require_supported_device

__all__ = ["Layer", "bind", "bind_fp4"]

_MAX_SLOTS = 2**30  # permuted rows, padding included, are counted in int32


@lru_cache(maxsize=1024)
def _problem(
    operation: str,
    settings: MoeSettings,
    num_tokens: int,
    hidden_size: int,
    source: RoutingSource,
    weights_dtype: str,
    logits_dtype: str | None,
    bias_dtype: str | None,
) -> MoeProblem:
    """Problem of a call; choices without effect on it take one value, so that plans are shared."""
    s = settings
    if num_tokens * s.top_k > _MAX_SLOTS:
        raise NotImplementedError(
            f"{operation}: num_tokens * top_k must be at most {_MAX_SLOTS}, got "
            f"{num_tokens} * {s.top_k}. Split the tokens over several calls."
        )
    if s.local_num_experts > MAX_LOCAL_EXPERTS:
        raise NotImplementedError(
            f"{operation}: local_num_experts must be at most {MAX_LOCAL_EXPERTS}, got "
            f"{s.local_num_experts}. Split the experts over several calls and add the outputs."
        )
    from_logits = source is RoutingSource.Logits
    is_grouped = from_logits and s.is_grouped
    return MoeProblem(
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        intermediate_size=s.intermediate_size,
        num_experts=s.num_experts,
        top_k=s.top_k,
        local_num_experts=s.local_num_experts,
        local_expert_offset=s.local_expert_offset,
        activation=s.activation,
        routing_source=source,
        expert_weights_dtype=weights_dtype,
        scale_input=s.scale_input,
        do_finalize=s.do_finalize,
        routing_method=s.routing_method if from_logits else RoutingMethodType.Unspecified,
        num_groups=s.num_groups if is_grouped else 0,
        topk_group=s.topk_group if is_grouped else 0,
        norm_topk_prob=s.norm_topk_prob or s.routing_method != RoutingMethodType.SigmoidRenorm,
        logits_dtype=logits_dtype,
        bias_dtype=bias_dtype,
    )


class Layer(Protocol):
    """A layer on fixed arrays, checked, with its results allocated."""

    result: MoeResult
    scratch_bytes: int

    @property
    def operands(self) -> MoeOperands | Fp4Operands:
        """The arrays."""

    def prepare(self) -> None:
        """Prepare for many runs."""

    def enqueue(self) -> None:
        """Fill the results, on the current stream."""


def bind(operation: str, settings: MoeSettings, operands: MoeOperands) -> Layer:
    """Make the layer of a call: kernels for CUDA arrays, the reference for host memory.

    Parameters
    ----------
    operation : str
        Public name, for messages.
    settings : MoeSettings
    operands : MoeOperands
        Checked, routing included.
    """
    weights = operands.topk_weights
    dtype = "bfloat16" if weights is None else weights.dtype
    num_tokens, hidden_size = operands.hidden_states.shape
    problem = _problem_of(operation, settings, operands, hidden_size, dtype)
    backend = _backend(operation, operands.hidden_states.device)
    return backend(problem, operands) if num_tokens else _EmptyLayer(problem, operands)


def bind_fp4(operation: str, settings: MoeSettings, operands: Fp4Operands) -> Layer:
    """Make the FP4 layer of a call; parameters as in `bind`."""
    weights = operands.topk_weights
    is_rounded = weights is None or operands.mode is MoeFormat.Nvfp4
    dtype = "bfloat16" if weights is None or is_rounded else weights.dtype
    plain = _problem_of(operation, settings, operands, operands.hidden_size, dtype)
    problem = _fp4_problem(
        plain,
        operands.mode,
        _block_bytes(operands),
        _token_scale_pitch(operands),
        weights is not None and weights.dtype != dtype,
        operands.strategy,
        () if operands.resources is None else operands.resources.sm_counts,
    )
    backend = _fp4_backend(operation, operands.hidden_states.device)
    return backend(problem, operands) if problem.num_tokens else _EmptyLayer(problem, operands)


@lru_cache(maxsize=1024)
def _fp4_problem(
    problem: MoeProblem,
    mode: MoeFormat,
    weight_block_bytes: int,
    token_scale_pitch: int,
    rounds_weights: bool,
    strategy: Strategy | None,
    partition_sms: tuple[int, ...],
) -> MoeProblem:
    return replace(
        problem,
        moe_format=mode,
        weight_block_bytes=weight_block_bytes,
        token_scale_pitch=token_scale_pitch,
        rounds_weights=rounds_weights,
        strategy=strategy,
        partition_sms=partition_sms,
    )


def _block_bytes(operands: Fp4Operands) -> int:
    shape = operands.gemm1[0].weights.shape
    return shape[3] if len(shape) == 4 else 0


def _token_scale_pitch(operands: Fp4Operands) -> int:
    scales, num_tokens = operands.hidden_states_scale, operands.hidden_states.shape[0]
    return scales.size // num_tokens if scales is not None and num_tokens else 0


def _problem_of(
    operation: str,
    settings: MoeSettings,
    operands: MoeOperands | Fp4Operands,
    hidden_size: int,
    weights_dtype: str,
) -> MoeProblem:
    logits, bias = operands.routing_logits, operands.routing_bias
    if logits is not None:
        source = RoutingSource.Logits
    else:
        is_packed = operands.topk_weights is None
        source = RoutingSource.Packed if is_packed else RoutingSource.Unpacked
    return _problem(
        operation,
        settings,
        operands.hidden_states.shape[0],
        hidden_size,
        source,
        weights_dtype,
        None if logits is None else logits.dtype,
        None if bias is None else bias.dtype,
    )


@cache
def _backend(operation: str, device: int) -> Callable[[MoeProblem, MoeOperands], Layer]:
    """Check a device and import its backend, when an array comes in that needs it."""
    require_supported_device(operation, device)
    if device == HOST:
        from cupy_moe.fused_moe.host import Fp8HostLayer

        return Fp8HostLayer
    from cupy_moe.bound_layer import BoundLayer, fp8_addresses

    return partial(BoundLayer, addresses=fp8_addresses)


@cache
def _fp4_backend(operation: str, device: int) -> Callable[[MoeProblem, Fp4Operands], Layer]:
    """As `_backend`, of the FP4 operations."""
    require_supported_device(operation, device)
    if device == HOST:
        from cupy_moe.fused_moe.host import Fp4HostLayer

        return Fp4HostLayer
    from cupy_moe.fused_moe.fp4_bound import bound_fp4_layer

    return bound_fp4_layer


class _EmptyLayer:
    """Layer without tokens, which nothing is launched for."""

    def __init__(self, problem: MoeProblem, operands: MoeOperands | Fp4Operands) -> None:
        self.operands = operands
        self.result = allocate_result(problem, operands, 0)
        self.scratch_bytes = 0

    def prepare(self) -> None:
        """Nothing is to be loaded."""

    def enqueue(self) -> None:
        """Nothing is to be filled."""
