"""Rules about where things live: sizes, layers, and the only homes of inline PTX and kernels."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cupy_moe"
CUDA = ROOT / "cuda_src"

MAX_PYTHON_LINES = 400
MAX_KERNEL_LINES = 300
MAX_HEADER_LINES = 350

# From the bottom up. A module imports from its own layer and from those below it.
LAYERS = (
    ("runtime",),
    ("types", "codecs"),
    ("formats",),
    ("reference", "weights"),
    ("problem",),
    ("kernels",),
    ("tiling",),
    ("plan",),
    ("stage_inputs",),
    ("gemm_launches", "results", "stages"),
    ("pipeline", "partitions", "validate"),
    ("partitioned_launches",),
    ("bound_layer",),
    ("comm", "fused_moe"),
    ("testing",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

BASE_DEPENDENCIES = {"cupy_moe", "ml_dtypes", "numpy"}
CLI_DEPENDENCIES = BASE_DEPENDENCIES | {"rich"}

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
CUDA_FILES = sorted(p for p in CUDA.rglob("*") if p.suffix in {".cu", ".cuh"})


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in PYTHON_FILES}


def runtime_nodes(tree: ast.Module, *, top_level: bool) -> Iterator[ast.stmt]:
    """Statements that run; without function bodies if ``top_level``; no TYPE_CHECKING blocks."""
    queue: list[ast.AST] = [tree]
    while queue:
        for node in ast.iter_child_nodes(queue.pop()):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                queue.extend(node.orelse)
                continue
            if isinstance(node, ast.stmt):
                yield node
            if not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
                queue.append(node)


def imported(source: str, *, top_level: bool) -> set[str]:
    """Modules that ``source`` imports; ``from package import module`` counts as the module."""
    names: set[str] = set()
    for node in runtime_nodes(ast.parse(source), top_level=top_level):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = full & MODULES
            names |= modules
            if modules != full:
                names.add(str(node.module))
    return names


def layer_of(module: str) -> str:
    return module.split(".")[1]


def upward_imports(module: str, source: str) -> list[str]:
    targets = [t for t in imported(source, top_level=False) if t.startswith("cupy_moe.")]
    return sorted(t for t in targets if RANK[layer_of(t)] > RANK[layer_of(module)])


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def has_asm(source: str) -> bool:
    return bool(re.search(r"\b(asm|__asm__)\b", without_comments(source)))


def has_kernel(source: str) -> bool:
    return bool(re.search(r"\b__global__\b", without_comments(source)))


def includes(source: str) -> list[str]:
    return re.findall(
        r'^\s*#\s*include\s*(["<][^">\n]*[">])', without_comments(source), re.MULTILINE
    )


# --- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PYTHON_FILES, *TEST_FILES], ids=relative)
def test_python_module_size(path):
    assert num_lines(path) <= MAX_PYTHON_LINES


def test_every_module_has_a_layer():
    assert {layer_of(m) for m in MODULES if "." in m} <= RANK.keys()


@pytest.mark.parametrize(
    "path", [p for p in PYTHON_FILES if p.parent != PACKAGE or p.stem != "__init__"], ids=relative
)
def test_imports_go_down(path):
    assert upward_imports(module_name(path), path.read_text()) == []


def test_imports_have_no_cycle():
    graph = {
        module_name(path): imported(path.read_text(), top_level=True) & MODULES
        for path in PYTHON_FILES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_optional_packages_are_imported_where_used(path):
    allowed = CLI_DEPENDENCIES if path.is_relative_to(PACKAGE / "cli") else BASE_DEPENDENCIES
    packages = {name.partition(".")[0] for name in imported(path.read_text(), top_level=True)}
    assert packages - allowed - sys.stdlib_module_names == set()


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CUDA_FILES, ids=relative)
def test_cuda_file_size(path):
    limit = MAX_KERNEL_LINES if path.suffix == ".cu" else MAX_HEADER_LINES
    assert num_lines(path) <= limit


def test_asm_lives_in_ptx_only():
    homes = {p.parent for p in CUDA_FILES if has_asm(p.read_text())}
    assert homes <= {CUDA / "ptx"}


def test_kernels_live_in_top_level_units_only():
    units = {p for p in CUDA_FILES if p.suffix == ".cu"}
    assert {p.parent for p in units} == {CUDA}
    assert {p for p in CUDA_FILES if has_kernel(p.read_text())} == units


def test_every_unit_has_its_launcher():
    units = {p.stem for p in CUDA.glob("*.cu")}
    launchers = {p.stem for p in (PACKAGE / "kernels").glob("*.py")}
    assert units == launchers - {"__init__", "gemm_tiles"}


@pytest.mark.parametrize("path", CUDA_FILES, ids=relative)
def test_includes_are_our_own(path):
    for include in includes(path.read_text()):
        assert include.startswith('"'), f"{include} is not one of our headers"
        assert (CUDA / include.strip('"')).is_file(), f"{include} does not exist"


@pytest.mark.parametrize("path", [p for p in CUDA_FILES if p.suffix == ".cuh"], ids=relative)
def test_headers_are_included_once(path):
    assert "#pragma once" in path.read_text().splitlines()


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PYTHON_FILES, *TEST_FILES, *CUDA_FILES], ids=relative)
def test_sources_are_ascii(path):
    assert path.read_bytes().isascii()


# --- the rules find what they are for -------------------------------------------------------------


def test_the_layer_rule_bites():
    source = "def f():\n    from cupy_moe import plan\n"
    assert upward_imports("cupy_moe.runtime.jit", source) == ["cupy_moe.plan"]
    assert upward_imports("cupy_moe.pipeline", source) == []


def test_the_layer_rule_ignores_annotations():
    source = "if TYPE_CHECKING:\n    from cupy_moe.plan import MoeProblem\n"
    assert upward_imports("cupy_moe.kernels.route", source) == []


def test_comments_may_speak_of_what_is_forbidden():
    assert not has_asm("// asm lives elsewhere\n/* asm\n volatile */ int x;")
    assert has_asm('int x; asm volatile("bar.sync 0;");')
    assert not has_kernel("// __global__\n")
    assert has_kernel('extern "C" __global__ void f();')
    assert includes('#include <cuda_fp8.h>\n  # include "common/types.cuh"\n// #include <x>\n') == [
        "<cuda_fp8.h>",
        '"common/types.cuh"',
    ]
