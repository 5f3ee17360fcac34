from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from cupy_moe.runtime import jit, kernel_cache
from cupy_moe.runtime.jit import KernelSpec, cached_cubin_path, cached_image
from tests.probe import FOLDER, ProbeConfig

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache folder of the test's own."""
    monkeypatch.setenv("CUPY_MOE_CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache._warn_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def nvrtc() -> Any:
    return pytest.importorskip("cupy").cuda.nvrtc


# --- cache key --------------------------------------------------------------------------------


@pytest.mark.usefixtures("nvrtc")
def test_key_depends_on_code_and_not_on_place(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        shutil.copytree(FOLDER, folder)
    spec, moved = ProbeConfig().spec(folder=first), ProbeConfig().spec(folder=second)
    path = cached_cubin_path(spec, ARCH)
    assert path == cached_cubin_path(moved, ARCH)
    assert path.name.startswith("probe-sm_90a-")
    assert path != cached_cubin_path(spec, "sm_80")
    assert path != cached_cubin_path(ProbeConfig(factor=3.0).spec(folder=first), ARCH)

    (second / "unrelated.cuh").write_text("// not included\n")
    assert path == cached_cubin_path(moved, ARCH)
    header = second / "probe.cuh"
    header.write_text(header.read_text() + "// a comment\n")
    assert path != cached_cubin_path(moved, ARCH)


def test_key_depends_on_the_nvrtc_version(nvrtc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_cubin_path(ProbeConfig().spec(), ARCH)
    major, minor = nvrtc.getVersion()
    monkeypatch.setattr(jit, "nvrtc_version", lambda: f"{major}.{minor + 1}")
    assert path != cached_cubin_path(ProbeConfig().spec(), ARCH)


@pytest.mark.usefixtures("nvrtc")
def test_key_depends_on_added_options(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_cubin_path(ProbeConfig().spec(), ARCH)
    monkeypatch.setenv("CUPY_MOE_NVRTC_OPTIONS", "-lineinfo")
    assert path != cached_cubin_path(ProbeConfig().spec(), ARCH)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUPY_MOE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.cache_dir() == tmp_path / "cupy_moe"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_cache.cache_dir() == tmp_path / "home" / ".cache" / "cupy_moe"


# --- cache files ------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace NVRTC: every compilation yields the next image."""
    log: list[str] = []

    def compile_image(spec: KernelSpec, arch: str) -> tuple[bytes, str]:
        log.append(arch)
        return b"image %d of %s" % (len(log), spec.entry.encode()), ""

    monkeypatch.setattr(jit, "compile_image", compile_image)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0")
    return log


def test_compiled_once_then_read(compilations: list[str], cache: Path) -> None:
    spec = ProbeConfig().spec()
    assert cached_image(spec, ARCH) == cached_image(spec, ARCH) == b"image 1 of probe"
    assert compilations == [ARCH]
    assert [path.name for path in cache.iterdir()] == [cached_cubin_path(spec, ARCH).name]


@pytest.mark.parametrize("keep", [0, 1, 8, 39, 40, 41, -40, -1])
def test_truncated_files_are_rebuilt(keep: int, compilations: list[str]) -> None:
    spec = ProbeConfig().spec()
    cached_image(spec, ARCH)
    path = cached_cubin_path(spec, ARCH)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert cached_image(spec, ARCH) == b"image 2 of probe"
    assert len(path.read_bytes()) == len(whole)
    assert cached_image(spec, ARCH) == b"image 2 of probe"
    assert len(compilations) == 2


@pytest.mark.parametrize("position", [0, 7, 20, -40, -1])
def test_altered_files_are_rebuilt(position: int, compilations: list[str]) -> None:
    spec = ProbeConfig().spec()
    cached_image(spec, ARCH)
    path = cached_cubin_path(spec, ARCH)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert cached_image(spec, ARCH) == b"image 2 of probe"
    assert len(compilations) == 2


def test_a_file_of_another_kernel_is_not_taken(compilations: list[str]) -> None:
    spec, other = ProbeConfig().spec(), ProbeConfig(factor=3.0).spec()
    cached_image(spec, ARCH)
    shutil.copy(cached_cubin_path(spec, ARCH), cached_cubin_path(other, ARCH))
    assert cached_image(other, ARCH) == b"image 2 of probe"
    assert len(compilations) == 2


def test_a_file_of_another_user_is_not_taken(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ProbeConfig().spec()
    cached_image(spec, ARCH)
    owner = os.stat(cached_cubin_path(spec, ARCH))
    stranger = os.stat_result((*owner[:4], 12345, *owner[5:]))
    monkeypatch.setattr(kernel_cache.os, "fstat", lambda _: stranger)
    assert cached_image(spec, ARCH) == b"image 2 of probe"
    assert len(compilations) == 2


def test_an_unusable_folder_warns_once_and_compiles_in_memory(
    compilations: list[str], cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="cannot store compiled kernels.*CUPY_MOE_CACHE_DIR"):
        assert cached_image(ProbeConfig().spec(), ARCH) == b"image 1 of probe"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached_image(ProbeConfig(factor=3.0).spec(), ARCH) == b"image 2 of probe"
    assert len(compilations) == 2


def test_a_disk_that_fills_up_leaves_no_file_behind(compilations: list[str], cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # a write fails half way
    try:
        with pytest.warns(RuntimeWarning, match="cannot store compiled kernels"):
            assert cached_image(ProbeConfig().spec(), ARCH) == b"image 1 of probe"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache.iterdir()) == []
    assert cached_image(ProbeConfig().spec(), ARCH) == b"image 2 of probe"
    assert len(compilations) == 2


READ_ONLY = """
import os, sys, tempfile, warnings
from cupy_moe.runtime import jit
from tests.probe import ProbeConfig
jit.compile_cubin(ProbeConfig().spec(), "sm_90a")  # everything is imported and opened
folder = tempfile.mkdtemp()
os.chmod(folder, 0o555)
os.environ["CUPY_MOE_CACHE_DIR"] = folder
if os.geteuid() == 0:
    os.seteuid(65534)  # permissions do not bind root; now it is another user's folder, too
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    images = [jit.cached_image(ProbeConfig(factor=f).spec(), "sm_90a") for f in (2.0, 3.0)]
if os.getuid() == 0:
    os.seteuid(0)
assert all(image.startswith(b"\\x7fELF") for image in images) and images[0] != images[1]
assert os.listdir(folder) == []
os.rmdir(folder)
print(len(caught), caught[0].message)
"""


def run_python(script: str, cache: Path) -> str:
    environment = {**os.environ, "CUPY_MOE_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.usefixtures("nvrtc")
def test_a_read_only_folder(cache: Path) -> None:
    output = run_python(READ_ONLY, cache)
    assert output.startswith("1 cupy_moe cannot store compiled kernels in"), output


COLD_START = """
import hashlib, multiprocessing
from cupy_moe.runtime import jit
from tests.probe import ProbeConfig

def work(barrier, results):
    barrier.wait()
    results.put(hashlib.sha256(jit.cached_image(ProbeConfig().spec(), "sm_90a")).hexdigest())

context = multiprocessing.get_context("fork")
barrier, results = context.Barrier(16), context.Queue()
processes = [context.Process(target=work, args=(barrier, results)) for _ in range(16)]
for process in processes: process.start()
print(*{results.get() for _ in processes})
print(jit.cached_cubin_path(ProbeConfig().spec(), "sm_90a"))
for process in processes: process.join()
assert not any(process.exitcode for process in processes)
"""


@pytest.mark.usefixtures("nvrtc")
def test_sixteen_cold_processes_share_one_folder(cache: Path) -> None:
    # NOTE: asked of the processes, since another library may have brought this one another NVRTC.
    *digests, path = run_python(COLD_START, cache).split()
    assert [str(file) for file in cache.iterdir()] == [path]
    image = Path(path).read_bytes()[: -kernel_cache._TRAILER_BYTES]
    assert digests == [hashlib.sha256(image).hexdigest()]


FORK = """
import os, sys
import cupy_moe
from cupy_moe.runtime import jit
from tests.probe import ProbeConfig
jit._locks[(ProbeConfig().spec(), 0, None)] = __import__("threading").Lock()
jit._locks[(ProbeConfig().spec(), 0, None)].acquire()
child = os.fork()
if child == 0:
    assert not jit._locks
    os._exit(0 if jit.cached_image(ProbeConfig().spec(), "sm_90a") else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("nvrtc")
def test_a_forked_child_compiles(cache: Path) -> None:
    assert run_python(FORK, cache).strip() == "0"


@pytest.mark.usefixtures("nvrtc")
def test_cached_file_is_a_cubin_for_disassemblers() -> None:
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        pytest.skip("nvdisasm is not installed")
    cached_image(ProbeConfig().spec(), ARCH)
    path = cached_cubin_path(ProbeConfig().spec(), ARCH)
    listing = subprocess.run([nvdisasm, path], capture_output=True, text=True, check=True).stdout
    assert ".text.probe" in listing


def find_nvdisasm() -> str | None:
    """Disassembler of the CUDA toolkit, else of its wheel."""
    wheels = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm")
    return shutil.which("nvdisasm") or next(map(str, wheels), None)
