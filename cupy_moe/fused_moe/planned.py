"""Planned calls: an operation's arguments checked and bound once, run any number of times."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cupy_moe.fused_moe.execution import Layer
from cupy_moe.fused_moe.fp8 import (
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.fused_moe.fp8_layers import logits_layer, routed_layer
from cupy_moe.fused_moe.operands import named_arrays
from cupy_moe.results import owners
from cupy_moe.runtime.arrays import DlpackFramework
from cupy_moe.validate import ArrayLike

__all__ = [
    "PlannedMoe",
    "plan_fp8_per_tensor_scale_moe",
    "plan_fp8_per_tensor_scale_routed_moe",
]

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class PlannedMoe:
    """A mixture-of-experts layer on fixed arrays; made by the ``plan_...`` functions.

    Attributes
    ----------
    output : array or list of three arrays
        What `run` fills and returns: see the ``Returns`` of the operation. Nothing is in it before
        the first run.
    scratch_bytes : int
        Device memory that the plan holds besides ``output``.

    Notes
    -----
    Arrays are bound by address and kept alive. Their contents may change between runs; what has
    been resized, reallocated or replaced needs a new plan.

    A plan has one output and one scratch buffer, so its runs must be ordered: on one stream they
    are, on several it is up to the caller. The plan may be used from any thread. It must outlive
    the CUDA graphs that captured it and, with CuPy arrays, its work on streams other than the one
    it was made on.
    """

    __slots__ = ("_enqueue", "_layer", "output")

    def __init__(self, layer: Layer) -> None:
        for name, ref in named_arrays(layer.operands):
            if isinstance(ref.framework, DlpackFramework):
                raise NotImplementedError(
                    f"a plan needs arrays of torch, CuPy or NumPy, got {name} of "
                    f"{ref.framework.name}: DLPack orders streams once, when an array is imported. "
                    "Call the operation itself."
                )
        layer.prepare()
        self._layer = layer
        self._enqueue = layer.enqueue
        self.output: ArrayLike | list[ArrayLike] = owners(layer.result)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory; 0 in host memory and with a sufficient workspace."""
        return self._layer.scratch_bytes

    def run(self) -> ArrayLike | list[ArrayLike]:
        """Compute the layer from what the arrays hold now.

        Returns
        -------
        array or list of three arrays
            `output`, the same object every time.

        Raises
        ------
        RuntimeError
            If the driver refuses a launch.

        Notes
        -----
        CUDA arrays: kernels are enqueued on the current stream of the library of ``hidden_states``
        and nothing else happens, no allocation and no synchronization. One launch of a CUDA graph
        enqueues them all where the driver has CUDA 12.3 or newer and the stream is neither captured
        nor of a green context; else they are launched one by one. A plan that was made during a
        capture makes its graph at its first run outside of one. Where the driver refuses the graph,
        a ``RuntimeWarning`` names its reason once and kernels are launched one by one.
        """
        self._enqueue()
        return self.output


def _arguments_of(
    operation: Callable[P, object],
) -> Callable[[Callable[..., ResultT]], Callable[P, ResultT]]:
    """Give a function the parameters of an operation, in its signature and for type checkers."""

    def decorate(function: Callable[..., ResultT]) -> Callable[P, ResultT]:
        parameters = inspect.signature(operation)
        returns = inspect.signature(function).return_annotation
        function.__signature__ = parameters.replace(  # type: ignore[attr-defined]
            return_annotation=returns
        )
        return function

    return decorate


@_arguments_of(trtllm_fp8_per_tensor_scale_routed_moe)
def plan_fp8_per_tensor_scale_routed_moe(*arguments: Any, **options: Any) -> PlannedMoe:
    """Plan calls of `trtllm_fp8_per_tensor_scale_routed_moe` on the same arrays.

    For callers that repeat a layer in place and want nothing but its launches: everything else,
    checks, allocation and loading of kernels, happens here.

    Parameters
    ----------
    *arguments, **options
        Those of `trtllm_fp8_per_tensor_scale_routed_moe`. Without ``output`` the plan allocates
        one, without a sufficient ``workspace_buffer`` its own scratch.

    Returns
    -------
    PlannedMoe

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As the operation does. Also ``NotImplementedError`` for arrays of libraries other than
        torch, CuPy and NumPy, and ``RuntimeError`` if a kernel would have to be loaded during a
        stream capture.

    Examples
    --------
    >>> layer = plan_fp8_per_tensor_scale_routed_moe(topk_ids, None, hidden, ...)  # doctest: +SKIP
    >>> hidden.copy_(next_hidden)  # doctest: +SKIP
    >>> out = layer.run()  # doctest: +SKIP
    """
    return PlannedMoe(routed_layer(*arguments, **options))


@_arguments_of(trtllm_fp8_per_tensor_scale_moe)
def plan_fp8_per_tensor_scale_moe(*arguments: Any, **options: Any) -> PlannedMoe:
    """Plan calls of `trtllm_fp8_per_tensor_scale_moe` on the same arrays.

    Parameters
    ----------
    *arguments, **options
        Those of `trtllm_fp8_per_tensor_scale_moe`.

    Returns
    -------
    PlannedMoe

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As `plan_fp8_per_tensor_scale_routed_moe`.

    Warns
    -----
    UserWarning
        Groups are given with Llama4.
    """
    return PlannedMoe(logits_layer(*arguments, **options))
