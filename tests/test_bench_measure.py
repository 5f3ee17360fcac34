"""How peers that fail, or answer wrongly, are treated; times and GPU are made up."""

from __future__ import annotations

import gc
import importlib.metadata
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from cupy_moe.bench import measure as module
from cupy_moe.bench import timing
from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.layers import Batch
from cupy_moe.bench.workloads import WORKLOADS, make_routings, work_of
from tests.bench_rows import CEILINGS

torch = pytest.importorskip("torch")

WORKLOAD = WORKLOADS["W-A"]


class FakeGraph:
    """Runs what was launched while it was recorded; keeps addresses, not arrays, as graphs do."""

    recording: ClassVar[FakeGraph | None] = None

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel()

    @contextmanager
    def record(self) -> Iterator[None]:
        FakeGraph.recording = self
        yield
        FakeGraph.recording = None


def launch(kernel: Callable[[], None]) -> None:
    if FakeGraph.recording is None:
        kernel()
    else:
        FakeGraph.recording.kernels.append(kernel)


class Fake(Contender):
    """Answers ``factor`` times the right output, NaN from inputs that are gone."""

    key = "fake"
    package = "fake"
    scope = "whole layer"
    factor: ClassVar[float] = 1.0
    growth: ClassVar[float] = 1.0  # of the factor with every run

    @classmethod
    def missing(cls) -> str | None:
        return None

    def __init__(self, layer: Any) -> None:
        self._growth = 1.0

    def prepare(self, hidden: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        inputs, own_factor = torch.ones(4, 8), self.factor

        def call() -> Any:
            address, output = weakref.ref(inputs), torch.full((4, 8), torch.nan)

            def kernel() -> None:
                self._growth *= self.growth
                memory = address()
                factor = own_factor * self._growth
                output.copy_(output * torch.nan if memory is None else factor * memory)

            launch(kernel)
            return output

        return call


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


class WrongOnce(Fake):
    """Only its first call is wrong."""

    name = "WrongOnce"

    def prepare(self, hidden: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        call = super().prepare(hidden, ids, weights)
        self.factor = 1.0
        return call

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.factor = 1.2


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


class Drifting(Fake):
    """Right at first: its output doubles by the end of the timed replays."""

    name = "Drifting"
    growth = 1.0001


class Breaking(Fake):
    name = "Breaking"

    def prepare(self, hidden: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        def synchronize() -> None:
            raise RuntimeError("device-side assert triggered\nand advice")

        torch.cuda.synchronize = synchronize  # the fixture takes it back
        return super().prepare(hidden, ids, weights)


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(works: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        for _ in range(1000):
            for work in works.values():
                work()
        return {name: [160.0] * rounds for name in works}

    replacements = {
        "CUDAGraph": FakeGraph,
        "graph": FakeGraph.record,
        "stream": nullcontext,
        "current_stream": lambda: None,
        "synchronize": lambda: None,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(module, "interleaved_us", interleaved)
    monkeypatch.setattr(module, "sustained_us", lambda work, rounds: 192.0)
    monkeypatch.setattr(module, "CupyMoe", Ours)
    monkeypatch.setattr(module, "layer_output", lambda *_: torch.ones(1, 8))


LAYER: dict[str, Any] = {
    "workload": WORKLOAD,
    "name": "W-A",
    "mode": "fp8",
    "form": "whole",
    "largest_rel_l2": 0.1,
}


def batch_of(num_tokens: int) -> Batch:
    routings = make_routings(WORKLOAD, num_tokens)
    weights = np.full((num_tokens, 8), 0.125, np.float32)
    return Batch(torch.zeros(num_tokens, 4096), routings, weights, work_of(WORKLOAD, routings))


def measured(*peers: type[Contender], **options: Any) -> Any:
    layer = SimpleNamespace(**LAYER)
    loaded, failures = module._load(peers, layer)
    arguments = {"replays": 3, "peers": loaded, "failures": failures} | options
    return module.measure(layer, batch_of(1), CEILINGS, **arguments)


@pytest.mark.usefixtures("_no_gpu")
def test_peers_that_answer_are_timed() -> None:
    row = measured(Good, Parts)
    assert row.failures == {}
    assert row.timings.keys() == {"cupy_moe", "Good", "Parts"}
    assert row.us == 10.0  # a graph of 16 calls took 160 us
    assert row.sustained_us == 12.0
    assert row.errors == {"Good": pytest.approx(0.01, rel=1e-3)}
    assert row.floor_us == pytest.approx(151_007_232 / 4e12 * 1e6)


@pytest.mark.usefixtures("_no_gpu")
def test_peers_that_fail_are_named_and_not_timed() -> None:
    row = measured(Wrong, WrongOnce, NotANumber, Raising, Unloadable, Good)
    assert row.timings.keys() == {"cupy_moe", "Good"}
    assert row.failures == {
        "Wrong": "relative L2 distance from our output: 0.2",
        "WrongOnce": "relative L2 distance from our output: 0.2",
        "NotANumber": "relative L2 distance from our output: inf",
        "Raising": "RuntimeError: no kernel for this size",
        "Unloadable": "ImportError: no compiler",
    }


@pytest.mark.usefixtures("_no_gpu")
def test_inputs_live_as_long_as_the_graph_that_reads_them() -> None:
    source = torch.ones(4, 8)
    held, output = weakref.ref(source), torch.zeros(4, 8)

    def call(source: Any = source) -> Any:
        launch(lambda: output.copy_(held()))
        return output

    captured = timing.capture([call])
    del call, source
    output.zero_()
    captured.replay()
    assert bool((output == 1).all())
    del captured
    assert held() is None


@pytest.mark.usefixtures("_no_gpu")
def test_peers_whose_output_changes_while_they_are_timed_have_no_time() -> None:
    row = measured(Drifting, Good)
    assert row.timings.keys() == {"cupy_moe", "Good"}
    (reason,) = row.failures.values()
    assert reason.startswith("relative L2 distance from our output after the timed replays: ")


@pytest.mark.usefixtures("_no_gpu")
def test_an_error_of_the_gpu_ends_the_run_and_names_row_and_peer() -> None:
    message = "bench: W-A, 1 tokens: Breaking: RuntimeError: device-side assert triggered$"
    with pytest.raises(RuntimeError, match=message):
        measured(Good, Breaking, Parts)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (NotANumber, "the output is not finite"),
        (Raising, "RuntimeError: no kernel for this size"),
        (Wrong, "relative L2 distance from the layer in torch: 0.2$"),
        (Drifting, "relative L2 distance from our output after the timed replays"),
    ],
)
def test_our_own_failures_name_the_row(
    ours: type[Fake], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CupyMoe", ours)
    with pytest.raises(RuntimeError, match=f"bench: W-A, 1 tokens: cupy_moe: {reason}"):
        measured(Good)


def test_environment_names_what_compiles_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(module, "driver_cuda_version", lambda: "13.1")
    monkeypatch.setattr(module, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(module, "import_cupy", lambda: SimpleNamespace(__version__="14.0.1"))
    environment = module.describe_environment([Good])
    assert environment == {
        "gpu": "a GPU",
        "driver_cuda": "13.1",
        "nvrtc": "13.0",
        "cupy": "14.0.1",
        "torch_cuda": str(torch.version.cuda),
        "torch": importlib.metadata.version("torch"),
        "fake": "absent",
    }


@pytest.mark.usefixtures("_no_gpu")
def test_sustained_times_can_be_left_out() -> None:
    assert measured(sustained=False).sustained_us is None


@pytest.mark.usefixtures("_no_gpu")
def test_layers_are_made_and_measured_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []

    class Layer(SimpleNamespace):
        def batch(self, num_tokens: int) -> Batch:
            return batch_of(num_tokens)

    def make(mode: str) -> Any:
        assert all(layer() is None for layer in alive)
        layer = Layer(**LAYER | {"mode": mode})
        alive.append(weakref.ref(layer))
        return layer

    monkeypatch.setattr(module, "free_memory", gc.collect)
    makers = [lambda: make("fp8"), lambda: make("bf16")]
    rows = list(
        module.measure_all(
            makers, [1, 4], lambda layer: [Good] if layer.mode == "bf16" else [], CEILINGS, 3
        )
    )
    assert [(row.mode, row.num_tokens) for row in rows] == [
        ("fp8", 1),
        ("fp8", 4),
        ("bf16", 1),
        ("bf16", 4),
    ]
    assert ["Good" in row.timings for row in rows] == [False, False, True, True]
