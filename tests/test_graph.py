"""Graphs of launches, with a driver that writes down what it is asked for."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from cupy_moe.runtime import devices, graph
from cupy_moe.runtime.graph import LaunchGraph, RepeatedLaunches
from cupy_moe.runtime.jit import Function
from cupy_moe.runtime.launch import BoundLaunch, ParamLayout
from cupy_moe.runtime.launch import bind as bind_launch

bindings = pytest.importorskip("cuda.bindings.driver")

LAYOUT = ParamLayout(("value", "i32"))
PROGRAMMATIC, FULL = (1, 1, 0), (0, 0, 0)  # port and kind of an edge, port of the successor


class Driver:
    """Answers every call with success, except for the names in ``failing``.

    Structures and codes are those of the installed bindings.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: set[str] = set()
        self.mode = 0
        self.captured: set[int] = set()
        self.version = 13000
        self.num_nodes = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(bindings, name)
        if name == "cuGraphAddNode_v2":
            raise AttributeError(name)
        values = {"cuGraphCreate": "graph", "cuGraphInstantiate": "executable"}

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.record(name, *arguments)
            status = 999 if name in self.failing else 0
            return (status, values[name]) if name in values else (status,)

        return call

    def record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        assert (self.mode == 2) is (name != "cuGraphLaunch"), "relaxed but for launches"

    def cuGraphAddNode(  # noqa: N802
        self, graph: str, before: list[str], edges: list[Any], count: int, params: Any
    ) -> tuple[Any, ...]:
        """Write down what a node gets: function, parameter, grid, block, memory; edges."""
        kernel = params.kernel
        pointer = ctypes.c_void_p.from_address(kernel.kernelParams).value
        assert pointer is not None
        assert params.type == bindings.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        assert len(before) == len(edges) == count
        kinds = [(e.from_port, e.type, e.to_port) for e in edges]
        grid = (kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ)
        block = (kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ)
        value = ctypes.c_int.from_address(pointer).value
        node = (int(kernel.func), value, grid, block, kernel.sharedMemBytes)
        self.record("cuGraphAddNode", graph, *zip(before, kinds, strict=True), node)
        if "cuGraphAddNode" in self.failing:
            return 999, None
        self.num_nodes += 1
        return 0, f"node {self.num_nodes}"

    def cuGraphKernelNodeSetAttribute(self, node: str, name: Any, value: Any) -> tuple[int]:  # noqa: N802
        assert name is bindings.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        assert isinstance(value, bindings.CUkernelNodeAttrValue)
        size = value.clusterDim
        self.record("cuGraphKernelNodeSetAttribute", node, (size.x, size.y, size.z))
        return (999 if "cuGraphKernelNodeSetAttribute" in self.failing else 0,)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[int, int]:  # noqa: N802
        before, self.mode = self.mode, int(mode)
        return 0, before

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.version

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


class OlderDriver(Driver):
    """With bindings of CUDA 12, whose call of the plain name takes no edges."""

    cuGraphAddNode_v2 = Driver.cuGraphAddNode  # noqa: N815

    def cuGraphAddNode(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        raise AssertionError("takes no edges")


@pytest.fixture(params=[Driver, OlderDriver], ids=["bindings 13", "bindings 12"])
def driver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver: Driver = request.param()
    monkeypatch.setattr(graph, "import_driver", lambda: driver)
    monkeypatch.setattr(graph, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(graph, "context_is_current", lambda device: True)
    monkeypatch.setattr(graph, "stream_is_primary", lambda stream, device: True)
    monkeypatch.setattr(graph, "stream_is_capturing", lambda stream: stream in driver.captured)
    monkeypatch.setattr(graph, "enqueue", lambda launches: driver.calls.extend(map(told, launches)))
    monkeypatch.setattr(devices, "describe_error", lambda status: f"error {status}")
    caches = (
        graph._driver_launch,
        graph._driver_has_dependent_graphs,
        graph._say_no_graph,
    )
    for cached in caches:
        cached.cache_clear()
    yield driver
    for cached in caches:
        cached.cache_clear()


def launch(number: int, stream: int, **options: Any) -> BoundLaunch:
    function = Function(f"kernel {number}", 0, bindings.CUfunction(number))
    params = LAYOUT.pack(10 * number)
    return bind_launch(function, params, grid=(number, 2, 3), block=32, stream=stream, **options)


def bind(stream: int) -> list[BoundLaunch]:
    return [launch(number, stream) for number in (1, 2)]


def told(launch: BoundLaunch) -> tuple[str, int]:
    """How the test writes a launch down that was enqueued by itself."""
    return launch.function.name, int(launch.config.hStream)


def one_by_one(stream: int) -> list[tuple[str, int]]:
    return [("kernel 1", stream), ("kernel 2", stream)]


def node(number: int, smem: int = 0) -> tuple[Any, ...]:
    return number, 10 * number, (number, 2, 3), (32, 1, 1), smem


def test_kernels_are_nodes_in_order(driver: Driver) -> None:
    """An edge is programmatic where the later kernel is; the first one has none."""
    launches = [
        launch(1, 7, pdl=True),
        launch(2, 7, pdl=True, smem=4096),
        launch(3, 7),
        launch(4, 7, pdl=True, cluster=8),
    ]
    made = LaunchGraph(0, launches)
    assert driver.calls == [
        ("cuGraphCreate", 0),
        ("cuGraphAddNode", "graph", node(1)),
        ("cuGraphAddNode", "graph", ("node 1", PROGRAMMATIC), node(2, smem=4096)),
        ("cuGraphAddNode", "graph", ("node 2", FULL), node(3)),
        ("cuGraphAddNode", "graph", ("node 3", PROGRAMMATIC), node(4)),
        ("cuGraphKernelNodeSetAttribute", "node 4", (8, 1, 1)),
        ("cuGraphInstantiate", "graph", 0),
        ("cuGraphDestroy", "graph"),
    ]
    assert driver.mode == 0
    driver.calls.clear()
    for stream in (7, 8):
        made.enqueue(stream)
    assert driver.calls == [("cuGraphLaunch", "executable", stream) for stream in (7, 8)]


def test_a_dropped_graph_is_destroyed(driver: Driver) -> None:
    made = LaunchGraph(0, bind(7))
    driver.calls.clear()
    del made
    assert driver.calls == [("cuGraphExecDestroy", "executable")]


STEPS = ("cuGraphCreate", "cuGraphAddNode", "cuGraphKernelNodeSetAttribute", "cuGraphInstantiate")


@pytest.mark.parametrize("failing", STEPS)
def test_what_the_driver_refuses_is_said(driver: Driver, failing: str) -> None:
    """Nothing is left behind."""
    driver.failing.add(failing)
    with pytest.raises(RuntimeError, match="making a graph on cuda:0: error 999"):
        LaunchGraph(0, [launch(1, 7, cluster=2)])
    assert ("cuGraphDestroy" in driver.names) is (failing != "cuGraphCreate")
    assert driver.mode == 0
    gc.collect()
    assert "cuGraphExecDestroy" not in driver.names


def test_a_launch_that_is_none_leaves_nothing_behind(driver: Driver) -> None:
    def launches() -> Iterator[BoundLaunch]:
        yield launch(1, 7)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LaunchGraph(0, launches())
    assert driver.names == ["cuGraphCreate", "cuGraphAddNode", "cuGraphDestroy"]
    assert driver.mode == 0


@pytest.mark.parametrize("failing", STEPS)
@pytest.mark.parametrize("prepared", [False, True])
def test_without_a_graph_kernels_are_launched(driver: Driver, failing: str, prepared: bool) -> None:
    driver.failing.add(failing)
    first, second = (
        RepeatedLaunches(0, lambda stream: [launch(1, stream, cluster=2)]) for _ in range(2)
    )

    def run() -> None:
        for launches in (first, second):
            if prepared:
                launches.prepare(7)
            for _ in range(20):
                launches.enqueue(7)

    with pytest.warns(RuntimeWarning, match="one by one.*cuda:0: error 999") as caught:
        run()
    assert len(caught) == 1, "said once"
    assert driver.calls.count(("kernel 1", 7)) == 40
    assert driver.names.count("cuGraphCreate") == 2, "tried once each"


def test_what_binding_raises_is_raised(driver: Driver) -> None:
    """It is no reason to go without a graph, and the next run binds again."""
    failing = True

    def bind_or_fail(stream: int) -> Sequence[BoundLaunch]:
        if failing:
            raise RuntimeError("does not compile")
        return bind(stream)

    launches = RepeatedLaunches(0, bind_or_fail)
    for run in (launches.prepare, launches.enqueue):
        with pytest.raises(RuntimeError, match="does not compile"):
            run(7)
    assert driver.calls == []
    failing = False
    launches.prepare(7)
    launches.enqueue(7)
    assert driver.names[-1] == "cuGraphLaunch"


def test_a_run_inside_of_a_run(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal handler: no deadlock, and the last kernels are those of a whole run."""
    launches = RepeatedLaunches(0, bind)
    interrupted = False

    def enqueue(bound: Sequence[BoundLaunch]) -> None:
        nonlocal interrupted
        for one in bound:
            driver.calls.append(told(one))
            if not interrupted:
                interrupted = True
                launches.enqueue(7)

    monkeypatch.setattr(graph, "enqueue", enqueue)
    launches.enqueue(7)
    inner, first, second = one_by_one(7), ("kernel 1", 7), ("kernel 2", 7)
    assert driver.calls == [first, *inner, second, *one_by_one(7)]


def test_a_run_while_the_graph_is_made(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = RepeatedLaunches(0, bind)
    launches._runs = graph._RUNS_BEFORE_GRAPH
    make: Callable[..., LaunchGraph] = LaunchGraph
    interrupted = False

    def interrupt(device: int, bound: Sequence[BoundLaunch]) -> LaunchGraph:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            launches.enqueue(7)
        return make(device, bound)

    monkeypatch.setattr(graph, "LaunchGraph", interrupt)
    launches.enqueue(7)
    assert driver.names.count("cuGraphLaunch") == 2
    assert driver.names.count("cuGraphExecDestroy") == 1, "one of two is kept"


def test_a_refused_graph_is_said(driver: Driver) -> None:
    made = LaunchGraph(0, bind(7))
    driver.failing.add("cuGraphLaunch")
    with pytest.raises(RuntimeError, match="launching a graph: error 999"):
        made.enqueue(7)


GRAPH_LAUNCH = ("cuGraphLaunch", "executable")


def test_launches_that_come_back_become_a_graph(driver: Driver) -> None:
    launches = RepeatedLaunches(0, bind)
    for run in range(graph._RUNS_BEFORE_GRAPH):
        launches.enqueue(7)
        assert driver.calls == (run + 1) * one_by_one(7)
    driver.calls.clear()
    launches.enqueue(7)
    assert driver.names[-2:] == ["cuGraphDestroy", "cuGraphLaunch"]
    driver.calls.clear()
    for stream in (7, 8):
        launches.enqueue(stream)
    assert driver.calls == [(*GRAPH_LAUNCH, 7), (*GRAPH_LAUNCH, 8)]
    driver.calls.clear()
    driver.captured.add(8)
    launches.enqueue(8)
    assert driver.calls == one_by_one(8)


@pytest.mark.parametrize("captured", [False, True])
def test_prepared_launches_are_a_graph_at_once(driver: Driver, captured: bool) -> None:
    driver.captured = {7} if captured else set()
    launches = RepeatedLaunches(0, bind)
    launches.prepare(7)
    assert ("cuGraphInstantiate" in driver.names) is not captured
    assert "cuGraphLaunch" not in driver.names
    driver.calls.clear()
    launches.enqueue(7)
    assert driver.calls == (one_by_one(7) if captured else [(*GRAPH_LAUNCH, 7)])
    driver.captured.clear()
    launches.enqueue(7)
    assert driver.calls[-1] == (*GRAPH_LAUNCH, 7)


@pytest.mark.parametrize("prepared", [False, True])
def test_old_drivers_launch_kernels(driver: Driver, prepared: bool) -> None:
    """Their graphs would refuse programmatic dependent launches."""
    driver.version = 12020
    launches = RepeatedLaunches(0, bind)
    if prepared:
        launches.prepare(7)
    for _ in range(20):
        launches.enqueue(7)
    assert driver.calls == 20 * one_by_one(7)
