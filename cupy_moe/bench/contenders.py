"""What is timed against each other: this package, and what every peer has to provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.layers import BenchLayer
from cupy_moe.bench.workloads import Ids

__all__ = ["Contender", "CupyMoe", "import_failure", "installed", "not_installed"]


class Contender(ABC):
    """An implementation that has taken over a layer's weights.

    Attributes
    ----------
    key, name : str
        For the command line and for tables.
    package : str
        Distribution whose version goes into reports.
    whole_layer : bool
        Whether the result is the layer's output; else only parts of the layer are timed.
    scope : str
        What is timed, and what is left out.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    package: ClassVar[str]
    scope: ClassVar[str]
    whole_layer: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it cannot run here; None if it can."""

    @abstractmethod
    def __init__(self, layer: Any) -> None:
        """Convert the weights of a `BenchLayer` of the kind that it is a peer for."""

    @abstractmethod
    def prepare(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Call for one routing; everything that is not timed is done here.

        Parameters
        ----------
        hidden : torch.Tensor or tuple of them
            T hidden states of the layer.
        ids, weights : numpy.ndarray (T, K)

        Returns
        -------
        callable
            Enqueues the work on torch's current stream; can be captured once it has run. Returns
            the output (T, H), bfloat16, if :attr:`whole_layer`.
        """


def installed(package: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def not_installed(package: str, requirement: str | None = None) -> str | None:
    """Say that a distribution is missing and how to get it; None if it is installed.

    Parameters
    ----------
    package : str
    requirement : str, optional
        What follows ``pip install``; default: the distribution.
    """
    if installed(package) is not None:
        return None
    return f"{package} is not installed: pip install {requirement or package}"


def import_failure(name: str, do_import: Callable[[], object]) -> str | None:
    """Say why an import fails, whatever the package raises; None if it works."""
    try:
        do_import()
    except Exception as error:
        return f"{name} cannot be imported: {type(error).__name__}: {error}"
    return None


class CupyMoe(Contender):
    """The operation of this package, from given routing to the output."""

    key = "cupy_moe"
    name = "cupy_moe"
    package = "cupy-moe"
    scope = "whole layer, given routing to output, sorting by expert included"

    @classmethod
    def missing(cls) -> str | None:
        """Nothing: the benchmark does not start without a GPU."""
        return None

    def __init__(self, layer: BenchLayer) -> None:
        """Take the prepared weights as they are."""
        self._layer = layer

    def prepare(self, hidden: Any, ids: Ids, weights: NDArray[np.float32]) -> Callable[[], Any]:
        """Call with an output of its own."""
        return self._layer.call(hidden, ids, weights)
