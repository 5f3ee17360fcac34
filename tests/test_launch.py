from __future__ import annotations

import ctypes
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_moe.runtime import launch as launch_module
from cupy_moe.runtime.launch import ParamLayout

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


def packed_struct(address: int, size: int) -> tuple[int, bytes]:
    """Address and bytes of the struct that a launch would copy."""
    pointer = ctypes.c_void_p.from_address(address).value
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


def test_each_thread_packs_into_memory_of_its_own() -> None:
    layout = ParamLayout(("a", "u64"), ("b", "u64"))
    barrier = threading.Barrier(8)
    wrong: list[int] = []

    def work(value: int) -> None:
        for step in range(200):
            address = layout.pack(value, step)
            barrier.wait()
            if packed_struct(address, layout.size)[1] != layout.to_bytes(value, step):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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
