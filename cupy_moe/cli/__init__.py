"""Command line: ``python -m cupy_moe``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from cupy_moe import __version__
from cupy_moe.cli import bench, demo, info, precompile

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cupy_moe", description="Fused mixture-of-experts layers on NVIDIA GPUs."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (info, demo, bench, precompile):
        command.add_parser(commands)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args, Console(highlight=False)))
    except (RuntimeError, ValueError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
