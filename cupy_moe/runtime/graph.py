"""Kernels that are launched together many times, as an executable CUDA graph once it pays."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import TypeAlias

from cupy_moe.runtime.devices import (
    DriverValue,
    check,
    context_is_current,
    device_guard,
    stream_is_capturing,
    stream_is_primary,
)
from cupy_moe.runtime.launch import BoundLaunch, enqueue
from cupy_moe.runtime.requirements import import_driver

__all__ = ["LaunchGraph", "RepeatedLaunches"]

Bind: TypeAlias = Callable[[int], Sequence[BoundLaunch]]

_RUNS_BEFORE_GRAPH = 8  # a graph takes about as long to make as it saves in so many runs

_FIRST_DEPENDENT_GRAPHS = 12030  # driver whose graphs have programmatic dependent launches

_LAUNCH_SIZES = (
    *("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"),
    "sharedMemBytes",
)


@cache
def _driver_has_dependent_graphs() -> bool:
    version = check(import_driver().cuDriverGetVersion(), "asking for the driver's CUDA version")
    return int(version) >= _FIRST_DEPENDENT_GRAPHS


@contextmanager
def _despite_captures() -> Iterator[None]:
    """Allow this thread what a capture on another stream of whatever thread may forbid."""
    driver, what = import_driver(), "changing the capture mode of a thread"
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), what)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before), what)


class LaunchGraph:
    """Kernels in order that one call of the driver enqueues.

    Parameters
    ----------
    device : int
        CUDA ordinal; its primary context must be current.
    launches : iterable of BoundLaunch
        Bound to any stream. Programmatic dependent launches stay such between them; the first
        one waits for all work before the graph. Nothing of them is kept.

    Raises
    ------
    RuntimeError
        If the driver refuses the graph.

    Notes
    -----
    The kernels run in the primary context, whatever the context of the stream. The graph may be
    dropped while it runs.

    It is put together node by node: a stream capture would make calls of other threads fail that
    synchronize the device meanwhile.
    """

    __slots__ = ("__weakref__", "_executable")

    def __init__(self, device: int, launches: Iterable[BoundLaunch]) -> None:
        driver, what = import_driver(), f"making a graph on cuda:{device}"
        with _despite_captures():
            graph = check(driver.cuGraphCreate(0), what)
            try:
                node = None
                for launch in launches:
                    node = _add_kernel(graph, node, launch, what)
                self._executable = check(driver.cuGraphInstantiate(graph, 0), what)
                # At exit the driver may be gone already.
                weakref.finalize(self, _destroy, self._executable).atexit = False
            finally:
                driver.cuGraphDestroy(graph)

    def enqueue(self, stream: int) -> None:
        """Enqueue the kernels on a stream that is not captured; one thread at a time.

        Raises
        ------
        RuntimeError
            If the driver refuses the graph.
        """
        check(_driver_launch()(self._executable, stream), "launching a graph")


def _add_kernel(
    graph: DriverValue, predecessor: DriverValue | None, launch: BoundLaunch, what: str
) -> DriverValue:
    """Append a kernel's node; the driver copies the parameters."""
    driver = import_driver()
    # The call that takes the kind of an edge has had another name before bindings of CUDA 13.
    add = getattr(driver, "cuGraphAddNode_v2", None) or driver.cuGraphAddNode
    before = [] if predecessor is None else [predecessor]
    edges = [_edge(launch) for _ in before]
    node = check(add(graph, before, edges, len(before), _node_params(launch)), what)
    if launch.cluster > 1:
        attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUkernelNodeAttrValue()
        value.clusterDim.x = launch.cluster
        value.clusterDim.y = value.clusterDim.z = 1
        check(driver.cuGraphKernelNodeSetAttribute(node, attribute, value), what)
    return node


def _edge(successor: BoundLaunch) -> DriverValue:
    """Edge as a stream capture makes it: programmatic, or for all of the kernel before."""
    driver = import_driver()
    edge = driver.CUgraphEdgeData()  # zeros: a full dependency
    if successor.pdl:
        edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        kinds = driver.CUgraphDependencyType
        edge.type = int(kinds.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return edge


def _node_params(launch: BoundLaunch) -> DriverValue:
    driver, config = import_driver(), launch.config
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernel = params.kernel
    kernel.func = launch.function.handle
    kernel.kernelParams = launch.params.address
    for name in _LAUNCH_SIZES:
        setattr(kernel, name, getattr(config, name))
    return params


def _destroy(executable: DriverValue) -> None:
    """Destroy a graph; one that runs ends first, which the driver does not wait for."""
    with _despite_captures():
        import_driver().cuGraphExecDestroy(executable)


@cache
def _say_no_graph(reason: str) -> None:
    warnings.warn(
        f"Repeated layers cost more host time: kernels are launched one by one, not as a CUDA "
        f"graph ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )


class RepeatedLaunches:
    """Kernels on fixed addresses that come back: launched one by one at first, then as a graph.

    Threads may share it: the kernels of two runs never mix. A signal handler or finalizer may run
    it in the middle of a run of the same thread, which is then started over. If the driver refuses
    the graph, kernels are launched one by one for good, and a warning names its reason once.

    Parameters
    ----------
    device : int
        CUDA ordinal.
    bind : callable
        Binds the launches to a stream. They hold addresses: whoever enqueues keeps the arrays.
    """

    __slots__ = ("_bind", "_bound", "_device", "_graph", "_lock", "_refused", "_runs")

    def __init__(self, device: int, bind: Bind) -> None:
        self._device, self._bind = device, bind
        self._lock = RLock()
        self._runs = 0
        self._graph: LaunchGraph | None = None
        self._refused = False
        self._bound: tuple[int, Sequence[BoundLaunch]] = (-1, ())

    def prepare(self, stream: int) -> None:
        """Expect many runs: bind to a stream, and make the graph unless the stream is captured.

        Raises
        ------
        Exception
            What ``bind`` raises.
        """
        with self._lock, device_guard(self._device):
            launches = self._launches(stream)
            self._runs = _RUNS_BEFORE_GRAPH
            if _driver_has_dependent_graphs() and not stream_is_capturing(stream):
                self._make_graph(launches)

    def enqueue(self, stream: int) -> None:
        """Enqueue the kernels on a stream.

        Raises
        ------
        RuntimeError
            If the driver refuses a launch.
        Exception
            What ``bind`` raises.
        """
        with self._lock:
            if context_is_current(self._device):  # the usual case, without the cost of a guard
                self._enqueue(stream)
                return
            with device_guard(self._device):
                self._enqueue(stream)

    def _enqueue(self, stream: int) -> None:
        self._runs = run = self._runs + 1
        if run > _RUNS_BEFORE_GRAPH and not self._refused and self._graph_fits(stream):
            graph = self._graph or self._make_graph(self._launches(stream))
            if graph is not None:
                graph.enqueue(stream)
                return
        enqueue(self._launches(stream))
        if self._runs != run:  # another run came in between and has used the same scratch
            self._enqueue(stream)

    def _make_graph(self, launches: Sequence[BoundLaunch]) -> LaunchGraph | None:
        try:
            self._graph = LaunchGraph(self._device, launches)
        except RuntimeError as error:
            self._refused = True
            _say_no_graph(str(error))
        return self._graph

    def _graph_fits(self, stream: int) -> bool:
        """Whether a graph does what launches on the stream do.

        It would leave the multiprocessors of a green context, and be a graph inside of a graph
        during a capture.
        """
        return (
            _driver_has_dependent_graphs()
            and stream_is_primary(stream, self._device)
            and not stream_is_capturing(stream)
        )

    def _launches(self, stream: int) -> Sequence[BoundLaunch]:
        bound_stream, launches = self._bound
        if stream != bound_stream:
            launches = self._bind(stream)
            self._bound = (stream, launches)
        return launches


@cache
def _driver_launch() -> DriverValue:
    return import_driver().cuGraphLaunch
