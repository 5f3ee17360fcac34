"""Errors that cross processes."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["PortableError"]

_State: TypeAlias = "dict[str, object]"


class PortableError(RuntimeError):
    """Error that can be pickled and copied whatever its constructor takes.

    An ordinary one is built anew from its message alone; a constructor that takes something else
    then fails in the process that receives it. Here message and attributes are restored without
    the constructor, as they were where the error was raised.
    """

    def __reduce__(self) -> tuple[object, tuple[object, ...], _State]:
        """See `object.__reduce__`."""
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[PortableError], args: tuple[object, ...]) -> PortableError:
    return kind.__new__(kind, *args)
