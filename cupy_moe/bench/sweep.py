"""Times of a layer by tiling, back to back: the table behind the plan's choice.

Every tiling of a sensible token tile runs a few times; those near the fastest run again, taking
turns with the plan's own choice, so that close calls are decided under equal clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from cupy_moe.bench.contenders import CupyMoe
from cupy_moe.bench.layers import Batch, BenchLayer
from cupy_moe.bench.timing import capture, free_memory, interleaved_us
from cupy_moe.bench.workloads import Workload
from cupy_moe.pipeline import tiled_as
from cupy_moe.problem import DeviceTraits, MoeProblem, RoutingSource, Strategy
from cupy_moe.runtime.compiler import arch_for
from cupy_moe.runtime.devices import compute_capability, sm_count
from cupy_moe.tiling import Tiling, tile_candidates
from cupy_moe.types import ActivationType, MoeFormat, RoutingMethodType

__all__ = ["SweepRow", "fastest_first", "problem_of", "sweep"]

QUICK_REPLAYS = 2
# Slower than the fastest by more than this in the quick round: not timed again.
CLOSE = 1.15
MOST_TILES_AN_EXPERT = 4


@dataclass(frozen=True)
class SweepRow:
    """One tiling of one layer at one number of tokens.

    Attributes
    ----------
    layer : str
        Its name.
    num_tokens : int
    tiling : Tiling
    us : float
        Median of a call.
    us_of_choice : float or None
        The plan's choice in the same turns; None if the quick round ruled the tiling out.
    """

    layer: str
    num_tokens: int
    tiling: Tiling
    us: float
    us_of_choice: float | None

    @property
    def ratio(self) -> float | None:
        """Time over that of the plan's choice: below 1 the choice can be improved."""
        return None if self.us_of_choice is None else self.us / self.us_of_choice

    def as_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "layer": self.layer,
            "tokens": self.num_tokens,
            "tiling": str(self.tiling),
            "us": self.us,
            "us_of_choice": self.us_of_choice,
        }


def problem_of(
    workload: Workload,
    num_tokens: int,
    mode: str = "fp8",
    form: str = "whole",
    partition_sms: tuple[int, ...] = (),
) -> MoeProblem:
    """Problem of a benchmark's call, as far as it matters for tiles; its output is finalized."""
    moe_format = MoeFormat(mode)
    return MoeProblem(
        num_tokens=num_tokens,
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_experts=workload.num_experts,
        top_k=workload.top_k,
        local_num_experts=workload.local_num_experts,
        local_expert_offset=0,
        activation=ActivationType.Swiglu,
        routing_source=(
            RoutingSource.Unpacked if moe_format.has_block_scales else RoutingSource.Packed
        ),
        expert_weights_dtype="bfloat16",
        scale_input=False,
        do_finalize=True,
        routing_method=RoutingMethodType.Unspecified,
        num_groups=0,
        topk_group=0,
        norm_topk_prob=True,
        logits_dtype=None,
        bias_dtype=None,
        moe_format=moe_format,
        strategy=None if form == "whole" else cast(Strategy, form),
        partition_sms=partition_sms,
    )


def sensible_candidates(problem: MoeProblem, device: DeviceTraits) -> list[Tiling]:
    """List all tilings but those that read an expert's weights more often than they have to.

    The largest token tile stays, however many rows an expert has.
    """
    candidates = tile_candidates(problem, device)
    largest = max(tiling.tile_n for tiling in candidates)
    rows_an_expert = problem.num_slots / problem.num_experts
    least = min(largest, rows_an_expert / MOST_TILES_AN_EXPERT)
    return [tiling for tiling in candidates if tiling.tile_n >= least]


def sweep(
    layers: Iterable[Callable[[], BenchLayer]], tokens: Sequence[int], replays: int
) -> Iterator[list[SweepRow]]:
    """Rows of one layer and number of tokens at a time, fastest first."""
    for make in layers:
        yield from _sweep_layer(make(), tokens, replays)
        free_memory()


def _sweep_layer(
    layer: BenchLayer, tokens: Sequence[int], replays: int
) -> Iterator[list[SweepRow]]:
    device = DeviceTraits(arch_for(compute_capability(0)), sm_count(0))
    for num_tokens in tokens:
        kind = layer.mode, layer.form, layer.partition_sms
        problem = problem_of(layer.workload, num_tokens, *kind)
        candidates = sensible_candidates(problem, device)
        yield _sweep_batch(layer, layer.batch(num_tokens), candidates, replays)
        free_memory()


def _sweep_batch(
    layer: BenchLayer, batch: Batch, candidates: Sequence[Tiling], replays: int
) -> list[SweepRow]:
    ours = CupyMoe(layer)
    calls = [ours.prepare(batch.hidden, ids, batch.weights) for ids in batch.routings]

    def graph(tiling: Tiling | None) -> Any:
        if tiling is None:
            return capture(calls)
        with tiled_as(tiling):
            return capture(calls)

    choice = graph(None)
    quick = {
        tiling: _us({"": graph(tiling).replay}, QUICK_REPLAYS, len(calls))[""]
        for tiling in candidates
    }
    limit = CLOSE * min(quick.values())

    def row(tiling: Tiling) -> SweepRow:
        us, us_of_choice = quick[tiling], None
        if us <= limit:
            turns = {"tiling": graph(tiling).replay, "choice": choice.replay}
            times = _us(turns, replays, len(calls))
            us, us_of_choice = times["tiling"], times["choice"]
        return SweepRow(layer.name, batch.num_tokens, tiling, us, us_of_choice)

    return fastest_first(row(tiling) for tiling in candidates)


def _us(works: dict[str, Any], replays: int, num_calls: int) -> dict[str, float]:
    times = interleaved_us(works, replays, rest_s=0.0)
    return {name: median(us) / num_calls for name, us in times.items()}


def fastest_first(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Order by the ratio to the plan's choice, then those that the quick round ruled out."""
    return sorted(rows, key=lambda row: (row.ratio is None, row.ratio or row.us))
