"""What tests that run a layer in all its tilings share."""

from __future__ import annotations

import pytest

from cupy_moe import pipeline
from cupy_moe import plan as plan_module
from cupy_moe.fused_moe import repeated
from cupy_moe.plan import MoePlan
from cupy_moe.problem import DeviceTraits, MoeProblem
from cupy_moe.tiling import Tiling

__all__ = ["planned", "take_tiles"]


def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MoeProblem, DeviceTraits]]:
    """Problems that the pipeline plans from now on."""
    problems: list[tuple[MoeProblem, DeviceTraits]] = []

    def plan(problem: MoeProblem, device: DeviceTraits, tiling: Tiling | None = None) -> MoePlan:
        problems.append((problem, device))
        return original(problem, device, tiling)

    original = plan_module.plan_moe
    monkeypatch.setattr(pipeline, "plan_moe", plan)
    pipeline.plan_for.cache_clear()
    repeated.accepted.cache_clear()
    return problems


def take_tiles(monkeypatch: pytest.MonkeyPatch, takes_tiles: bool) -> None:
    """Let blocks take tiles from a counter from now on wherever there is one, or nowhere."""
    monkeypatch.setattr(plan_module, "takes_tiles", lambda *p: takes_tiles and not p[1].sort_slots)
    for cached in (plan_module.plan_moe, pipeline.plan_for, pipeline.bind_stages):
        cached.cache_clear()
