"""Times of every scheme of the tensor-parallel finalize, and where it pays to change it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cupy_moe.bench.finalize_contenders import (
    HIDDEN_SIZE,
    TOP_K,
    FinalizeProblem,
    captured_on_all,
    median_replay,
    num_calls,
)
from cupy_moe.comm import FinalizeWorkspace
from cupy_moe.comm.groups import as_group
from cupy_moe.comm.layout import SchemeLimits, choose_scheme
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme

__all__ = ["switch_points", "time_schemes"]

# Receive buffers of these grow with ranks times tokens, and they send too much to win with more.
MOST_TOKENS = {FinalizeScheme.EveryRank: 64, FinalizeScheme.ExpertOwner: 256}


def time_schemes(
    tokens: Sequence[int], replays: int, transport: str
) -> dict[int, dict[str, float]]:
    """Measure on the world of ``torch.distributed``; no other workspace may be open here.

    Parameters
    ----------
    tokens : sequence of int
    replays : int
        Of every graph.
    transport : str

    Returns
    -------
    dict
        us a call, by number of tokens and name of the scheme.

    Raises
    ------
    RuntimeError
        A rank failed, or a call gave up waiting for another one.
    """
    import torch

    found: dict[int, dict[str, float]] = {num_tokens: {} for num_tokens in tokens}
    device = torch.cuda.current_device()
    for scheme in FinalizeScheme:
        measured = [t for t in tokens if t <= MOST_TOKENS.get(scheme, t)]
        if not measured:
            continue
        with FinalizeWorkspace(
            as_group(None, device),
            device,
            hidden_size=HIDDEN_SIZE,
            top_k=TOP_K,
            max_tokens=max(measured),
            transport=transport,
            limits=_limits_of(scheme, max(measured)),
        ) as workspace:
            for num_tokens in measured:
                count = num_calls(num_tokens)
                _, graph = captured_on_all(partial(_call_on, workspace, num_tokens), count)
                us = median_replay(graph, replays) / count
                workspace.check()  # after a wait that was given up the rest is no work
                found[num_tokens][scheme.name] = us
    return found


def _call_on(workspace: FinalizeWorkspace, num_tokens: int) -> Callable[[], None]:
    return FinalizeProblem(num_tokens).on_workspace(workspace)


def _limits_of(scheme: FinalizeScheme, most: int) -> SchemeLimits:
    """Limits that choose the scheme for up to so many tokens."""
    return SchemeLimits(
        most if scheme is FinalizeScheme.EveryRank else 0,
        most if scheme is FinalizeScheme.ExpertOwner else 0,
    )


def switch_points(times: Mapping[int, Mapping[str, float]], num_ranks: int) -> SchemeLimits:
    """Limits that lose the least against the fastest scheme of each number of tokens, on average.

    Parameters
    ----------
    times : mapping
        From `time_schemes`; the limits are among its numbers of tokens, or 0.
    num_ranks : int
        More than one.
    """
    fastest = {t: min(of_schemes.values()) for t, of_schemes in times.items() if of_schemes}

    def loss(limits: SchemeLimits) -> float:
        chosen = {t: choose_scheme(t, num_ranks, limits).name for t in fastest}
        return sum(times[t].get(chosen[t], math.inf) / fastest[t] for t in fastest)

    ends = (0, *sorted(fastest))
    candidates = [
        SchemeLimits(every_rank, expert_owner)
        for every_rank, expert_owner in itertools.product(ends, repeat=2)
        if expert_owner == 0 or expert_owner > every_rank
    ]
    return min(candidates, key=loss)
