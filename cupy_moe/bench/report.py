"""Rows as table cells, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

from cupy_moe.bench.rows import OURS, Report, Row

__all__ = ["by_layer", "cells", "headers", "notes", "plot", "write_json"]

REASON_WIDTH = 40  # in a cell; the notes have all of it
LAUNCH_NOTE = (
    f"Calls of {OURS} inside a graph are joined by programmatic dependent launch (compute "
    "capability 9.0 and newer): at few tokens a call's start hides behind the end of the call "
    "before."
)


def by_layer(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of each layer, in order."""
    for title, group in groupby(rows, key=lambda row: row.title):
        yield title, list(group)


def peer_names(rows: Sequence[Row]) -> list[str]:
    """Peers that have a time or a failure in some row, in order of appearance."""
    names = (name for row in rows for name in (*row.timings, *row.failures))
    return [name for name in dict.fromkeys(names) if name != OURS]


def headers(rows: Sequence[Row]) -> list[str]:
    """Column titles: ours, then each peer's time and how many times ours it is."""
    own = ["tokens", "experts hit", "us", "sustained", "TB/s", "of read", "TFLOP/s"]
    own += ["floor us", "of floor"]
    return own + [title for name in peer_names(rows) for title in (f"{name}, us", "/ ours")]


def cells(row: Row, peers: Sequence[str]) -> list[str]:
    """One line of the table; a peer that failed has its reason in place of a time."""
    line = [
        str(row.num_tokens),
        f"{row.work.experts_hit:.1f}",
        f"{row.us:.1f}",
        "-" if row.sustained_us is None else f"{row.sustained_us:.1f}",
        f"{row.tb_per_s:.2f}",
        f"{row.share_of_read:.0%}",
        f"{row.tflops:.0f}",
        f"{row.floor_us:.1f}",
        f"{row.share_of_floor():.0%}",
    ]
    for name in peers:
        if name in row.timings:
            line += [f"{row.timings[name].us:.1f}", f"{row.ratio(name):.2f}"]
        else:
            reason = row.failures.get(name)
            line += [f"failed: {shorten(reason, REASON_WIDTH)}" if reason else "-", ""]
    return line


def notes(report: Report) -> list[str]:
    """Say what is timed of whom and how, who is missing and who failed, one sentence each."""
    lines = [f"{name}: {scope}." for name, scope in report.scopes.items()]
    lines.append(LAUNCH_NOTE)
    lines += [f"{name} did not take part: {reason}." for name, reason in report.missing.items()]
    lines += report.remarks
    failed: dict[tuple[str, str, str], list[str]] = {}
    for row in report.rows:
        for name, reason in row.failures.items():
            key = name, row.workload.key, reason
            failed.setdefault(key, []).append(str(row.num_tokens))
    for (name, workload, reason), tokens in failed.items():
        lines.append(f"{name} failed on {workload}, {', '.join(tokens)} tokens: {reason}.")
    return lines


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a report that other programs read."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(path: Path, report: Report) -> None:
    """Draw time and share of the floor over tokens, a column for each layer."""
    from matplotlib.figure import Figure

    groups = list(by_layer(report.rows))
    figure = Figure(figsize=(5 * len(groups), 7), layout="constrained")
    axes = figure.subplots(2, len(groups), sharex=True, squeeze=False)
    for (title, rows), (upper, lower) in zip(groups, axes.T, strict=True):
        tokens = [row.num_tokens for row in rows]
        upper.loglog(tokens, [row.floor_us for row in rows], "k--", label="floor")
        for name in [OURS, *peer_names(rows)]:
            timed = [row for row in rows if name in row.timings]
            x = [row.num_tokens for row in timed]
            style = "o-" if name == OURS else ".-"
            upper.loglog(x, [row.timings[name].us for row in timed], style, label=name)
            lower.semilogx(x, [row.share_of_floor(name) for row in timed], style, label=name)
        upper.set(title=title, ylabel="us a call")
        lower.set(xlabel="tokens", ylabel="share of the floor", ylim=(0, 1.05))
        lower.set_xticks(tokens, [str(t) for t in tokens], rotation=45)
        lower.minorticks_off()
        upper.legend()
    ceilings = report.ceilings
    figure.suptitle(
        f"{report.environment.get('gpu', 'GPU')}: read {ceilings.read_bytes_per_s / 1e12:.2f} TB/s,"
        f" {ceilings.dense.number_format} {ceilings.dense.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    figure.savefig(path, dpi=150)
