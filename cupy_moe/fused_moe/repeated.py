"""Operations on CUDA arrays that are called again with arguments that the rules have accepted.

Rules depend on the plain arguments, on which resources are given, and on what `Framework.signature`
reads of every array: device, shape, gaps, dtype and alignment, and, only for what must not overlap,
addresses. A call that equals an accepted one in all but the addresses needs memory and launches
only. What is remembered refers to no array: it keeps no memory alive, and one that was resized,
moved or replaced is read anew. Resources are not kept alive either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from types import NoneType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from cupy_moe.bound_layer import BoundLayer, RepeatableLayer
from cupy_moe.fused_moe.execution import Layer
from cupy_moe.fused_moe.operands import operand_of
from cupy_moe.partitions import MoePartitionResources
from cupy_moe.pipeline import overrides
from cupy_moe.results import owners
from cupy_moe.runtime.arrays import FRAMEWORKS
from cupy_moe.runtime.memory import Memory
from cupy_moe.types import RoutingMethodType
from cupy_moe.validate import ArrayLike

__all__ = ["accepted", "run_again", "run_first"]

MakeLayer: TypeAlias = Callable[..., Layer]
Arguments: TypeAlias = tuple[Any, ...]
Key: TypeAlias = tuple[Any, ...]

_MAX_CALLS = 1024  # about 2 KiB each
_PLAIN_KINDS = (NoneType, int, float, str, np.bool_, np.number)  # immutable, compared by value
_PAIR_KINDS = (list, tuple)  # of arrays
_NO_OVERRIDES = (None, None)


class _Reader:
    """Reads the signature of calls whose arguments are of certain types.

    Parameters
    ----------
    kinds : tuple of type
        Of the arguments: plain, of a library in `FRAMEWORKS`, pairs or resources.
    members : tuple of type
        Of what is in the pairs; `read` takes it after the arguments.

    Attributes
    ----------
    pairs : list of int
        Where the arguments are pairs.
    """

    __slots__ = ("_arrays", "_kinds", "_plain", "_resources", "pairs")

    def __init__(self, kinds: tuple[type, ...], members: tuple[type, ...]) -> None:
        self._kinds = kinds, members
        self.pairs = [i for i, kind in enumerate(kinds) if kind in _PAIR_KINDS]
        flat = list(enumerate((*kinds, *members)))
        self._arrays = [(i, FRAMEWORKS[kind].signature) for i, kind in flat if kind in FRAMEWORKS]
        self._plain = itemgetter(*(i for i, kind in flat if issubclass(kind, _PLAIN_KINDS)))
        self._resources = [i for i, kind in flat if issubclass(kind, MoePartitionResources)]

    def read(self, make: MakeLayer, arguments: Arguments) -> tuple[Key, list[int]]:
        """Key of types, so that True is no 1, plain values and arrays; addresses of the arrays."""
        key: list[Hashable] = [make, self._kinds, self._plain(arguments)]
        addresses = []
        for i, signature in self._arrays:
            address, form = signature(arguments[i])
            addresses.append(address)
            key.append(form)
        for i in self._resources:
            key.append(ref(arguments[i]))  # equal to another one while both are alive
        return tuple(key), addresses

    def operands(self, make: MakeLayer) -> dict[str, int]:
        """Where each array of `MoeOperands.arrays` is, in the order of their addresses."""
        names = list(inspect.signature(make).parameters)
        names += [f"{names[i]}[{j}]" for i in self.pairs for j in (0, 1)]
        return {operand_of(names[i]): i for i, _ in self._arrays}


class _NoSignatureError(Exception):
    """Arguments of a kind that may change unseen."""


@lru_cache(maxsize=_MAX_CALLS)
def _reader(kinds: tuple[type, ...], members: tuple[type, ...] = ()) -> _Reader:
    """Make a reader; refusals are not remembered, as libraries come in later."""
    others = (*_PLAIN_KINDS, MoePartitionResources)
    for kind in (*(kind for kind in kinds if kind not in _PAIR_KINDS), *members):
        framework = FRAMEWORKS.get(kind)
        if not (framework.has_signature if framework else issubclass(kind, others)):
            raise _NoSignatureError
    return _Reader(kinds, members)


accepted: Memory[Key | None, RepeatableLayer] = Memory(_MAX_CALLS)
"""Calls that passed the rules, by their keys; None is never among them."""


def _signature(make: MakeLayer, arguments: Arguments) -> tuple[Key | None, Arguments, list[int]]:
    """All that the rules look at, a key of `accepted`; what `RepeatableLayer.run` takes.

    Calls that are never remembered have no key.
    """
    kinds = tuple(map(type, arguments))
    if overrides() != _NO_OVERRIDES:
        return None, (), []
    try:
        reader = _reader(kinds)
        if reader.pairs:
            pairs = [arguments[i] for i in reader.pairs]
            if any(len(pair) != 2 for pair in pairs):  # never accepted
                return None, (), []
            members = tuple(chain(*pairs))
            arguments = arguments + members
            reader = _reader(kinds, tuple(map(type, members)))
        key, addresses = reader.read(make, arguments)
    except (_NoSignatureError, RuntimeError):  # or a tensor without storage, which the rules name
        return None, (), []
    return key, arguments, addresses


def run_again(make: MakeLayer, arguments: Arguments) -> tuple[Key | None, Any]:
    """Run a call like one that passed the rules.

    Parameters
    ----------
    make : function
        Checks the arguments and makes the layer of an operation.
    arguments : tuple
        Its positional arguments, read before any rule runs.

    Returns
    -------
    key : tuple or None
        For `run_first`.
    results : array, list of three arrays or None
        None if no such call has passed the rules, or if this one overwrites an input.
    """
    key, arguments, addresses = _signature(make, arguments)
    known = accepted.get(key)
    return key, None if known is None else known.run(arguments, addresses)


def run_first(key: Key | None, layer: Layer) -> ArrayLike:
    """Run a layer that was just made, and remember it under its call's signature.

    Returns
    -------
    array or list of three arrays
    """
    layer.enqueue()
    if key is not None and isinstance(layer, BoundLayer):
        make, (kinds, members), plain = key[:3]
        if _is_repeatable(layer, plain):
            accepted.insert(key, RepeatableLayer(layer, _reader(kinds, members).operands(make)))
    return owners(layer.result)


def _is_repeatable(layer: BoundLayer, plain: Arguments) -> bool:
    # To make a layer of the Llama4 router may come with a warning, which is due at every call.
    may_warn = layer.binding.problem.routing_method is RoutingMethodType.Llama4
    # A key with a NaN equals no other, not even that of the same call.
    has_nan = any(isinstance(v, (float, np.floating)) and np.isnan(v) for v in plain)
    return not may_warn and not has_nan
