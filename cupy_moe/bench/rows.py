"""One measured line, everything that is derived from it, and the report of a whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cupy_moe.bench.ceilings import Ceilings
from cupy_moe.bench.workloads import Work, Workload

__all__ = ["OURS", "Report", "Row", "Timing"]

OURS = "cupy_moe"


@dataclass(frozen=True)
class Timing:
    """Microseconds a call after a rest: median, least and most of the replays."""

    us: float
    us_min: float
    us_max: float

    @classmethod
    def of(cls, graph_us: Sequence[float], num_calls: int) -> Timing:
        """Share the times of a graph among its equal calls."""
        us = [t / num_calls for t in graph_us]
        return cls(median(us), min(us), max(us))


@dataclass(frozen=True)
class Row:
    """A layer at one number of tokens.

    Attributes
    ----------
    workload : Workload
    mode, form : str
        Number formats, and ``whole`` or how two partitions of the GPU share the layer.
    num_tokens, num_calls : int
        Of a call, and calls in the graph.
    work : Work
    read_us, floor_us : float
        What the ceilings allow for the bytes of that work, and for all of it.
    timings : mapping of str to Timing
        By name of the contender.
    sustained_us : float or None
        Our median time back to back, once the clocks have settled, if it was measured.
    errors : mapping of str to float
        Relative L2 distance of a peer's output from ours.
    failures : mapping of str to str
        Peers that were asked for and have no time here, and why.
    """

    workload: Workload
    mode: str
    form: str
    num_tokens: int
    num_calls: int
    work: Work
    read_us: float
    floor_us: float
    timings: Mapping[str, Timing]
    sustained_us: float | None
    errors: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def title(self) -> str:
        """Name the layer: rows of equal titles make a table."""
        formats = "FP8" if self.mode == "fp8" else f"FP4, {self.mode}"
        form = "" if self.form == "whole" else f", in two partitions {self.form}"
        return f"{self.workload.key}: {self.workload.model}, {self.workload.title}, {formats}{form}"

    @property
    def us(self) -> float:
        """Our median time."""
        return self.timings[OURS].us

    @property
    def tb_per_s(self) -> float:
        """Our rate over the bytes of the experts hit, hidden states and output."""
        return self.work.num_bytes / self.us / 1e6

    @property
    def tflops(self) -> float:
        """Our rate over the assignments' multiplications and additions."""
        return self.work.flops / self.us / 1e6

    def share_of_floor(self, name: str = OURS) -> float:
        """Floor over time: 1 is as fast as the ceilings allow."""
        return self.floor_us / self.timings[name].us

    @property
    def share_of_read(self) -> float:
        """Time that reading the bytes takes alone, over ours."""
        return self.read_us / self.us

    def ratio(self, peer: str) -> float:
        """Divide a peer's time by ours: above 1 we are faster."""
        return self.timings[peer].us / self.us

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, units in the keys."""
        peers = [name for name in self.timings if name != OURS]
        return {
            "workload": self.workload.key,
            "sizes": self.workload.title,
            "mode": self.mode,
            "form": self.form,
            "tokens": self.num_tokens,
            "calls_in_graph": self.num_calls,
            "experts_hit": self.work.experts_hit,
            "assignments": self.work.assignments,
            "bytes": self.work.num_bytes,
            "flops": self.work.flops,
            "floor_us": self.floor_us,
            "us": self.us,
            "us_min": self.timings[OURS].us_min,
            "us_max": self.timings[OURS].us_max,
            "sustained_us": self.sustained_us,
            "tb_per_s": self.tb_per_s,
            "tflops": self.tflops,
            "share_of_floor": self.share_of_floor(),
            "share_of_read": self.share_of_read,
            "peers": {
                name: {
                    "us": self.timings[name].us,
                    "us_min": self.timings[name].us_min,
                    "us_max": self.timings[name].us_max,
                    "share_of_floor": self.share_of_floor(name),
                    "us_over_ours": self.ratio(name),
                    "rel_l2_from_ours": self.errors.get(name),
                }
                for name in peers
            },
            "failures": dict(self.failures),
        }


@dataclass(frozen=True)
class Report:
    """A run: where, what bounds it, who took part and why others did not.

    Attributes
    ----------
    environment : mapping of str to str
        GPU and versions.
    ceilings : Ceilings
    scopes, missing : mapping of str to str
        By name: what is timed of each contender; why a peer cannot run here.
    rows : sequence of Row
    remarks : sequence of str
        Sentences on what was left out.
    """

    environment: Mapping[str, str]
    ceilings: Ceilings
    scopes: Mapping[str, str]
    missing: Mapping[str, str]
    rows: Sequence[Row]
    remarks: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything that the JSON file holds."""
        return {
            "environment": dict(self.environment),
            "ceilings": {
                "read_tb_per_s": self.ceilings.read_bytes_per_s / 1e12,
                "dense": self.ceilings.dense.as_dict(),
            },
            "scopes": dict(self.scopes),
            "missing": dict(self.missing),
            "remarks": list(self.remarks),
            "rows": [row.as_dict() for row in self.rows],
        }
