"""Time the contenders of one layer on one batch, or on all batches of all workloads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cupy_moe.bench.ceilings import Ceilings
from cupy_moe.bench.contenders import Contender, CupyMoe, installed
from cupy_moe.bench.layers import Batch, BenchLayer
from cupy_moe.bench.rows import OURS, Row, Timing
from cupy_moe.bench.timing import (
    CapturedCalls,
    capture,
    free_memory,
    gpu_works,
    interleaved_us,
    sustained_us,
    synchronize,
)
from cupy_moe.bench.torch_layer import layer_output, tokens_to_check
from cupy_moe.runtime import require_gpu
from cupy_moe.runtime.compiler import nvrtc_version
from cupy_moe.runtime.devices import driver_cuda_version
from cupy_moe.runtime.requirements import import_cupy

__all__ = [
    "describe_environment",
    "measure",
    "measure_all",
    "require_fp8_gpu",
    "require_torch_gpu",
]

SMALLEST_NORM = 1e-30  # zeros are equal to zeros, and far from everything else


def require_torch_gpu() -> None:
    """Check that benchmarks can run here.

    Raises
    ------
    RuntimeError
        Says whether a GPU or torch with CUDA are missing.
    """
    require_gpu()
    try:
        import torch
    except ImportError as error:
        raise RuntimeError('bench needs torch: pip install "cupy-moe[bench]"') from error
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"bench: torch {torch.__version__} sees no CUDA device; install a build of torch for "
            "the CUDA version of this driver."
        )


def require_fp8_gpu() -> None:
    """As `require_torch_gpu`, and the GPU must have FP8 tensor cores."""
    require_torch_gpu()
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        raise RuntimeError(
            "bench fp8 measures the FP8 tensor cores of compute capability 8.9 and newer; this GPU "
            f"has {capability[0]}.{capability[1]}."
        )


def describe_environment(contenders: Sequence[type[Contender]]) -> dict[str, str]:
    """GPU and versions that the times depend on."""
    import torch

    packages = dict.fromkeys(["torch", *(contender.package for contender in contenders)])
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver_cuda": driver_cuda_version(),
        "nvrtc": nvrtc_version(),
        "cupy": import_cupy().__version__,
        "torch_cuda": str(torch.version.cuda),
        **{package: installed(package) or "absent" for package in packages},
    }


def measure_all(
    layers: Iterable[Callable[[], BenchLayer]],
    tokens: Sequence[int],
    peers_of: Callable[[BenchLayer], Sequence[type[Contender]]],
    ceilings: Ceilings,
    replays: int,
) -> Iterator[Row]:
    """Rows in order; one layer is made, and in memory, at a time."""
    for make in layers:
        yield from _measure_layer(make(), tokens, peers_of, ceilings, replays)
        free_memory()


def _measure_layer(
    layer: BenchLayer,
    tokens: Sequence[int],
    peers_of: Callable[[BenchLayer], Sequence[type[Contender]]],
    ceilings: Ceilings,
    replays: int,
) -> Iterator[Row]:
    loaded, failures = _load(peers_of(layer), layer)
    free_memory()
    for num_tokens in tokens:
        batch = layer.batch(num_tokens)
        yield measure(layer, batch, ceilings, replays=replays, peers=loaded, failures=failures)
        free_memory()


def _load(
    peers: Sequence[type[Contender]], layer: BenchLayer
) -> tuple[list[Contender], dict[str, str]]:
    loaded, failures = [], {}
    for peer in peers:
        try:
            loaded.append(peer(layer))
        except Exception as error:
            what = f"bench: {layer.name}, weights: {peer.name}"
            failures[peer.name] = _reason(error, what)
    return loaded, failures


def measure(
    layer: BenchLayer,
    batch: Batch,
    ceilings: Ceilings,
    *,
    replays: int,
    peers: Sequence[Contender] = (),
    failures: dict[str, str] | None = None,
    sustained: bool = True,
) -> Row:
    """Time this package and the peers on one batch.

    Our output of a few tokens of the last call is held to a computation in torch, so that it is a
    peer that is wrong where the two are far from each other.

    Parameters
    ----------
    layer : BenchLayer
    batch : Batch
    ceilings : Ceilings
    replays : int
        Of every contender's graph, taking turns, each after a rest.
    peers : sequence of Contender
        Loaded with the layer. One that raises, or whose output before or after the timed replays
        is too far from ours, has no time.
    failures : dict, optional
        Peers that could not even be loaded, and why.
    sustained : bool
        Whether ours is timed back to back, too.

    Raises
    ------
    RuntimeError
        We fail, our output is not finite, is too far from torch's or changes, or somebody's error
        leaves a GPU that this process cannot use any more. Names the row and the contender.
    """
    row = f"bench: {layer.name}, {batch.num_tokens} tokens"
    limit = layer.largest_rel_l2
    ours, expected = _capture_ours(layer, batch, row)
    graphs, errors, failed = _capture_peers(peers, batch, expected, limit, row)
    graphs = {OURS: ours, **graphs}
    try:
        times = interleaved_us({name: graph.replay for name, graph in graphs.items()}, replays)
        settled_us = sustained_us(ours.replay, replays) if sustained else None
    except RuntimeError as error:
        raise RuntimeError(f"{row}: timing {', '.join(graphs)}: {_sentence(error)}") from error
    checked = {name: graph for name, graph in graphs.items() if name in (OURS, *errors)}
    distances = {name: _distance(graph.results, expected) for name, graph in checked.items()}
    changed = _too_far(distances, limit, "our output after the timed replays")
    if OURS in changed:
        raise RuntimeError(f"{row}: {OURS}: {changed[OURS]}")
    num_calls = len(batch.routings)
    return Row(
        workload=layer.workload,
        mode=layer.mode,
        form=layer.form,
        num_tokens=batch.num_tokens,
        num_calls=num_calls,
        work=batch.work,
        read_us=ceilings.read_us(batch.work),
        floor_us=ceilings.floor_us(batch.work),
        timings={n: Timing.of(us, num_calls) for n, us in times.items() if n not in changed},
        sustained_us=None if settled_us is None else settled_us / num_calls,
        errors=errors,
        failures={**(failures or {}), **failed, **changed},
    )


def _capture_ours(layer: BenchLayer, batch: Batch, row: str) -> tuple[CapturedCalls, list[Any]]:
    """Our calls, and copies of their checked outputs, which peers are held to."""
    try:
        captured = _captured(CupyMoe(layer), batch)
        expected = [output.clone() for output in _answers(captured)]
        distance = _distance_from_torch(layer, batch, expected[-1])
    except Exception as error:
        raise RuntimeError(f"{row}: {OURS}: {_sentence(error)}") from error
    if not all(bool(output.isfinite().all()) for output in expected):
        raise RuntimeError(f"{row}: {OURS}: the output is not finite.")
    if wrong := _too_far({OURS: distance}, layer.largest_rel_l2, "the layer in torch"):
        raise RuntimeError(f"{row}: {OURS}: {wrong[OURS]}")
    return captured, expected


def _distance_from_torch(layer: BenchLayer, batch: Batch, output: Any) -> float:
    """Relative L2 distance of a few tokens of the last call's output."""
    ids = batch.routings[-1]
    tokens = tokens_to_check(layer.workload, ids)
    expected = layer_output(layer, batch.hidden, ids, batch.weights, tokens)
    return _rel_l2(output[tokens], expected)


def _capture_peers(
    peers: Sequence[Contender], batch: Batch, expected: Sequence[Any], limit: float, row: str
) -> tuple[dict[str, CapturedCalls], dict[str, float], dict[str, str]]:
    """Graphs of the peers that answer rightly, distances from our output, reasons of the others."""
    graphs, errors, failures = {}, {}, {}
    for peer in peers:
        try:
            graphs[peer.name] = _captured(peer, batch)
            if peer.whole_layer:
                errors[peer.name] = _distance(_answers(graphs[peer.name]), expected)
        except Exception as error:  # whatever another package raises is its result here
            failures[peer.name] = _reason(error, f"{row}: {peer.name}")
    failures |= _too_far(errors, limit, "our output")
    return {name: g for name, g in graphs.items() if name not in failures}, errors, failures


def _reason(error: Exception, what: str) -> str:
    """Sentence for the report; raised, with what failed, if the GPU does not survive the error."""
    if not gpu_works():
        raise RuntimeError(f"{what}: {_sentence(error)}") from error
    return _sentence(error)


def _captured(contender: Contender, batch: Batch) -> CapturedCalls:
    """Graph of one call for each routing, replayed once: an error belongs to this contender."""
    calls = [contender.prepare(batch.hidden, ids, batch.weights) for ids in batch.routings]
    captured = capture(calls)
    captured.replay()
    synchronize()
    return captured


def _answers(captured: CapturedCalls) -> list[Any]:
    """Replay into outputs of NaN, so that one which is not written is noticed."""
    for output in captured.results:
        output.fill_(math.nan)
    captured.replay()
    return captured.results


def _distance(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest relative L2 distance of a call's output; infinite if one is not a number."""
    return max(_rel_l2(*pair) for pair in zip(outputs, expected, strict=True))


def _too_far(distances: Mapping[str, float], limit: float, what: str) -> dict[str, str]:
    """Say of each contender beyond the limit how far it is from what."""
    return {
        name: f"relative L2 distance from {what}: {distance:.3g}"
        for name, distance in distances.items()
        if distance > limit
    }


def _rel_l2(out: Any, ref: Any) -> float:
    ref = ref.float()
    error = float((out.float() - ref).norm() / ref.norm().clamp_min(SMALLEST_NORM))
    return math.inf if math.isnan(error) else error


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
