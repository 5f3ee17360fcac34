"""Owners of resources that a ``with`` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

__all__ = ["Closing"]

ClosingT = TypeVar("ClosingT", bound="Closing")


class Closing(ABC):
    """Owner of resources; a ``with`` block closes it, whatever is raised inside."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def __enter__(self: ClosingT) -> ClosingT:
        """Return the owner itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
