"""What tells that a call equals one that the rules have accepted, in all but the addresses.

The rules look at the scalars and at what `Framework.signature` reads of every array; of addresses
they know the alignment, which is part of it, and that the output overlaps nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from cupy_moe.runtime.arrays import FRAMEWORKS
from cupy_moe.validate import ArrayLike

__all__ = ["Key", "Signature", "signature_of"]

Key: TypeAlias = "tuple[Hashable, ...]"
Signature: TypeAlias = "tuple[Key, tuple[int, ...], int]"

_PLAIN_KINDS = (int, float, str, np.bool_, np.number)  # immutable, compared by value


class _Reader:
    """Reads the signature of calls whose arguments are of certain types.

    Part of the keys, so that arguments of other types never equal these: True is no 1.
    """

    __slots__ = ("_current_stream", "_signatures")

    def __init__(self, arrays: tuple[type, ...]) -> None:
        self._signatures = tuple(FRAMEWORKS[kind].signature for kind in arrays)
        self._current_stream = FRAMEWORKS[arrays[-1]].current_stream

    def read(
        self, arrays: tuple[ArrayLike, ...], scalars: tuple[Any, ...], device: int
    ) -> Signature:
        of_rows, of_weights, of_index, of_norm, of_output = self._signatures
        rows, rows_form = of_rows(arrays[0])
        weights, weights_form = of_weights(arrays[1])
        index, index_form = of_index(arrays[2])
        norm, norm_form = of_norm(arrays[3])
        output, output_form = of_output(arrays[4])
        key = (self, scalars, rows_form, weights_form, index_form, norm_form, output_form)
        return key, (rows, weights, index, norm, output), self._current_stream(device)


class _NoSignatureError(Exception):
    """Arguments of a kind that may change unseen."""


@lru_cache(maxsize=256)
def _reader(*kinds: type) -> _Reader:
    """Make a reader for five arrays and scalars; no refusal is kept, as libraries come in later."""
    arrays, scalars = kinds[:5], kinds[5:]
    if not all(kind in FRAMEWORKS and FRAMEWORKS[kind].has_signature for kind in arrays):
        raise _NoSignatureError
    if not all(issubclass(kind, _PLAIN_KINDS) for kind in scalars):
        raise _NoSignatureError
    return _Reader(arrays)


def signature_of(
    arrays: tuple[ArrayLike, ...], scalars: tuple[Any, ...], device: int
) -> Signature | None:
    """Read all that the rules look at.

    Parameters
    ----------
    arrays : tuple of five arrays
        The output last.
    scalars : tuple
    device : int
        CUDA ordinal of the workspace.

    Returns
    -------
    key : tuple
        Equal for calls that the rules treat alike.
    addresses : tuple of int
    stream : int
        The current one of the output's library.

    None for arguments that are never remembered.
    """
    try:
        return _reader(*map(type, arrays), *map(type, scalars)).read(arrays, scalars, device)
    except (_NoSignatureError, RuntimeError):  # or a tensor without storage, which the rules name
        return None
