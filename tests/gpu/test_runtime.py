"""Arrays of GPU libraries, launches, captures, threads."""

from __future__ import annotations

import gc
import resource
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.runtime import scratch
from cupy_moe.runtime.arrays import DTYPES, describe, from_numpy_like, to_numpy, to_xp
from cupy_moe.runtime.devices import compute_capability, device_guard, max_shared_memory
from cupy_moe.runtime.jit import load
from cupy_moe.runtime.scratch import allocate
from cupy_moe.runtime.streams import Event, stream_handle
from tests.gpu.probe_launch import launch_probe, probe_function
from tests.gpu_evidence import Evidence
from tests.probe import ProbeConfig
from tests.test_arrays import bit_patterns, raw

pytestmark = pytest.mark.gpu

N = 1000
X = np.arange(N, dtype=np.float32)
EXPECTED = X * 2 + 1


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


class Producer:
    """A library that only speaks DLPack; wraps a CUDA array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    @staticmethod
    def __array_namespace__() -> type[Namespace]:
        return Namespace


class Namespace:
    @staticmethod
    def from_dlpack(array: Any) -> Producer:
        import cupy

        return Producer(cupy.from_dlpack(array))


# --- arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "float4_e2m1fn_x2"])
def test_cupy_arrays(name: str, cupy: Any) -> None:
    expected = bit_patterns(DTYPES[name])
    made = from_numpy_like(describe(cupy.zeros(1)), expected)
    ref = describe(made)
    assert ref.owner is made
    assert (ref.ptr, ref.dtype, ref.shape) == (made.data.ptr, name, (6, 4))
    assert (ref.strides, ref.device, ref.framework.name) == ((4, 1), 0, "cupy")
    assert describe(made.T).strides == (1, 4)
    assert np.array_equal(raw(made.view(f"u{expected.itemsize}").get()), raw(expected))
    with pytest.raises(ValueError, match="is on cuda:0; copy it to the host"):
        to_numpy(ref)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "float4_e2m1fn"])
def test_torch_cuda_tensors_are_viewed_by_cupy(name: str, torch: Any) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    expected = bit_patterns(DTYPES[name])
    host = from_numpy_like(describe(torch.zeros(1)), expected)
    tensor = host.cuda() if name != "float4_e2m1fn_x2" else host.cuda().view(getattr(torch, name))
    ref = describe(tensor)
    assert (ref.ptr, ref.dtype, ref.device) == (tensor.data_ptr(), name, 0)
    array, restore = to_xp(tensor)
    assert array.data.ptr == tensor.data_ptr()
    assert array.dtype == DTYPES[name]
    assert np.array_equal(raw(array.view(f"u{expected.itemsize}").get()), raw(expected))
    restored = restore(array)
    assert restored.data_ptr() == tensor.data_ptr()
    assert restored.is_cuda


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])
def test_foreign_cuda_arrays(name: str, torch: Any) -> None:
    expected = bit_patterns(DTYPES[name])
    tensor = from_numpy_like(describe(torch.zeros(1, device="cuda")), expected)
    producer = Producer(tensor.T)
    ref = describe(producer)
    assert ref.owner is producer
    assert (ref.ptr, ref.dtype, ref.device) == (tensor.data_ptr(), name, 0)
    assert (ref.shape, ref.strides) == ((4, 6), (1, 4))
    view, _ = to_xp(producer)
    assert view.data.ptr == tensor.data_ptr()
    assert np.array_equal(raw(view.view(f"u{expected.itemsize}").get()), raw(expected.T))


def test_foreign_results_are_exported_after_the_launch(cupy: Any) -> None:
    framework = describe(Producer(cupy.zeros(1))).framework
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        result = framework.empty((N,), "float32", 0)
        assert framework.current_stream(0) == stream.ptr
        out = framework.view(result)
        launch_probe(probe_function(), cupy.asarray(X), out, stream=stream.ptr)
        owner = result.owner
        assert isinstance(owner, Producer)
        assert owner.array.data.ptr == result.ptr
        assert np.array_equal(owner.array.get(), EXPECTED)


def test_views_wait_for_the_stream_of_their_library(torch: Any, cupy: Any) -> None:
    producer, consumer = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    x = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(producer), consumer:
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        array, restore = to_xp(x)
        y = restore(array * 2)
        assert (y == 6.0).all().item()


# --- launches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [None, "compute_80"])
def test_launch(arch: str | None, cupy: Any) -> None:
    x, out = cupy.asarray(X), cupy.full(N + 1, np.nan, np.float32)
    function = probe_function(arch=arch)
    assert function is probe_function(arch=arch)
    launch_probe(function, x, out[:N], stream=cupy.cuda.get_current_stream().ptr)
    assert np.array_equal(out.get()[:N], EXPECTED)
    assert np.isnan(out.get()[N])


def test_launch_on_the_callers_stream(torch: Any) -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(N, device="cuda")
    out = torch.empty(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(torch.from_numpy(X))
        handle = describe(x).framework.current_stream(0)
        launch_probe(probe_function(), x, out, stream=handle)
        assert handle == stream.cuda_stream
        assert np.array_equal(out.cpu().numpy(), EXPECTED)


def test_launch_from_a_thread_that_never_used_the_gpu(cupy: Any) -> None:
    x, out = cupy.asarray(X), cupy.zeros(N, np.float32)
    cupy.cuda.Device().synchronize()
    states: list[Any] = []

    def work() -> None:
        from cuda.bindings import driver

        with device_guard(0):
            launch_probe(probe_function(), x, out)
        states.append(int(driver.cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert states == [0]  # the guard left nothing behind
    assert np.array_equal(out.get(), EXPECTED)


def test_threads_launch_at_once(cupy: Any) -> None:
    x = cupy.asarray(X)
    outs = cupy.zeros((8, 50, N), np.float32)
    cupy.cuda.Device().synchronize()

    def work(index: int) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        with device_guard(0):
            for step in range(50):
                offset = 100.0 * index + step
                out = outs[index, step]
                launch_probe(probe_function(), x, out, offset=offset, stream=stream.ptr)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    offsets = 100 * np.arange(8, dtype=np.float32)[:, None] + np.arange(50, dtype=np.float32)
    assert np.array_equal(outs.get(), EXPECTED + offsets[..., None])


def test_cluster(cupy: Any) -> None:
    if compute_capability(0) < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    size = cupy.zeros(1, np.uint32)
    launch_probe(probe_function(), cluster_size=size, num_blocks=8, cluster=4)
    assert size.get()[0] == 4
    with pytest.raises(RuntimeError, match=r"probe: launch of grid \(9, 1, 1\).*cluster 4"):
        launch_probe(probe_function(), num_blocks=9, cluster=4)


def chain(cupy: Any, *, pdl: bool, spin: int) -> tuple[Any, float]:
    """Result of two launches that spin before they touch memory, and the time of both in ms."""
    stream = cupy.cuda.Stream(non_blocking=True)
    x, middle, out = cupy.asarray(X), cupy.empty(N, np.float32), cupy.empty(N, np.float32)
    function = probe_function(early_launch=True)
    cupy.cuda.Device().synchronize()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    launch_probe(function, x, middle, spin_cycles=spin, stream=stream.ptr)
    launch_probe(function, middle, out, spin_cycles=spin, stream=stream.ptr, pdl=pdl)
    stop.record(stream)
    stream.synchronize()
    return out.get(), cupy.cuda.get_elapsed_time(start, stop)


def test_programmatic_dependent_launch_overlaps_and_stays_right(cupy: Any) -> None:
    if compute_capability(0) < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    spin = 4_000_000
    chain(cupy, pdl=True, spin=spin)
    plain = min(chain(cupy, pdl=False, spin=spin)[1] for _ in range(5))
    overlapped = min(chain(cupy, pdl=True, spin=spin)[1] for _ in range(5))
    assert overlapped < 0.75 * plain
    for _ in range(200):
        out, _ = chain(cupy, pdl=True, spin=20_000)
        assert np.array_equal(out, EXPECTED * 2 + 1)


def test_all_shared_memory_may_be_used(cupy: Any) -> None:
    out = cupy.zeros(N, np.float32)
    most = max_shared_memory(0)
    launch_probe(probe_function(), cupy.asarray(X), out, smem=most)
    assert np.array_equal(out.get(), EXPECTED)
    message = rf"probe: launch of grid .*{most + 1} B of shared memory.*CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(RuntimeError, match=message):
        launch_probe(probe_function(), None, out, smem=most + 1)


def test_memory_stays_flat(cupy: Any) -> None:
    out = cupy.zeros(N, np.float32)

    def work(count: int) -> int:
        for i in range(count):
            launch_probe(probe_function(), None, out, num_blocks=1 + i % 5000)
        cupy.cuda.Device().synchronize()
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = work(10_000)
    assert work(50_000) - before < 8 * 1024  # KiB


# --- captures ---------------------------------------------------------------------------------


def test_cupy_capture(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_captured", kept := [])
    framework = describe(cupy.zeros(1)).framework
    function = probe_function()
    stream = cupy.cuda.Stream(non_blocking=True)
    x, out = cupy.asarray(X), cupy.zeros(N, np.float32)
    cupy.cuda.Device().synchronize()
    with stream:
        assert not framework.is_capturing(0)
        stream.begin_capture()
        assert framework.is_capturing(0)
        middle = allocate(framework, 4 * N, 0)
        view = middle.owner.view(np.float32)
        launch_probe(function, x, view, stream=stream.ptr)
        launch_probe(function, view, out, stream=stream.ptr)
        message = "not loaded on cuda:0 yet.*once before the capture"
        with pytest.raises(RuntimeError, match=message):
            load(ProbeConfig(factor=-7.0).spec(), 0, capturing=framework.is_capturing(0))
        graph = stream.end_capture()
        assert kept == [middle]
        ptr = middle.ptr
        del middle, view
        kept_ptrs = [cupy.empty(4 * N, np.uint8).data.ptr for _ in range(10)]
        assert ptr not in kept_ptrs  # not handed out again while the graph can replay
        for value in (0.0, 5.0):
            x[:] = cupy.asarray(X + value)
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(out.get(), ((X + value) * 2 + 1) * 2 + 1)
        allocate(framework, 16, 0)
    assert len(kept) == 1  # eager calls keep nothing


def test_torch_capture(torch: Any) -> None:
    x, out = torch.from_numpy(X).cuda(), torch.zeros(N, device="cuda")
    framework = describe(x).framework
    function = probe_function()
    assert not framework.is_capturing(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert framework.is_capturing(0)
        middle = allocate(framework, 4 * N, 0).owner.view(torch.float32)
        stream = framework.current_stream(0)
        launch_probe(function, x, middle, stream=stream)
        launch_probe(function, middle, out, stream=stream)
        del middle
    assert not scratch._captured or scratch._captured[-1].framework is not framework
    torch.empty(4 * N, device="cuda", dtype=torch.uint8).fill_(0xFF)
    for value in (0.0, 5.0):
        x.copy_(torch.from_numpy(X + value))
        graph.replay()
        assert np.array_equal(out.cpu().numpy(), ((X + value) * 2 + 1) * 2 + 1)


# --- streams ----------------------------------------------------------------------------------


def test_stream_handles_of_every_library(torch: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    assert stream_handle(stream) == stream.ptr
    assert stream_handle(torch.cuda.ExternalStream(stream.ptr)) == stream.ptr
    assert stream_handle(stream.ptr) == stream.ptr
    core = pytest.importorskip("cuda.core")
    assert stream_handle(core.Stream.from_handle(stream.ptr)) == stream.ptr
    assert stream_handle(cupy.cuda.Stream.null) == 0
    with pytest.raises(TypeError, match=r"op: streams: expected a CUDA stream.*got str"):
        stream_handle("0", "op: streams")


def test_events_order_streams(cupy: Any) -> None:
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x, middle, out = cupy.asarray(X), cupy.zeros(N, np.float32), cupy.zeros(N, np.float32)
    cupy.cuda.Device().synchronize()
    event = Event(0)
    launch_probe(probe_function(), x, middle, spin_cycles=20_000_000, stream=first.ptr)
    event.record(first.ptr)
    event.block(second.ptr)
    launch_probe(probe_function(), middle, out, stream=second.ptr)
    second.synchronize()
    event.close()
    event.close()
    assert np.array_equal(out.get(), EXPECTED * 2 + 1)


# --- host costs -------------------------------------------------------------------------------


def microseconds(function: Any, repeats: int = 20_000) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def test_host_costs(torch: Any, cupy: Any, evidence: Evidence) -> None:
    tensor = torch.zeros((128, 64), dtype=torch.bfloat16, device="cuda")
    array = cupy.zeros((128, 64), np.float32).view(np.float32)
    function, framework = probe_function(), describe(tensor).framework
    spec = ProbeConfig(num_threads=128).spec()
    costs = {
        "describe_torch_us": microseconds(lambda: describe(tensor)),
        "describe_cupy_us": microseconds(lambda: describe(array)),
        "current_stream_torch_us": microseconds(lambda: framework.current_stream(0)),
        "is_capturing_torch_us": microseconds(lambda: framework.is_capturing(0)),
        "load_cached_us": microseconds(lambda: load(spec, 0)),
        "pack_and_launch_us": microseconds(lambda: launch_probe(function, num_blocks=1), 1000),
    }
    torch.cuda.synchronize()
    evidence.benchmark("runtime host costs", costs)
    assert costs["describe_torch_us"] < 5
    assert costs["describe_cupy_us"] < 5
    assert costs["pack_and_launch_us"] < 30


def test_bfloat16_results_reach_cupy_arithmetic_as_bits(cupy: Any) -> None:
    ref = describe(cupy.zeros(1)).framework.empty((4,), "bfloat16", 0)
    ref.owner.view(np.uint16)[...] = 0x3FC0
    assert (ref.owner.get() == np.array(1.5, ml_dtypes.bfloat16)).all()
