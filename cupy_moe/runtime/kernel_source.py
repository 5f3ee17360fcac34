"""Specializations: a kernel and its configuration, their translation unit and its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cupy_moe.runtime.launch import ParamLayout

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "ConfigItems",
    "ConfigValue",
    "KernelSpec",
    "format_config",
    "include_closure",
    "render_unit",
    "source_dir",
]

ConfigValue: TypeAlias = "int | float | bool | Enum"
ConfigItems: TypeAlias = "tuple[tuple[str, ConfigValue], ...]"

_F32_MAX = float(np.finfo(np.float32).max)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


@cache
def source_dir() -> Path:
    """Folder of the CUDA sources: inside an installed package, else beside it in the repository.

    Raises
    ------
    RuntimeError
        If neither holds them.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "cuda_src", package.parent / "cuda_src")
    for candidate in candidates:
        if (candidate / "common").is_dir():
            return candidate
    raise RuntimeError(
        f"cupy_moe: the CUDA sources are neither in {candidates[0]} nor in {candidates[1]}; "
        "reinstall the package"
    )


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One specialization of one kernel; hashable.

    Attributes
    ----------
    source : str
        Name of the ``.cu`` file, without the suffix.
    entry : str
        Name of its ``extern "C"`` kernel.
    config : tuple of (name, value)
        Becomes ``struct Config``: ``tile_n`` is read as ``Config::kTileN``. Values are int, float
        (FP32), bool or an Enum that has a C++ counterpart of the same name in ``cupy_moe``.
    params : ParamLayout
        The parameter struct; compared with the kernel's at compile time.
    folder : Path, optional
        Where the ``.cu`` file is, if not among the package's sources. Those are on the include
        path in any case.

    Raises
    ------
    TypeError, ValueError
        If a configuration value has no C++ form.
    """

    source: str
    entry: str
    config: ConfigItems
    params: ParamLayout
    folder: Path | None = None
    _unit: str = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Render once: specializations are equal if their texts are (``1 == True == Enum(1)``)."""
        unit = _render(self.source, self.config, self.params)
        object.__setattr__(self, "_unit", unit)
        object.__setattr__(self, "_hash", hash((unit, self.entry, self.folder)))

    @classmethod
    def from_config(
        cls,
        source: str,
        config: DataclassInstance,
        params: ParamLayout,
        *,
        entry: str | None = None,
        folder: Path | None = None,
    ) -> KernelSpec:
        """Specialization by the fields of a dataclass; the entry is named like the source."""
        items = tuple((item.name, getattr(config, item.name)) for item in fields(config))
        return cls(source, entry or source, items, params, folder)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same code."""
        return isinstance(other, KernelSpec) and (
            (self._hash, self._unit, self.entry, self.folder)
            == (other._hash, other._unit, other.entry, other.folder)
        )

    def __hash__(self) -> int:
        """Hash of the code, computed once."""
        return self._hash

    def __str__(self) -> str:
        """Name and configuration, for messages."""
        return f"{self.entry} ({format_config(self.config)})" if self.config else self.entry

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """Include path, most specific first."""
        own = () if self.folder is None else (self.folder.resolve(),)
        return (*own, source_dir())


def format_config(config: ConfigItems) -> str:
    """One-line form for messages: ``tile_m=64, activation=Swiglu``."""
    return ", ".join(
        f"{name}={value.name if isinstance(value, Enum) else value}" for name, value in config
    )


def render_unit(spec: KernelSpec) -> str:
    """Return the text of the translation unit that is compiled for a specialization.

    The configuration as a struct, the checks of the parameter struct, then the kernel's source.
    """
    return spec._unit


def _render(source: str, config: ConfigItems, params: ParamLayout) -> str:
    members = "".join(f"  static constexpr {_member(name, value)};\n" for name, value in config)
    checks = "".join(
        f"  CUPY_MOE_CHECK_FIELD(P, {field.name}, {field.device_type}); \\\n"
        for field in params.fields
    )
    names = ", ".join(field.name for field in params.fields)
    in_order = ", ".join(f".{field.name} = {{}}" for field in params.fields)
    return (
        '#include "common/params.cuh"\n'
        '#include "common/types.cuh"\n\n'
        f"struct Config {{\n{members}}};\n\n"
        f"#define CUPY_MOE_CHECK_PARAMS(P) \\\n{checks}"
        f"  static_assert(sizeof(P{{{in_order}}}) == {params.size}, \\\n"
        f'                #P " is not of the host\'s size"); \\\n'
        f"  CUPY_MOE_CHECK_MEMBERS(P, {names})\n\n"
        f'#include "{source}.cu"\n'
    )


def _member(name: str, value: ConfigValue) -> str:
    """C++ declaration of a field: ``tile_n`` becomes ``kTileN``."""
    constant = "k" + "".join(word.capitalize() for word in name.split("_"))
    if isinstance(value, Enum):
        kind = type(value).__name__
        return f"cupy_moe::{kind} {constant} = cupy_moe::{kind}::{value.name}"
    if isinstance(value, bool):
        return f"bool {constant} = {str(value).lower()}"
    if isinstance(value, int):
        if not -(2**63) < value < 2**63:
            raise ValueError(f"{name} must fit 64 bits, got {value}")
        return f"{'int' if abs(value) < 2**31 else 'long long'} {constant} = {value}"
    if isinstance(value, float):
        if not abs(value) <= _F32_MAX:
            raise ValueError(f"{name} must be finite in FP32, got {value}")
        return f"float {constant} = {float(np.float32(value)).hex()}f  /* {value} */"
    raise TypeError(f"{name} must be an int, float, bool or Enum, got {type(value).__name__}")


def include_closure(text: str, folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Files that a translation unit includes, directly or not, in order of first appearance.

    Conditional compilation is ignored, so the closure may be larger than what one compilation
    reads, never smaller. Names that do not exist are left to the compiler to report.

    Parameters
    ----------
    text : str
        The translation unit.
    folders : sequence of Path
        Include path; a header's own folder comes first, as for the compiler.

    Yields
    ------
    name : str
        The path relative to its folder of the include path.
    path : Path
        Where it is.
    """
    seen: set[Path] = set()
    pending = list(_resolve(text, (), folders))[::-1]
    while pending:
        path, folder = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path.relative_to(folder).as_posix(), path
        pending += list(_resolve(path.read_text(), (path.parent,), folders))[::-1]


def _resolve(
    text: str, own: Iterable[Path], folders: Sequence[Path]
) -> Iterator[tuple[Path, Path]]:
    for name in _INCLUDE.findall(text):
        for folder in (*own, *folders):
            path = (folder / name).resolve()
            if path.is_file():
                yield path, next(root for root in folders if path.is_relative_to(root))
                break
