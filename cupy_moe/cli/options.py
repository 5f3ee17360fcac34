"""Types of command-line options; argparse prints what they refuse."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

from cupy_moe.runtime.compiler import arch_for

__all__ = ["architecture", "positive"]


def positive(text: str) -> int:
    """Integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def architecture(text: str) -> str:
    """Architecture under which kernels are looked up: ``sm_90`` becomes ``sm_90a``."""
    name = re.fullmatch(r"sm_(\d+)(\d)a?", text)
    if name is None:
        raise ArgumentTypeError(f"must be such as sm_80, sm_90a or sm_120a, got {text!r}")
    try:
        return arch_for((int(name[1]), int(name[2])))
    except NotImplementedError as error:
        raise ArgumentTypeError(str(error)) from error
