"""How peers that fail, or answer wrongly, are treated; times and GPU are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from cupy_moe.bench import measure as module
from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.layers import Batch
from cupy_moe.bench.workloads import WORKLOADS, make_routings, work_of
from tests.bench_rows import CEILINGS

torch = pytest.importorskip("torch")

WORKLOAD = WORKLOADS["W-A"]


class Fake(Contender):
    """Answers ``factor`` times the right output."""

    key = "fake"
    package = "fake"
    scope = "whole layer"
    factor: ClassVar[float] = 1.0

    @classmethod
    def missing(cls) -> str | None:
        return None

    def __init__(self, layer: Any) -> None:
        pass

    def prepare(self, hidden: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        return lambda: self.factor * torch.ones(4, 8)


class Ours(Fake):
    name = "cupy_moe"


class Good(Fake):
    name = "Good"
    factor = 1.01


class Wrong(Fake):
    name = "Wrong"
    factor = 1.2


class NotANumber(Fake):
    name = "NotANumber"
    factor = float("nan")


class Parts(Fake):
    """Its result is not the output, so it is not compared."""

    name = "Parts"
    factor = 5.0
    whole_layer = False


class Raising(Fake):
    name = "Raising"

    def prepare(self, hidden: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        raise RuntimeError("no kernel for this size\nand a long trace")


class Unloadable(Fake):
    name = "Unloadable"

    def __init__(self, layer: Any) -> None:
        raise ImportError("no compiler")


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(calls: list[Callable[[], Any]]) -> tuple[Any, list[Any]]:
        return SimpleNamespace(replay=lambda: None), [call() for call in calls]

    def interleaved(works: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        return {name: [160.0] * rounds for name in works}

    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "interleaved_us", interleaved)
    monkeypatch.setattr(module, "CupyMoe", Ours)


def measured(*peers: type[Contender]) -> Any:
    routings = make_routings(WORKLOAD, 1)
    weights = np.full((1, 8), 0.125, np.float32)
    batch = Batch(torch.zeros(1, 4096), routings, weights, work_of(WORKLOAD, routings))
    layer = SimpleNamespace(workload=WORKLOAD)
    loaded, failures = module._load(peers, layer)
    return module.measure(layer, batch, CEILINGS, replays=3, peers=loaded, failures=failures)


@pytest.mark.usefixtures("_no_gpu")
def test_peers_that_answer_are_timed() -> None:
    row = measured(Good, Parts)
    assert row.failures == {}
    assert row.timings.keys() == {"cupy_moe", "Good", "Parts"}
    assert row.us == 10.0  # a graph of 16 calls took 160 us
    assert row.errors == {"Good": pytest.approx(0.01, rel=1e-3)}
    assert row.floor_us == pytest.approx(151_007_232 / 4e12 * 1e6)


@pytest.mark.usefixtures("_no_gpu")
def test_peers_that_fail_are_named_and_not_timed() -> None:
    row = measured(Wrong, NotANumber, Raising, Unloadable, Good)
    assert row.timings.keys() == {"cupy_moe", "Good"}
    assert row.failures == {
        "Wrong": "relative L2 distance from our output: 0.2",
        "NotANumber": "relative L2 distance from our output: inf",
        "Raising": "RuntimeError: no kernel for this size",
        "Unloadable": "ImportError: no compiler",
    }


@pytest.mark.usefixtures("_no_gpu")
def test_our_own_output_has_to_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CupyMoe", NotANumber)
    with pytest.raises(RuntimeError, match="W-A, 1 tokens: not finite"):
        measured(Good)
