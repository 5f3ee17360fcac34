from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_moe.runtime import launch as launch_module
from cupy_moe.runtime.jit import Function
from cupy_moe.runtime.launch import PackedParams, ParamLayout, bind, enqueue

CTYPES = {
    "ptr": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
}
VALUES = {"ptr": 2**47 + 1, "i32": -5, "u32": 2**32 - 1, "i64": -(2**40), "u64": 2**63, "f32": 0.5}


def c_struct(kinds: list[str]) -> type[ctypes.Structure]:
    fields = [(f"f{i}", CTYPES[kind]) for i, kind in enumerate(kinds)]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def packed_struct(params: PackedParams, size: int) -> tuple[int, bytes]:
    """Address and bytes of the struct that a launch would copy."""
    pointer = ctypes.c_void_p.from_address(params.address).value
    return pointer, ctypes.string_at(pointer, size)


@given(st.lists(st.sampled_from(sorted(CTYPES)), min_size=1, max_size=12))
def test_layout_is_that_of_the_c_compiler(kinds: list[str]) -> None:
    layout = ParamLayout(*((f"f{i}", kind) for i, kind in enumerate(kinds)))
    expected = c_struct(kinds)
    assert layout.size == ctypes.sizeof(expected)
    assert layout.offsets == {name: getattr(expected, name).offset for name, _ in expected._fields_}
    values = [VALUES[kind] for kind in kinds]
    # Padding is unspecified in C and zero here, as in a zero-initialized ctypes struct.
    assert layout.to_bytes(*values) == bytes(expected(*values))
    _, data = packed_struct(layout.pack(*values), layout.size)
    assert data == layout.to_bytes(*values)


def test_arrays_lie_as_in_c() -> None:
    layout = ParamLayout(("n", "i32"), ("x", "ptr", 3), ("counts", "i32", 2), ("m", "u32"))
    fields = [
        ("n", ctypes.c_int32),
        ("x", ctypes.c_uint64 * 3),
        ("counts", ctypes.c_int32 * 2),
        ("m", ctypes.c_uint32),
    ]
    expected = type("Params", (ctypes.Structure,), {"_fields_": fields})
    assert layout.size == ctypes.sizeof(expected)
    assert layout.offsets == {name: getattr(expected, name).offset for name, _ in fields}
    struct_of_c = expected(1, (2, 3, 4), (5, 6), 7)
    assert layout.to_bytes(1, 2, 3, 4, 5, 6, 7) == bytes(struct_of_c)
    assert repr(layout).startswith("ParamLayout(('n', 'i32'), ('x', 'ptr', 3), ")
    with pytest.raises(ValueError, match="takes 7 values, got 4"):
        layout.pack(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"counts must be i32, got 1\.5"):
        layout.pack(1, 2, 3, 4, 5, 1.5, 7)


def test_tensor_map_is_aligned_to_64_bytes_in_the_struct_and_in_memory() -> None:
    layout = ParamLayout(("n", "i32"), ("map", "tensor_map"), ("m", "i32"))
    assert layout.offsets == {"n": 0, "map": 64, "m": 192}
    assert layout.size == 256
    opaque = bytes(range(128))
    pointer, data = packed_struct(layout.pack(1, opaque, 2), layout.size)
    assert pointer % 64 == 0
    assert data[64:192] == opaque
    assert struct.unpack_from("=i", data, 192) == (2,)


def test_layouts_compare_by_fields() -> None:
    fields = (("a", "ptr"), ("b", "i32"))
    assert ParamLayout(*fields) == ParamLayout(*fields)
    assert hash(ParamLayout(*fields)) == hash(ParamLayout(*fields))
    assert ParamLayout(*fields) != ParamLayout(("a", "ptr"), ("b", "u32"))
    assert ParamLayout(*fields) != ParamLayout(("a", "ptr"), ("c", "i32"))


def test_packed_structs_stay_as_they_are() -> None:
    layout = ParamLayout(("a", "u64"), ("b", "tensor_map"))
    values = [(n, bytes([n] * 128)) for n in range(50)]
    packed = [layout.pack(*v) for v in values]
    for params, v in zip(packed, values, strict=True):
        pointer, data = packed_struct(params, layout.size)
        assert pointer % 64 == 0
        assert data == layout.to_bytes(*v)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1,), "takes 2 values, got 1"),
        ((1, 2, 3), "takes 2 values, got 3"),
        ((1, 2**31), "n must be i32, got 2147483648"),
        ((1, 1.5), r"n must be i32, got 1\.5"),
        ((-1, 1), "x must be ptr, got -1"),
        ((None, 1), "x must be ptr, got None"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: tuple, message: str) -> None:
    layout = ParamLayout(("x", "ptr"), ("n", "i32"))
    for pack in (layout.pack, layout.to_bytes):
        with pytest.raises(ValueError, match=message):
            pack(*values)


def test_floats_beyond_fp32_are_refused_by_name() -> None:
    layout = ParamLayout(("eps", "f32"))
    for pack in (layout.pack, layout.to_bytes):
        with pytest.raises(ValueError, match=r"eps must be f32, got 1e\+39"):
            pack(1e39)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="x must be one of ptr, i32"):
        ParamLayout(("x", "float"))
    with pytest.raises(ValueError, match="unique"):
        ParamLayout(("x", "ptr"), ("x", "i32"))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cluster", [1, 4])
def test_launch_configuration(pdl: bool, cluster: int) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    config = launch_module._launch_config((3, 2, 1), 256, 4096, 0x5000, pdl, cluster)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (4096, 0x5000)
    ids = driver.CUlaunchAttributeID
    attributes = {attribute.id: attribute.value for attribute in config.attrs[: config.numAttrs]}
    early = attributes.pop(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, None)
    assert (early is not None) == pdl
    assert early is None or early.programmaticStreamSerializationAllowed == 1
    clustered = attributes.pop(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, None)
    assert (clustered is not None) == (cluster > 1)
    assert clustered is None or (clustered.clusterDim.x, clustered.clusterDim.y) == (cluster, 1)
    assert not attributes


class FakeDriver:
    """Records launches; refuses those of the functions in ``broken``."""

    def __init__(self, driver: Any, broken: set[int]) -> None:
        self.launched: list[tuple[int, int, int]] = []
        self._codes, self._broken = driver.CUresult, broken

    def launch(self, config: Any, handle: int, params: int, extra: int) -> tuple[Any]:
        if handle in self._broken:
            return (self._codes.CUDA_ERROR_INVALID_VALUE,)
        assert extra == 0
        self.launched.append((handle, config.gridDimX, params))
        return (self._codes.CUDA_SUCCESS,)


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = pytest.importorskip("cuda.bindings.driver")
    fake = FakeDriver(driver, {13})
    calls = (fake.launch, driver.CUresult.CUDA_SUCCESS)
    monkeypatch.setattr(launch_module, "_driver_launch", lambda: calls)
    monkeypatch.setattr(launch_module, "describe_error", lambda status: status.name)
    return fake


def test_bound_launches_are_enqueued_in_order_and_again(fake_driver: FakeDriver) -> None:
    layout = ParamLayout(("n", "i32"))
    params = [layout.pack(n) for n in range(3)]
    bound = [
        bind(Function(f"f{n}", 0, n), params[n], grid=(n + 1, 1, 1), block=32) for n in range(3)
    ]
    once = [(n, n + 1, params[n].address) for n in range(3)]
    enqueue(bound)
    assert fake_driver.launched == once
    enqueue(bound)
    assert fake_driver.launched == 2 * once


@pytest.mark.parametrize(
    ("pdl", "cluster", "words"),
    [(False, 1, ""), (True, 1, ", PDL"), (False, 4, ", cluster 4"), (True, 4, ", PDL, cluster 4")],
)
def test_a_refused_launch_is_named(
    pdl: bool, cluster: int, words: str, fake_driver: FakeDriver
) -> None:
    params = ParamLayout(("n", "i32")).pack(1)
    good, bad = Function("good", 0, 1), Function("bad", 3, 13)
    bound = [
        bind(f, params, grid=(7, 2, 1), block=64, smem=16, pdl=pdl, cluster=cluster)
        for f in (good, bad, good)
    ]
    pattern = (
        r"bad: launch of grid \(7, 2, 1\) x 64 threads, 16 B of shared memory"
        rf"{words} on cuda:3 failed: CUDA_ERROR_INV"
    )
    with pytest.raises(RuntimeError, match=pattern):
        enqueue(bound)
    assert [handle for handle, _, _ in fake_driver.launched] == [1]
