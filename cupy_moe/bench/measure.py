"""Time the contenders of one layer on one batch, or on all batches of all workloads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from cupy_moe.bench.ceilings import Ceilings
from cupy_moe.bench.contenders import Contender, CupyMoe, installed
from cupy_moe.bench.layers import Batch, BenchLayer, make_batch, make_layer
from cupy_moe.bench.rows import OURS, Row, Timing
from cupy_moe.bench.timing import capture, free_memory, interleaved_us
from cupy_moe.bench.workloads import Workload
from cupy_moe.runtime import require_gpu

__all__ = ["LARGEST_REL_L2", "describe_environment", "measure", "measure_all", "require_fp8_gpu"]

# Correct implementations round the intermediate and the output alike up to single codes; a wrong
# layout, order or scale moves the output by a third of its norm and more.
LARGEST_REL_L2 = 0.1


def require_fp8_gpu() -> None:
    """Check that benchmarks can run here.

    Raises
    ------
    RuntimeError
        Says whether a GPU, its FP8 tensor cores or torch with CUDA are missing.
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
        "torch_cuda": str(torch.version.cuda),
        **{package: installed(package) or "absent" for package in packages},
    }


def measure_all(
    workloads: Sequence[Workload],
    tokens: Sequence[int],
    peers: Sequence[type[Contender]],
    ceilings: Ceilings,
    replays: int,
) -> Iterator[Row]:
    """Rows in order; one layer is in memory at a time."""
    for workload in workloads:
        yield from _measure_workload(workload, tokens, peers, ceilings, replays)
        free_memory()


def _measure_workload(
    workload: Workload,
    tokens: Sequence[int],
    peers: Sequence[type[Contender]],
    ceilings: Ceilings,
    replays: int,
) -> Iterator[Row]:
    layer = make_layer(workload)
    loaded, failures = _load(peers, layer)
    for num_tokens in tokens:
        batch = make_batch(workload, num_tokens)
        yield measure(layer, batch, ceilings, replays=replays, peers=loaded, failures=failures)
        free_memory()


def _load(
    peers: Sequence[type[Contender]], layer: BenchLayer
) -> tuple[list[Contender], dict[str, str]]:
    loaded, failures = [], {}
    for peer in peers:
        try:
            loaded.append(peer(layer))
        except Exception as error:  # whatever another package raises is its result here
            failures[peer.name] = _sentence(error)
    return loaded, failures


def measure(
    layer: BenchLayer,
    batch: Batch,
    ceilings: Ceilings,
    *,
    replays: int,
    peers: Sequence[Contender] = (),
    failures: dict[str, str] | None = None,
) -> Row:
    """Time this package and the peers on one batch.

    Parameters
    ----------
    layer : BenchLayer
    batch : Batch
    ceilings : Ceilings
    replays : int
        Of every contender's graph, taking turns; three more come before.
    peers : sequence of Contender
        Loaded with the layer. One that raises, or whose output is too far from ours, is not timed.
    failures : dict, optional
        Peers that could not even be loaded, and why.

    Raises
    ------
    RuntimeError
        Our own output is not finite.
    """
    graph, results = _captured(CupyMoe(layer), batch)
    graph.replay()
    ours = results[-1]
    if not bool(ours.isfinite().all()):
        raise RuntimeError(f"bench: {layer.workload.key}, {batch.num_tokens} tokens: not finite.")
    graphs, errors, failures = {OURS: graph}, {}, dict(failures or {})
    for peer in peers:
        try:
            graph, results = _captured(peer, batch)
            if peer.whole_layer:
                graph.replay()
                errors[peer.name] = _rel_l2(results[-1], ours)
        except Exception as error:
            failures[peer.name] = _sentence(error)
            continue
        if not errors.get(peer.name, 0.0) <= LARGEST_REL_L2:
            failures[peer.name] = f"relative L2 distance from our output: {errors[peer.name]:.3g}"
            continue
        graphs[peer.name] = graph
    times = interleaved_us({name: g.replay for name, g in graphs.items()}, replays)
    num_calls = len(batch.routings)
    return Row(
        workload=layer.workload,
        num_tokens=batch.num_tokens,
        num_calls=num_calls,
        work=batch.work,
        floor_us=ceilings.floor_us(batch.work.num_bytes, batch.work.flops),
        timings={name: Timing.of(us, num_calls) for name, us in times.items()},
        errors=errors,
        failures=failures,
    )


def _captured(contender: Contender, batch: Batch) -> tuple[Any, list[Any]]:
    return capture([contender.prepare(batch.hidden, ids, batch.weights) for ids in batch.routings])


def _rel_l2(out: Any, ref: Any) -> float:
    ref = ref.float()
    error = float((out.float() - ref).norm() / ref.norm())
    return math.inf if math.isnan(error) else error


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
