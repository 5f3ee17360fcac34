"""What the commands have in common on the way out: progress and files."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cupy_moe.bench.report import write_json

__all__ = ["check_files", "progress_bar", "write_figures"]


def progress_bar(console: Console) -> Progress:
    """Bar with the number of steps and the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def check_files(args: argparse.Namespace) -> None:
    """Refuse what would fail after the work is done."""
    plot = getattr(args, "plot", None)
    if plot and find_spec("matplotlib") is None:
        raise RuntimeError('--plot needs matplotlib: pip install "cupy-moe[cli]"')
    for path in (getattr(args, "json", None), plot):
        if path and not path.parent.is_dir():
            raise ValueError(f"the folder of {path} does not exist")


def write_figures(args: argparse.Namespace, console: Console, content: dict[str, Any]) -> None:
    """Write the JSON file, if one was asked for."""
    if args.json:
        write_json(args.json, content)
        console.print(f"figures written to {args.json}", markup=False)
