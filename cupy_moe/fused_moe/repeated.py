"""Operations on CUDA arrays that are called again with arguments that the rules have accepted.

Rules depend on the plain arguments and on what `Framework.signature` reads of every array: device,
shape, gaps, dtype and alignment, and, only for what must not overlap, addresses. A call that equals
an accepted one in all but the addresses needs memory and launches only. What is remembered refers
to no array: it keeps no memory alive, and one that was resized, moved or replaced is read anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import lru_cache
from operator import itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cupy_moe.fused_moe.execution import Layer
from cupy_moe.fused_moe.operands import OPERAND_FIELDS
from cupy_moe.pipeline import overrides
from cupy_moe.results import owners
from cupy_moe.runtime.arrays import FRAMEWORKS, HOST
from cupy_moe.runtime.memory import Memory
from cupy_moe.types import RoutingMethodType
from cupy_moe.validate import ArrayLike

if TYPE_CHECKING:
    from cupy_moe.bound_layer import BoundLayer, RepeatableLayer
    from cupy_moe.problem import MoeOperands

__all__ = ["accepted", "run_first", "signature"]

MakeLayer: TypeAlias = Callable[..., Layer]
Arguments: TypeAlias = tuple[Any, ...]
Key: TypeAlias = tuple[Any, ...]

_MAX_CALLS = 1024  # about 2 KiB each
_PLAIN_KINDS = (NoneType, int, float, np.bool_, np.number)  # immutable, compared by value
_NO_OVERRIDES = (None, None)


class _Reader:
    """Reads the signature of calls whose arguments are of certain types.

    Parameters
    ----------
    kinds : tuple of type
        Of the arguments, all of them plain or of a library in `FRAMEWORKS`.
    """

    __slots__ = ("_arrays", "_kinds", "_plain")

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        arrays = [i for i, kind in enumerate(kinds) if kind in FRAMEWORKS]
        self._arrays = [(i, FRAMEWORKS[kinds[i]].signature) for i in arrays]
        self._plain = itemgetter(*(i for i in range(len(kinds)) if i not in arrays))

    def read(self, make: MakeLayer, arguments: Arguments) -> tuple[Key, list[int]]:
        """Key of types, so that True is no 1, plain values and arrays; addresses of the arrays."""
        key: list[Hashable] = [make, self._kinds, self._plain(arguments)]
        addresses = []
        for i, signature in self._arrays:
            address, form = signature(arguments[i])
            addresses.append(address)
            key.append(form)
        return tuple(key), addresses

    def operands(self, make: MakeLayer) -> list[str]:
        """Fields of `MoeOperands` that the arrays are, in the order of their addresses."""
        names = list(inspect.signature(make).parameters)
        if len(names) < len(self._kinds):  # ids and weights instead of packed words
            names.insert(1, "topk_ids[1]")
        return [OPERAND_FIELDS[names[i]] for i, _ in self._arrays]


class _NoSignatureError(Exception):
    """Arguments of a kind that may change unseen."""


@lru_cache(maxsize=_MAX_CALLS)
def _reader(kinds: tuple[type, ...]) -> _Reader:
    """Make a reader; refusals are not remembered, as libraries come in later."""
    for kind in kinds:
        framework = FRAMEWORKS.get(kind)
        if not (framework.has_signature if framework else issubclass(kind, _PLAIN_KINDS)):
            raise _NoSignatureError
    return _Reader(kinds)


accepted: Memory[Key | None, RepeatableLayer] = Memory(_MAX_CALLS)
"""Calls that passed the rules, by their keys; None is never among them."""


def signature(make: MakeLayer, arguments: Arguments) -> tuple[Key | None, list[int]]:
    """All that the rules look at, to be read before they run.

    Parameters
    ----------
    make : function
        Checks the arguments and makes the layer of an operation.
    arguments : tuple
        Its positional arguments; the first may be a tuple of two arrays.

    Returns
    -------
    key : tuple or None
        Of `accepted`; None for calls that are never remembered.
    addresses : list of int
        For `RepeatableLayer.run`.
    """
    first = arguments[0]
    if type(first) is tuple and len(first) == 2:  # one of another length is never accepted
        arguments = (*first, *arguments[1:])
    kinds = tuple(map(type, arguments))
    if overrides() != _NO_OVERRIDES:
        return None, []
    try:
        return _reader(kinds).read(make, arguments)
    except (_NoSignatureError, RuntimeError):  # or a tensor without storage, which the rules name
        return None, []


def run_first(key: Key | None, layer: Layer) -> ArrayLike:
    """Run a layer that was just made, and remember it under its call's signature.

    Returns
    -------
    array or list of three arrays
    """
    layer.enqueue()
    if key is not None and layer.operands.hidden_states.device != HOST:
        from cupy_moe.bound_layer import BoundLayer, RepeatableLayer

        make, kinds, plain = key[:3]
        if isinstance(layer, BoundLayer) and _is_repeatable(layer, plain):
            accepted.insert(key, RepeatableLayer(layer, _reader(kinds).operands(make)))
    return owners(layer.result)


def _is_repeatable(layer: BoundLayer[MoeOperands], plain: Arguments) -> bool:
    # To make a layer of the Llama4 router may come with a warning, which is due at every call.
    may_warn = layer.problem.routing_method is RoutingMethodType.Llama4
    # A key with a NaN equals no other, not even that of the same call.
    has_nan = any(isinstance(v, (float, np.floating)) and np.isnan(v) for v in plain)
    return layer.result.output is not None and not may_warn and not has_nan
