"""What the GPU tests share: calls in every array library, layers, capture, poisoned memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from cupy_moe.fused_moe import (
    plan_fp8_per_tensor_scale_moe,
    plan_fp8_per_tensor_scale_routed_moe,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from cupy_moe.kernels.gemm_tiles import MainloopKind, mainloop_for
from cupy_moe.runtime.arrays import describe
from cupy_moe.runtime.devices import compute_capability
from cupy_moe.runtime.jit import arch_for
from cupy_moe.testing.compare import (
    FP8_TIER_A,
    FP8_TIER_A_GEGLU,
    FP8_TIER_B,
    Tolerance,
    to_host,
)
from cupy_moe.testing.inputs import (
    Fp8Layer,
    make_fp8_layer,
    make_hidden_states,
    make_topk,
    move_arguments,
    to_library,
)
from cupy_moe.types import ActivationType

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "cupy")
BF16 = ml_dtypes.bfloat16

routed_moe = trtllm_fp8_per_tensor_scale_routed_moe
logits_moe = trtllm_fp8_per_tensor_scale_moe
plan_routed_moe = plan_fp8_per_tensor_scale_routed_moe
plan_logits_moe = plan_fp8_per_tensor_scale_moe


# --- calls ------------------------------------------------------------------------------------


def tolerance_of(arguments: dict[str, Any], *, portable: bool = False) -> Tolerance:
    """Bounds for this GPU's kernels, or for the portable ones with their FP32-accurate sums."""
    if not portable and mainloop_for(arch_for(compute_capability(0))) is MainloopKind.Wgmma:
        return FP8_TIER_B
    is_geglu = arguments["activation_type"] == ActivationType.Geglu
    return FP8_TIER_A_GEGLU if is_geglu else FP8_TIER_A


def reference(arguments: dict[str, Any]) -> np.ndarray:
    """Output of the NumPy backend for the same arguments."""
    written = ("output", "routing_replay_out", "workspace_buffer")
    inputs = {name: value for name, value in arguments.items() if name not in written}
    return np.asarray(routed_moe(**move_arguments(inputs, "numpy")))


def torch_oracle(arguments: dict[str, Any]) -> np.ndarray:
    """Output of the float64 oracle on the GPU, for sizes that the NumPy backend is too slow for."""
    from tests.gpu import oracle  # needs torch

    return to_host(oracle.fp8_moe(move_arguments(arguments, "torch")))


@lru_cache(maxsize=8)
def small_layer(
    activation: ActivationType = ActivationType.Swiglu, num_experts: int = 4, seed: int = 1
) -> Fp8Layer:
    """Hidden size 256, intermediate size 384, in host memory."""
    return make_fp8_layer(
        hidden_size=256,
        intermediate_size=384,
        num_experts=num_experts,
        activation=activation,
        seed=seed,
    )


def small_arguments(num_tokens: int, *, seed: int = 0, **topk: Any) -> dict[str, Any]:
    """Arguments (NumPy) of a call of the small layer with two of four experts a token."""
    layer = small_layer()
    routing = make_topk(num_tokens, topk.pop("top_k", 2), layer.num_experts, seed=seed, **topk)
    return layer.arguments(make_hidden_states(num_tokens, layer.hidden_size, seed), routing)


def full(shape: tuple[int, ...], value: float, dtype: Any, library: str) -> Any:
    """Array of one value; BF16 NaN is how outputs are poisoned."""
    return to_library(np.full(shape, value, dtype), library)


def overwrite(destination: Any, source: Any) -> None:
    """Copy equal-sized bytes into an array of torch or CuPy on its library's current stream."""
    if type(destination).__module__.startswith("torch"):
        import torch

        destination.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        destination.view(np.uint8)[...] = source.view(np.uint8)


def overwrite_arguments(destination: dict[str, Any], source: dict[str, Any]) -> None:
    """Overwrite the data of one call, hidden states and routing, with that of another."""
    for name in ("hidden_states", "topk_ids"):
        old, new = destination[name], source[name]
        pairs = zip(old, new, strict=True) if isinstance(old, tuple) else [(old, new)]
        for old_part, new_part in pairs:
            overwrite(old_part, new_part)


def data_pointer(array: Any) -> int:
    """Address of an array of any library."""
    return describe(array).ptr


def synchronize() -> None:
    """Wait for the device."""
    import cupy

    cupy.cuda.Device().synchronize()


# --- streams and graphs -----------------------------------------------------------------------


@contextmanager
def side_stream(library: str) -> Iterator[Any]:
    """Make a new non-blocking stream the current one; synchronizes at the end."""
    synchronize()
    if library == "torch":
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield stream
    else:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            yield stream
    stream.synchronize()


def capture(library: str, work: Callable[[], None]) -> Callable[[], None]:
    """Run ``work`` once eagerly, capture it on the same stream, return a synchronous replay."""
    if library == "torch":
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return replay
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    synchronize()
    with stream:
        work()
        stream.synchronize()
        stream.begin_capture()
        work()
        captured = stream.end_capture()

    def replay_cupy() -> None:
        synchronize()
        captured.launch(stream)
        stream.synchronize()

    return replay_cupy


def delay(cycles: int = 20_000_000) -> None:
    """Keep torch's current stream busy for about 10 ms, so that unordered work would overtake."""
    import torch

    torch.cuda._sleep(cycles)


# --- code paths -------------------------------------------------------------------------------


def _package_modules() -> list[ModuleType]:
    return [m for name, m in sys.modules.items() if name.partition(".")[0] == "cupy_moe"]


def _forget_loaded_kernels() -> None:
    """Clear whatever the package remembers between calls, so that kernels are looked up again."""
    for module in _package_modules():
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and not isinstance(value, type):
                value.cache_clear()


_portable_functions: dict[Any, Any] = {}


@contextmanager
def portable_code() -> Iterator[None]:
    """Run PTX of the oldest supported architecture, which the driver translates for this GPU."""
    from cupy_moe import pipeline
    from cupy_moe.runtime import jit

    assert pipeline.load is jit.load
    with ExitStack() as patches:
        for module in _package_modules():
            if hasattr(module, "arch_for"):
                oldest = mock.patch.object(module, "arch_for", return_value="compute_80")
                patches.enter_context(oldest)
        functions = patches.enter_context(
            mock.patch.dict(jit._functions, _portable_functions, clear=True)
        )
        _forget_loaded_kernels()
        try:
            yield
            assert functions, "the kernels came from somewhere else"
        finally:
            _portable_functions.update(functions)  # translated once for all tests
            _forget_loaded_kernels()


# --- memory -----------------------------------------------------------------------------------


@contextmanager
def poisoned_allocations(library: str, byte: int = 0xFF) -> Iterator[None]:
    """Fill every block that the library's allocator hands out; torch knows 0xFF (NaN) only."""
    if library == "torch":
        import torch

        assert byte == 0xFF, "torch fills uninitialized memory with NaN and 0xFF"
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(64, device="cuda").isnan().all()
            yield
        finally:
            torch.use_deterministic_algorithms(before)
        return
    import cupy

    allocate = cupy.get_default_memory_pool().malloc

    def allocate_poisoned(size: int) -> Any:
        block = allocate(size)
        if size:
            block.memset_async(byte, size)
        return block

    with cupy.cuda.using_allocator(allocate_poisoned):
        assert (cupy.empty(64, np.uint8) == byte).all()
        yield


# --- processes --------------------------------------------------------------------------------


def run_python(code: str, *command: str, timeout: float = 120, **env: str) -> str:
    """Run a program in a fresh interpreter and return what it printed; fail if it failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    result = subprocess.run(
        [*command, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    output = f"{result.stdout}\n{result.stderr}"
    assert result.returncode == 0, f"exit code {result.returncode}\n{output}"
    return output


def run_in_threads(*works: Callable[[], None]) -> None:
    """Run at the same time; raises if one of them did."""
    wrong: list[str] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def host_copies(arrays: Any) -> list[np.ndarray]:
    """Host copies of the arrays that a call returned, one or several."""
    return [to_host(a).copy() for a in (arrays if isinstance(arrays, list) else [arrays])]
