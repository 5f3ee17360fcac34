"""What the ranks of a group must agree on before they exchange rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from cupy_moe.comm.groups import Group

__all__ = ["ResultT", "SetUpError", "agree", "on_all", "vote"]

ResultT = TypeVar("ResultT")


class SetUpError(RuntimeError):
    """A step of setting up failed on some rank."""


def agree(group: Group, operation: str, terms: object) -> None:
    """Refuse on every rank what the ranks do not pass alike; collective.

    Parameters
    ----------
    group : Group
    operation : str
        Names the operation in the error.
    terms : object
        What must have the same ``repr`` on every rank.

    Raises
    ------
    ValueError
        The ranks differ; says what each one passed.
    """
    given = [data.decode() for data in group.all_gather(repr(terms).encode())]
    if len(set(given)) > 1:
        each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(given))
        raise ValueError(f"{operation}: every rank must pass the same, got {each}.")


def vote(group: Group, failure: str | None) -> list[str]:
    """Tell every rank what failed on any; collective.

    Parameters
    ----------
    group : Group
    failure : str, optional
        What failed here; None if nothing did.

    Returns
    -------
    list of str
        ``"rank q: what failed"`` of every rank where something did, the same on all ranks.
    """
    votes = group.all_gather(b"" if failure is None else failure.encode())
    return list(_named(votes))


def on_all(group: Group, what: str, step: Callable[[], ResultT]) -> ResultT:
    """Do a step on every rank; if it fails on any, raise on all; collective.

    Parameters
    ----------
    group : Group
    what : str
        Begins the error.
    step : callable
        Of this rank alone.

    Raises
    ------
    SetUpError
        Names the ranks and what they raised.
    """
    done, error = [], None
    try:
        done.append(step())
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    try:
        failures = vote(group, None if error is None else f"{type(error).__name__}: {error}")
    except Exception:  # a step that failed can be why the group does as well
        if error is not None:
            raise error  # noqa: B904 (raised while the other one is handled, which it shows)
        raise
    if failures:
        raise SetUpError(f"{what}: {'; '.join(failures)}") from error
    return done[0]


def _named(votes: Iterable[bytes]) -> Iterable[str]:
    for rank, failure in enumerate(votes):
        if failure:
            yield f"rank {rank}: {failure.decode()}"
