"""Errors of the package in other processes: pickled, copied, raised by a pool's worker."""

from __future__ import annotations

import copy
import inspect
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import cupy_moe
from cupy_moe.comm import PeerTimeoutError
from cupy_moe.runtime import compiler
from cupy_moe.runtime.errors import PortableError
from cupy_moe.runtime.jit import KernelCompileError, compile_cubin
from tests.probe import ProbeConfig

ARCH = "sm_90a"


def compile_error(source_path: Path | None) -> KernelCompileError:
    log = 'unit.cu(3): error: identifier "x" is undefined'
    return KernelCompileError(ProbeConfig().spec(), ARCH, log, source_path)


@pytest.fixture(
    params=[
        lambda: compile_error(Path("kept.cu")),
        lambda: compile_error(None),
        lambda: PeerTimeoutError("finalize", 0, 1, 2, 3, 0.5),
        lambda: PeerTimeoutError("finalize", 0, None, 2, 3, 0.5),
    ],
    ids=["compile", "compile, no source", "timeout", "timeout of an unknown peer"],
)
def error(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Exception:
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    made: Exception = request.param()
    monkeypatch.setattr(compiler, "nvrtc_version", None)  # the receiver need not have NVRTC
    return made


def check_same(received: Exception, sent: Exception) -> None:
    assert type(received) is type(sent)
    assert str(received) == str(sent) != ""
    assert received.args == sent.args
    assert vars(received) == vars(sent) != {}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(error: Exception, protocol: int) -> None:
    error.context_of_the_caller = "layer 7"
    check_same(pickle.loads(pickle.dumps(error, protocol)), error)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_errors_survive_copying(error: Exception, duplicate: Any) -> None:
    check_same(duplicate(error), error)


def compile_probe(num_threads: int) -> str:
    return compile_cubin(ProbeConfig(num_threads).spec(), ARCH).entry


def test_a_pool_hands_on_what_its_worker_could_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on with the next task."""
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPY_MOE_CACHE_DIR", str(tmp_path))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        wrong = pool.submit(compile_probe, 2048)
        right = pool.submit(compile_probe, 128)
        with pytest.raises(KernelCompileError, match="more threads than a block holds") as caught:
            wrong.result()
        assert caught.value.source_path.parent == tmp_path
        assert right.result() == "probe"


def error_classes() -> set[type[Exception]]:
    """Every exception class of the package."""
    names = (
        module.name
        for module in pkgutil.walk_packages(cupy_moe.__path__, "cupy_moe.")
        if module.name != "cupy_moe.__main__"
    )
    return {
        kind
        for name in names
        for kind in vars(import_module(name)).values()
        if inspect.isclass(kind)
        and issubclass(kind, Exception)
        and kind.__module__.startswith("cupy_moe.")
    }


def test_every_error_with_a_constructor_of_its_own_is_portable() -> None:
    pytest.importorskip("rich")  # of the command line
    own = {kind for kind in error_classes() if inspect.isfunction(kind.__init__)}
    assert own >= {KernelCompileError, PeerTimeoutError}
    assert all(issubclass(kind, PortableError) for kind in own)
