"""Generations and re-arming of the receive buffers, as a model whose ranks take turns at random.

A rank of the model is a sequence of atomic steps, stores to a peer arrive
later and out of order, and a read of a word that has not arrived waits. Broken rules must show.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

ARMED = None
SLOTS = 2  # tokens: call n of a rank uses one or both


@dataclass
class World:
    """Receive buffers [rank][slot][copy][sender] and stores under way."""

    num_ranks: int
    num_copies: int
    rearm_before: int | None  # copy (g + this) is armed again in generation g; None: never
    buffers: dict[tuple[int, int, int, int], int | None] = field(default_factory=dict)
    flying: list[tuple[tuple[int, int, int, int], int]] = field(default_factory=list)

    def land(self, rng: random.Random) -> None:
        where, value = self.flying.pop(rng.randrange(len(self.flying)))
        self.buffers[where] = value


def rank_steps(world: World, rank: int, calls: list[int], seen: list) -> Iterator[bool]:
    """Yield after each step; yields True while it can only wait."""
    generations = [0] * SLOTS
    peers = [q for q in range(world.num_ranks) if q != rank]
    for number, num_slots in enumerate(calls):
        for slot in range(num_slots):
            copy = generations[slot] % world.num_copies
            for peer in peers:
                world.flying.append(((peer, slot, copy, rank), number))
                yield False
        for slot in range(num_slots):
            generation = generations[slot]
            copy = generation % world.num_copies
            for peer in peers:
                where = (rank, slot, copy, peer)
                while world.buffers.get(where, ARMED) is ARMED:
                    yield True
                seen.append((rank, number, world.buffers[where]))
                yield False
            for peer in peers if world.rearm_before is not None else []:
                spent = (generation + world.rearm_before) % world.num_copies
                world.buffers[(rank, slot, spent, peer)] = ARMED
                yield False
            generations[slot] += 1


def run(
    seed: int,
    *,
    num_ranks: int = 3,
    num_copies: int = 3,
    rearm_before: int | None = 2,
    num_calls: int = 9,
) -> str:
    """Outcome of one interleaving: "right", "stale" or "stuck"."""
    rng = random.Random(seed)
    world = World(num_ranks, num_copies, rearm_before)
    calls = [rng.randint(1, SLOTS) for _ in range(num_calls)]
    seen: list = []
    ranks = [rank_steps(world, rank, calls, seen) for rank in range(num_ranks)]
    speed = [rng.choice([1, 1, 5, 30]) for _ in ranks]
    idle = 0
    while ranks:
        if world.flying and rng.random() < 0.3:
            world.land(rng)
            idle = 0
        chosen = rng.choices(range(len(ranks)), speed[: len(ranks)])[0]
        try:
            waits = next(ranks[chosen])
        except StopIteration:
            del ranks[chosen]
            continue
        idle = idle + 1 if waits else 0
        if idle > 2000 and not world.flying:
            return "stuck"
    return "right" if all(got == number for _, number, got in seen) else "stale"


def outcomes(**rules: int | None) -> set[str]:
    return {run(seed, **rules) for seed in range(150)}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_three_copies_are_enough(num_ranks: int) -> None:
    assert outcomes(num_ranks=num_ranks) == {"right"}


def test_two_copies_are_not() -> None:
    assert outcomes(num_copies=2, rearm_before=1) - {"right"}


def test_the_copy_in_use_must_not_be_armed_in_the_next_generation_only() -> None:
    # Armed just before it is used: a peer that is ahead has written it already.
    assert outcomes(rearm_before=1) - {"right"}


def test_a_buffer_that_is_never_armed_shows_old_words() -> None:
    assert "stale" in outcomes(rearm_before=None)
