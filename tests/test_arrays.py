from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe.runtime.arrays import DTYPES, HOST, describe, from_numpy_like, to_numpy, to_xp
from cupy_moe.runtime.scratch import allocate

# NumPy speaks DLPack 1.0, which knows read-only arrays, since 2.1.
EXPORTS_READ_ONLY = np.lib.NumpyVersion(np.__version__) >= "2.1.0"

TORCH_ONLY = {"float4_e2m1fn_x2"}
NOT_IN_TORCH = {"float4_e2m1fn"}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def bit_patterns(dtype: np.dtype, shape: tuple[int, ...] = (6, 4)) -> np.ndarray:
    """Array of the dtype with arbitrary but fixed bytes (0 or 1 for bool)."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = (np.arange(size, dtype=np.uint32) * 37 % 251).astype(np.uint8)
    return (data & 1 if dtype == np.bool_ else data).view(dtype).reshape(shape)


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


class Producer:
    """A library that only speaks DLPack; wraps a NumPy array or a torch tensor."""

    def __init__(self, array: Any, device_type: int | None = None) -> None:
        self.array = array
        self.device_type = device_type

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return (kind if self.device_type is None else self.device_type), index

    def __array_namespace__(self) -> type[Namespace]:
        return Namespace


class Namespace:
    """What `Producer` exports as its module."""

    @staticmethod
    def from_dlpack(array: Any) -> Producer:
        return Producer(np.from_dlpack(array))

    @staticmethod
    def asarray(array: Any) -> Producer:
        return Producer(np.array(array))


class OldProducer(Producer):
    """From before DLPack 1.0: neither versions nor an array namespace."""

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()

    __array_namespace__ = property()  # hasattr() is False


# --- NumPy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in TORCH_ONLY])
def test_numpy_dtypes(name: str) -> None:
    array = bit_patterns(DTYPES[name])
    ref = describe(array)
    assert ref.owner is array
    assert ref.ptr == array.ctypes.data
    assert (ref.dtype, ref.shape, ref.strides, ref.device) == (name, (6, 4), (4, 1), HOST)
    assert (ref.itemsize, ref.nbytes, ref.size) == (array.itemsize, array.nbytes, 24)
    assert ref.is_contiguous
    assert ref.is_writable
    assert to_numpy(ref) is array


@pytest.mark.parametrize(
    ("array", "contiguous"),
    [
        (np.zeros((3, 4)).T, False),
        (np.zeros((3, 4))[:, :3], False),
        (np.zeros((3, 4))[::2], False),
        (np.zeros((3, 4))[::-1], False),
        (np.zeros((3, 4))[1:], True),
        (np.zeros((3, 4, 5))[:, 1:2, :], False),
        (np.zeros((1, 4))[:, :3], True),
        (np.zeros((3, 1, 4))[:, ::-1], True),
        (np.zeros((0, 4)).T, True),
        (np.zeros(()), True),
        (np.broadcast_to(np.zeros(4), (3, 4)), False),
    ],
)
def test_contiguity(array: np.ndarray, contiguous: bool) -> None:
    ref = describe(array)
    assert ref.is_contiguous == contiguous == array.flags.c_contiguous
    assert ref.strides == tuple(stride // 8 for stride in array.strides)


def test_read_only_arrays_say_so() -> None:
    assert not describe(np.broadcast_to(np.zeros(4), (3, 4))).is_writable


@pytest.mark.parametrize("dtype", [">f4", "c8", "U3", "O", "M8[s]", [("a", "i4")]])
def test_other_numpy_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"op: x: dtype .* is not supported"):
        describe(np.zeros(3, dtype), "op: x")


def test_strides_inside_an_element_are_refused() -> None:
    records = np.zeros(3, [("a", "<f4"), ("b", "u1")])
    with pytest.raises(ValueError, match=r"op: x: strides \(5,\) bytes"):
        describe(records["a"], "op: x")


@pytest.mark.parametrize("x", [None, 3, 2.5, [1, 2], "text", np.float32(1), object()])
def test_what_is_no_array_is_refused(x: Any) -> None:
    with pytest.raises(TypeError, match=rf"op: x: expected an array.*{type(x).__name__}"):
        describe(x, "op: x")


def test_subclasses_of_ndarray_are_numpy(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(2, 3))
    ref = describe(mapped)
    assert ref.framework.name == "numpy"
    assert ref.owner is mapped


# --- torch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in NOT_IN_TORCH])
def test_torch_host_tensors_share_memory_with_numpy(name: str, torch: Any) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    expected = bit_patterns(DTYPES[name])
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[expected.itemsize]
    tensor = torch.from_numpy(expected.view(signed).copy()).view(getattr(torch, name))

    ref = describe(tensor)
    assert ref.owner is tensor
    assert ref.ptr == tensor.data_ptr()
    assert (ref.dtype, ref.shape, ref.strides, ref.device) == (name, (6, 4), (4, 1), HOST)
    assert type(ref.shape) is tuple

    array = to_numpy(ref)
    assert array.dtype == DTYPES[name]
    assert np.array_equal(raw(array), raw(expected))
    array.view(signed)[0, 0] ^= 1
    assert tensor.view(carrier[expected.itemsize])[0, 0] == array.view(signed)[0, 0]


def test_torch_strides_and_subclasses(torch: Any) -> None:
    ref = describe(torch.zeros(3, 4, dtype=torch.bfloat16).T)
    assert (ref.shape, ref.strides, ref.is_contiguous) == ((4, 3), (1, 4), False)
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    ref = describe(parameter)
    assert ref.owner is parameter
    assert parameter.requires_grad
    assert np.array_equal(to_numpy(ref), np.ones((2, 3), np.float32))


def test_torch_tensors_without_plain_storage_are_refused(torch: Any) -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_args: Any, **_kwargs: Any) -> None:
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2, 3))
    cases = [
        (torch.zeros(3, 3).to_sparse(), r"dense \(strided\), got torch.sparse_coo"),
        (torch.zeros(3, device="meta"), "in host or CUDA memory, got Tensor on meta"),
        (torch.zeros(3, dtype=torch.complex64), "of dtype .*, got torch.complex64"),
        (wrapper, "Wrapper wraps other tensors; pass the local tensor"),
    ]
    for tensor, message in cases:
        with pytest.raises(TypeError, match=f"op: x: .*{message}"):
            describe(tensor, "op: x")


# --- any library ------------------------------------------------------------------------------


def test_foreign_arrays_are_borrowed() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    producer = Producer(array)
    ref = describe(producer)
    assert ref.owner is producer
    assert ref.ptr == array.ctypes.data
    assert (ref.shape, ref.strides, ref.dtype, ref.device) == ((4, 3), (6, 2), "float32", HOST)
    view = to_numpy(ref)
    view[0, 1] = -1.0
    assert array[0, 1] == -1.0


def test_a_borrowed_array_outlives_its_producer() -> None:
    view = to_numpy(describe(Producer(np.full(1000, 7, np.int32))))
    junk = [np.zeros(1000, np.int32) for _ in range(100)]
    assert (view == 7).all(), len(junk)


@pytest.mark.skipif(not EXPORTS_READ_ONLY, reason="NumPy before 2.1 exports no read-only arrays")
def test_foreign_read_only_arrays() -> None:
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    assert not describe(Producer(frozen)).is_writable


def test_foreign_writable_and_old_producers() -> None:
    assert describe(Producer(np.zeros(3))).is_writable
    old = describe(OldProducer(np.zeros((2, 3), np.int16)))
    assert (old.shape, old.strides, old.dtype) == ((2, 3), (3, 1), "int16")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2"])
def test_foreign_types_that_numpy_cannot_import(name: str, torch: Any) -> None:
    expected = bit_patterns(DTYPES[name])
    carrier = expected.view(np.uint8 if expected.itemsize == 1 else np.int16)
    tensor = torch.from_numpy(carrier.copy()).view(getattr(torch, name)).T
    try:
        tensor.__dlpack__()
    except BufferError as error:  # 8-bit floats up to torch 2.9
        pytest.skip(f"torch {torch.__version__}: {error}")
    view = to_numpy(describe(Producer(tensor)))
    assert view.dtype == DTYPES[name]
    assert np.array_equal(raw(view), raw(expected.T))


def test_foreign_arrays_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(TypeError, match=r"op: x: .*DLPack device type 7 of Producer"):
        describe(Producer(np.zeros(3), device_type=7), "op: x")
    with pytest.raises(TypeError, match=r"op: x: .*\(5, 64, 1\) is not supported"):
        describe(Producer(np.zeros(3, np.complex64)), "op: x")
    with pytest.raises(TypeError, match=r"op: x: Producer cannot be exported"):
        describe(Producer(np.zeros(3, ml_dtypes.bfloat16)), "op: x")


def test_foreign_results_are_handed_back_by_the_producer() -> None:
    framework = describe(Producer(np.zeros(3))).framework
    result = framework.empty((2, 3), "float32", HOST)
    assert result.is_contiguous
    assert result.is_writable
    to_numpy(result)[...] = 5.0
    owner = result.owner
    assert isinstance(owner, Producer)
    assert owner.array.ctypes.data == result.ptr
    assert (owner.array == 5.0).all()
    assert result.owner is owner


def test_foreign_results_that_dlpack_cannot_carry_are_copied() -> None:
    result = describe(Producer(np.zeros(3))).framework.empty((2,), "bfloat16", HOST)
    to_numpy(result)[...] = 1.5
    assert isinstance(result.owner, Producer)
    assert result.owner.array.dtype == ml_dtypes.bfloat16
    assert (result.owner.array == np.array(1.5, ml_dtypes.bfloat16)).all()


def test_a_producer_without_importer_gets_numpy() -> None:
    result = describe(OldProducer(np.zeros(3))).framework.empty((2,), "int32", HOST)
    assert type(result.owner) is np.ndarray


# --- conversions ------------------------------------------------------------------------------


def host_arrays() -> list[Any]:
    kinds: list[Any] = [np.zeros(2, np.float32)]
    if EXPORTS_READ_ONLY:  # before, np.from_dlpack gave read-only arrays
        kinds.append(Producer(np.zeros(2, np.float32)))
    if importlib.util.find_spec("torch"):
        import torch

        kinds.append(torch.zeros(2))
    return kinds


@pytest.mark.parametrize("like", host_arrays(), ids=lambda x: type(x).__module__)
def test_restore_returns_the_callers_kind(like: Any) -> None:
    array, restore = to_xp(like)
    assert type(array) is np.ndarray
    made = np.arange(6, dtype=np.float32).reshape(2, 3)
    restored = restore(made)
    assert type(restored) is type(like)
    assert np.array_equal(to_numpy(describe(restored)), made)
    assert describe(restored).ptr == made.ctypes.data  # no copy


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "int64", "bool"])
def test_results_in_every_dtype_become_tensors(name: str, torch: Any) -> None:
    array = bit_patterns(DTYPES[name])
    tensor = from_numpy_like(describe(torch.zeros(1)), array)
    assert tensor.dtype == getattr(torch, name)
    assert np.array_equal(raw(to_numpy(describe(tensor))), raw(array))
    array.flags.writeable = False
    copy = from_numpy_like(describe(torch.zeros(1)), array)
    assert copy.data_ptr() != array.ctypes.data


def test_dtypes_that_torch_lacks_are_refused(torch: Any) -> None:
    with pytest.raises(TypeError, match="has no dtype float4_e2m1fn"):
        from_numpy_like(describe(torch.zeros(1)), np.zeros(2, ml_dtypes.float4_e2m1fn))


@pytest.mark.parametrize("like", host_arrays(), ids=lambda x: type(x).__module__)
def test_empty_and_scratch_come_from_the_callers_library(like: Any) -> None:
    framework = describe(like).framework
    ref = framework.empty((3, 0, 2), "bfloat16", HOST)
    assert (ref.shape, ref.dtype, ref.nbytes, ref.is_contiguous) == ((3, 0, 2), "bfloat16", 0, True)
    assert not framework.is_capturing(HOST)
    scratch = allocate(framework, 1000, HOST, capturing=False)
    assert (scratch.dtype, scratch.shape) == ("uint8", (1000,))


def test_importing_touches_no_optional_package_and_no_gpu() -> None:
    script = (
        "import sys\n"
        "from cupy_moe.runtime import arrays, jit, launch, scratch, streams\n"
        "import numpy; arrays.describe(numpy.zeros(3))\n"
        "print([m for m in ('cupy', 'torch', 'cuda', 'cuda.bindings') if m in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
