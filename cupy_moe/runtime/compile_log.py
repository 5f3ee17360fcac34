"""What NVRTC's log says: the first error, and a kernel's registers and spills."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KernelResources", "first_error", "parse_resources"]

_ERROR = re.compile(
    r"^(?P<where>[^\n(]+\(\d+\)): (?:catastrophic )?error(?: #[\w-]+)?: (?P<what>.*)$",
    re.MULTILINE,
)
_ASSERTION = re.compile(r'^static assertion failed with "(?P<text>.*)"$')
_OTHER_ERROR = re.compile(r"^.*\b(?:error|fatal)\b.*$", re.MULTILINE)
_FIGURES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "stack": r"(\d+) bytes stack frame",
    "static_smem": r"(\d+) bytes smem",  # not printed when there is none
}


def first_error(log: str, include_dirs: Sequence[Path]) -> str:
    """First error of a log in one line, with the path relative to the include path."""
    match = _ERROR.search(log)
    if match is None:
        other = _OTHER_ERROR.search(log)
        return (other.group() if other else log).strip()
    where, what = match["where"], match["what"]
    for folder in include_dirs:
        where = where.removeprefix(f"{folder}/")
    assertion = _ASSERTION.match(what)
    return f"{where}: {assertion['text'] if assertion else what}"


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one kernel takes, as counted by ptxas.

    Attributes
    ----------
    registers : int
        A thread.
    spill_stores, spill_loads : int
        Bytes a thread.
    stack : int
        Bytes a thread, spills included.
    static_smem : int
        Bytes a block.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int


def parse_resources(log: str, entry: str) -> KernelResources:
    """Read the figures of `entry` from a log made with ``--ptxas-options=-v``.

    Raises
    ------
    ValueError
        If the log does not have them.
    """
    start = log.find(f"Compiling entry function '{entry}'")
    section = log[start:].split("Compiling entry function", 2)[1] if start >= 0 else ""
    figures = {name: re.search(pattern, section) for name, pattern in _FIGURES.items()}
    missing = [name for name, match in figures.items() if not match and name != "static_smem"]
    if missing:
        raise ValueError(
            f"no {', '.join(missing)} of {entry} in the compiler's log; compile with "
            "verbose_ptxas=True"
        )
    return KernelResources(
        **{name: int(match[1]) if match else 0 for name, match in figures.items()}
    )
