"""Processes and devices: cold caches, forks, and a device that nobody asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

RUN_PROBE = """
import cupy, numpy
from cupy_moe.runtime.devices import device_guard
from tests.gpu.probe_launch import launch_probe, probe_function
def run_probe():
    with device_guard(0):
        out = cupy.zeros(100, numpy.float32)
        launch_probe(probe_function(), cupy.arange(100, dtype=numpy.float32), out)
        assert (out.get() == numpy.arange(100) * 2 + 1).all()
"""


def start(script: str, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUPY_MOE_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def run(script: str, cache: Path) -> str:
    process = start(script, cache)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output.strip()


def test_sixteen_cold_processes(tmp_path: Path) -> None:
    processes = [start(RUN_PROBE + "run_probe()\nprint('right')", tmp_path) for _ in range(16)]
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert (process.returncode, output.strip()) == (0, "right"), errors
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


def test_truncated_cache_file(tmp_path: Path) -> None:
    script = RUN_PROBE + "run_probe()\nprint('right')"
    assert run(script, tmp_path) == "right"
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert run(script, tmp_path) == "right"
        assert len(path.read_bytes()) == len(whole)


def test_import_fork_use_in_the_child(tmp_path: Path) -> None:
    script = (
        "import os, cupy_moe\n"
        "from cupy_moe.runtime import arrays, jit, launch, scratch, streams\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        + "".join(f"    {line}\n" for line in RUN_PROBE.strip().splitlines())
        + "    run_probe()\n    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert run(script, tmp_path) == "0"


CONTEXTS = """
from cuda.bindings import driver
def active():
    return [int(driver.cuDevicePrimaryCtxGetState(d)[2]) for d in range(count)]
"""


def test_checking_requirements_and_importing_make_no_context(tmp_path: Path) -> None:
    script = (
        "import cupy_moe\n"
        "from cupy_moe.runtime import arrays, devices, jit, launch, require_gpu\n"
        "require_gpu()\n"
        "devices.compute_capability(0), devices.sm_count(0), devices.max_shared_memory(0)\n"
        + CONTEXTS.replace("range(count)", "range(1)")
        + "print(active())\n"
    )
    assert run(script, tmp_path) == "[0]"


@pytest.fixture
def two_devices() -> int:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs")
    return count


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.usefixtures("two_devices")
def test_the_other_device_stays_untouched(used: int, tmp_path: Path) -> None:
    script = (
        "count, used = 2, " + str(used) + "\n" + CONTEXTS + "from cupy_moe.runtime import scratch\n"
        "from cupy_moe.runtime.devices import device_guard\n"
        "from cupy_moe.runtime.jit import load\n"
        "from cupy_moe.runtime.launch import bind, enqueue\n"
        "from tests.probe import PARAMS, ProbeConfig\n"
        "function = load(ProbeConfig().spec(), used)\n"
        "with device_guard(used):\n"
        "    params = PARAMS.pack(0, 0, 0, 0, 0, 0, 0.0)\n"
        "    enqueue([bind(function, params, grid=(1, 1, 1), block=128)])\n"
        "    assert int(driver.cuCtxSynchronize()[0]) == 0\n"
        "print(active(), int(driver.cuCtxGetCurrent()[1]))\n"
    )
    expected = [0, 0]
    expected[used] = 1
    assert run(script, tmp_path) == f"{expected} 0"


@pytest.mark.usefixtures("two_devices")
def test_a_tensor_on_the_second_device_only(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = (
        "count = 2\n" + CONTEXTS + "import numpy, torch\n"
        "from cupy_moe.runtime.arrays import describe\n"
        "from cupy_moe.runtime.devices import device_guard\n"
        "from cupy_moe.runtime.jit import load\n"
        "from cupy_moe.runtime.launch import bind, enqueue\n"
        "from cupy_moe.runtime.scratch import allocate\n"
        "from tests.probe import PARAMS, ProbeConfig\n"
        "torch.cuda.set_device(1)\n"
        "x = torch.arange(100, device='cuda:1', dtype=torch.float32)\n"
        "ref = describe(x)\n"
        "out = ref.framework.empty((100,), 'float32', ref.device)\n"
        "function = load(ProbeConfig().spec(), 1)\n"
        "with device_guard(1):\n"
        "    assert not ref.framework.is_capturing(1)\n"
        "    stream = ref.framework.current_stream(1)\n"
        "    params = PARAMS.pack(ref.ptr, out.ptr, 0, 0, 0, 100, 0.0)\n"
        "    enqueue([bind(function, params, grid=(1, 1, 1), block=128, stream=stream)])\n"
        "assert (out.owner.cpu() == torch.arange(100) * 2 + 1).all()\n"
        "print(active())\n"
    )
    assert run(script, tmp_path) == "[0, 1]"


@pytest.mark.usefixtures("two_devices")
def test_two_devices_in_two_threads(tmp_path: Path) -> None:
    script = (
        "import threading, cupy, numpy\n"
        "from cupy_moe.runtime.devices import device_guard\n"
        "from cupy_moe.runtime.jit import load\n"
        "from cupy_moe.runtime.launch import bind, enqueue\n"
        "from tests.probe import PARAMS, ProbeConfig\n"
        "right = []\n"
        "def work(device):\n"
        "    function = load(ProbeConfig().spec(), device)\n"
        "    with device_guard(device):\n"
        "        out = cupy.zeros(100, numpy.float32)\n"
        "        for step in range(200):\n"
        "            params = PARAMS.pack(0, out.data.ptr, 0, 0, 0, 100, float(device + step))\n"
        "            enqueue([bind(function, params, grid=(1, 1, 1), block=128)])\n"
        "        right.append(bool((out.get() == device + 200).all()))\n"
        "threads = [threading.Thread(target=work, args=(d,)) for d in (1, 0)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(right)\n"
    )
    assert run(script, tmp_path) == "[True, True]"
