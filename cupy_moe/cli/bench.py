"""``bench``: times of the layers and of the finalize; this module has the options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cupy_moe.bench.fp4 import FORMS, FP4_WORKLOADS, MODES
from cupy_moe.bench.peers import FP4_PEERS, FP8_PEERS
from cupy_moe.bench.workloads import TOKENS, WORKLOADS
from cupy_moe.cli import bench_finalize
from cupy_moe.cli.bench_layers import run_fp4, run_fp8
from cupy_moe.cli.bench_sweep import run_sweep
from cupy_moe.cli.options import positive

__all__ = ["add_parser"]


def _add_choices(parser: argparse.ArgumentParser, option: str, choices: Iterable[str]) -> None:
    values = list(choices)
    parser.add_argument(option, nargs="+", choices=values, default=values, help="default: all")


def _add_peers(parser: argparse.ArgumentParser, peers: Iterable[str]) -> None:
    names = list(peers)
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=[*names, "none"],
        default=names,
        help="those that are not installed are named; default: all",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (matplotlib)")


def _add_measurement(parser: argparse.ArgumentParser, tokens: Sequence[int]) -> None:
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=positive,
        default=list(tokens),
        metavar="T",
        help=f"rows of a workload; default: {' '.join(map(str, tokens))}",
    )
    parser.add_argument(
        "--replays", type=positive, default=15, help="of every graph; the median counts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def add_parser(subparsers: Any) -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("bench", help="time the layers on this machine's GPU")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")

    fp8 = kinds.add_parser("fp8", help="FP8 layers against their floor and other implementations")
    _add_choices(fp8, "--workload", WORKLOADS)
    _add_measurement(fp8, TOKENS)
    _add_peers(fp8, FP8_PEERS)
    fp8.set_defaults(run=run_fp8)

    fp4 = kinds.add_parser(
        "fp4", help="the same of FP4 layers, whole and in two partitions of the GPU"
    )
    _add_choices(fp4, "--workload", FP4_WORKLOADS)
    _add_choices(fp4, "--mode", MODES)
    _add_choices(fp4, "--form", FORMS)
    _add_measurement(fp4, TOKENS)
    _add_peers(fp4, FP4_PEERS)
    fp4.set_defaults(run=run_fp4)

    tilings = kinds.add_parser("sweep", help="layers with every tiling of sensible token tiles")
    _add_choices(tilings, "--workload", [*WORKLOADS, *FP4_WORKLOADS])
    _add_choices(tilings, "--mode", MODES)
    tilings.add_argument(
        "--form", nargs="+", choices=FORMS, default=["whole"], help="of FP4 layers; default: whole"
    )
    _add_measurement(tilings, TOKENS)
    tilings.set_defaults(run=run_sweep)

    finalize = kinds.add_parser("finalize", help="the tensor-parallel finalize on several GPUs")
    _add_measurement(finalize, bench_finalize.TOKENS)
    bench_finalize.add_options(finalize)
    finalize.set_defaults(run=bench_finalize.run_finalize)
