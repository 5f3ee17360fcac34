"""From checked arguments to a layer that can run: the problem of a call, and its backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from cupy_moe.bound_layer import BoundLayer
from cupy_moe.fused_moe.settings import MoeSettings
from cupy_moe.kernels.permute import MAX_LOCAL_EXPERTS
from cupy_moe.partitions import MoePartitionResources
from cupy_moe.problem import MoeOperands, MoeProblem, MoeResult, RoutingSource, Strategy
from cupy_moe.results import allocate_result
from cupy_moe.runtime.arrays import HOST
from cupy_moe.types import MoeFormat, RoutingMethodType
from cupy_moe.validate import require_supported_device

__all__ = ["Layer", "bind"]

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
    moe_format: MoeFormat = MoeFormat.Fp8,
    weight_block_bytes: int = 0,
    token_scale_pitch: int = 0,
    rounds_weights: bool = False,
    strategy: Strategy | None = None,
    partition_sms: tuple[int, ...] = (),
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
        moe_format=moe_format,
        weight_block_bytes=weight_block_bytes,
        token_scale_pitch=token_scale_pitch,
        rounds_weights=rounds_weights,
        strategy=strategy,
        partition_sms=partition_sms,
    )


class Layer(Protocol):
    """A layer on fixed arrays, checked, with its results allocated."""

    result: MoeResult
    scratch_bytes: int

    @property
    def operands(self) -> MoeOperands:
        """The arrays."""

    def prepare(self) -> None:
        """Prepare for many runs."""

    def enqueue(self) -> None:
        """Fill the results, on the current stream."""


def bind(
    operation: str,
    settings: MoeSettings,
    operands: MoeOperands,
    resources: MoePartitionResources | None = None,
) -> Layer:
    """Make the layer of a call: kernels for CUDA arrays, the reference for host memory.

    Parameters
    ----------
    operation : str
        Public name, for messages.
    settings : MoeSettings
    operands : MoeOperands
        Checked, routing included.
    resources : MoePartitionResources or None
        Of the device of the arrays, if the layer is partitioned.
    """
    problem = _problem_of(operation, settings, operands, resources)
    device = operands.hidden_states.device
    require_supported_device(operation, device)
    if not problem.num_tokens:
        return _EmptyLayer(problem, operands)
    if device == HOST:
        from cupy_moe.fused_moe.host import HostLayer

        return HostLayer(problem, operands)
    return BoundLayer(problem, operands, resources)


def _problem_of(
    operation: str,
    settings: MoeSettings,
    operands: MoeOperands,
    resources: MoePartitionResources | None,
) -> MoeProblem:
    o, given = operands, operands.topk_weights
    dtype = "bfloat16" if given is None or o.moe_format is MoeFormat.Nvfp4 else given.dtype
    if o.routing_logits is not None:
        source = RoutingSource.Logits
    else:
        source = RoutingSource.Packed if given is None else RoutingSource.Unpacked
    num_tokens, scales, blocks = o.hidden_states.shape[0], o.hidden_states_scale, o.gemm1_weights[0]
    return _problem(
        operation,
        settings,
        num_tokens,
        o.hidden_size,
        source,
        dtype,
        None if o.routing_logits is None else o.routing_logits.dtype,
        None if o.routing_bias is None else o.routing_bias.dtype,
        o.moe_format,
        blocks.shape[3] if len(blocks.shape) == 4 else 0,
        scales.size // num_tokens if scales is not None and num_tokens else 0,
        given is not None and given.dtype != dtype,
        o.strategy,
        () if resources is None else resources.sm_counts,
    )


class _EmptyLayer:
    """Layer without tokens, which nothing is launched for."""

    def __init__(self, problem: MoeProblem, operands: MoeOperands) -> None:
        self.operands = operands
        self.result = allocate_result(problem, operands, 0)
        self.scratch_bytes = 0

    def prepare(self) -> None:
        """Nothing is to be loaded."""

    def enqueue(self) -> None:
        """Nothing is to be filled."""
