"""Kernel launches: one parameter struct by value, packed by the host's C layout rules."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from cupy_moe.runtime.devices import DriverValue, describe_error
from cupy_moe.runtime.requirements import import_driver

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["BoundLaunch", "Field", "PackedParams", "ParamLayout", "ParamValue", "bind", "enqueue"]

ParamValue: TypeAlias = "int | float | bytes"
FieldSpec: TypeAlias = "tuple[str, str] | tuple[str, str, int]"

_LAUNCH_CONFIGS = 2048  # prepared configurations kept: kernels x token counts x streams


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a field of a given kind lies in memory, and its type in ``cuda_src/common``."""

    code: str
    size: int
    alignment: int
    device_type: str


_KINDS = {
    "ptr": _Kind("Q", 8, 8, "cupy_moe::AnyPointer"),
    "i32": _Kind("i", 4, 4, "cupy_moe::i32"),
    "u32": _Kind("I", 4, 4, "cupy_moe::u32"),
    "i64": _Kind("q", 8, 8, "cupy_moe::i64"),
    "u64": _Kind("Q", 8, 8, "cupy_moe::u64"),
    "f32": _Kind("f", 4, 4, "float"),
    "tensor_map": _Kind("128s", 128, 64, "cupy_moe::TensorMap"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One member of the parameter struct: a value, or an array of ``count``."""

    name: str
    kind: str
    offset: int
    device_type: str
    count: int = 1


_PACK_ERRORS = (struct.error, OverflowError)  # the second for a float beyond FP32
_STRUCT_ALIGNMENT = 64  # what a tensor map wants
_POINTER_SIZE = 8


@dataclass(slots=True, eq=False)
class PackedParams:
    """A parameter struct in memory of its own, changed by nobody but who had it packed.

    Attributes
    ----------
    address : int
        Of the one-element ``void*[]`` that a launch takes; it points to the struct.
    memory : object
        Holds both.
    """

    address: int
    memory: Any


class ParamLayout:
    """Layout of a kernel's by-value parameter struct, by the alignment rules of C.

    Parameters
    ----------
    *fields : tuple of (name, kind) or (name, kind, count)
        In the order of the struct; those with a count of values are arrays. Kinds: ``ptr``
        (address), ``i32``, ``u32``, ``i64``, ``u64``, ``f32``, ``tensor_map`` (128 opaque bytes,
        aligned to 64).

    Attributes
    ----------
    fields : tuple of Field
    size : int
        Bytes of the struct, tail padding included.

    Raises
    ------
    ValueError
        If a kind is unknown or a name is used twice.
    """

    __slots__ = ("_memory_type", "_pack_into", "_struct", "fields", "size")

    def __init__(self, *fields: FieldSpec) -> None:
        self.fields = tuple(_place(fields))
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"ParamLayout: names must be unique, got {', '.join(names)}")
        codes, end = [], 0
        for field in self.fields:
            kind = _KINDS[field.kind]
            codes.append(f"{field.offset - end}x{kind.code * field.count}")
            end = field.offset + kind.size * field.count
        alignment = max((_KINDS[field.kind].alignment for field in self.fields), default=1)
        self.size = _align(end, alignment)
        body = "".join([*codes, f"{self.size - end}x"])
        self._struct = struct.Struct(f"={body}")
        self._pack_into = struct.Struct(f"=Q{body}").pack_into  # the pointer, then the struct
        self._memory_type = ctypes.c_char * (_POINTER_SIZE + _STRUCT_ALIGNMENT - 1 + self.size)

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes from the start of the struct, by field name."""
        return {field.name: field.offset for field in self.fields}

    def __eq__(self, other: object) -> bool:
        """Whether both describe the same struct."""
        return isinstance(other, ParamLayout) and self.fields == other.fields

    def __hash__(self) -> int:
        """By fields."""
        return hash(self.fields)

    def __repr__(self) -> str:
        """List the fields as they are passed to the constructor."""
        counts = [(f.count,) if f.count > 1 else () for f in self.fields]
        specs = [(f.name, f.kind, *count) for f, count in zip(self.fields, counts, strict=True)]
        return f"ParamLayout({', '.join(map(str, specs))})"

    def to_bytes(self, *values: ParamValue) -> bytes:
        """Bytes of the struct for these field values."""
        try:
            return self._struct.pack(*values)
        except _PACK_ERRORS as error:
            raise self._refusal(values) from error

    def pack(self, *values: ParamValue) -> PackedParams:
        """Lay the field values out for launches.

        Parameters
        ----------
        *values : int, float or bytes
            One per field and element of an array, in order.

        Raises
        ------
        ValueError
            If the number of values differs from the fields, or one does not fit its field.
        """
        memory = self._memory_type()
        base = ctypes.addressof(memory)
        pointer = -(base + _POINTER_SIZE) % _STRUCT_ALIGNMENT  # offset; the struct follows, aligned
        try:
            self._pack_into(memory, pointer, base + pointer + _POINTER_SIZE, *values)
        except _PACK_ERRORS as error:
            raise self._refusal(values) from error
        return PackedParams(base + pointer, memory)

    def _refusal(self, values: tuple[ParamValue, ...]) -> ValueError:
        fields = [field for field in self.fields for _ in range(field.count)]
        if len(values) != len(fields):
            return ValueError(f"{self!r} takes {len(fields)} values, got {len(values)}")
        for field, value in zip(fields, values, strict=True):
            try:
                struct.pack("=" + _KINDS[field.kind].code, value)
            except _PACK_ERRORS as error:
                return ValueError(f"{field.name} must be {field.kind}, got {value!r}: {error}")
        raise AssertionError("every value fits its field")


def _place(fields: tuple[FieldSpec, ...]) -> Iterator[Field]:
    end = 0
    for name, kind, *counts in fields:
        if kind not in _KINDS:
            raise ValueError(f"ParamLayout: {name} must be one of {', '.join(_KINDS)}, got {kind}")
        offset, device_type = _align(end, _KINDS[kind].alignment), _KINDS[kind].device_type
        count = counts[0] if counts else 1
        yield Field(name, kind, offset, f"{device_type}[{count}]" if counts else device_type, count)
        end = offset + _KINDS[kind].size * count


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@lru_cache(maxsize=_LAUNCH_CONFIGS)
def _launch_config(
    grid: tuple[int, int, int], block: int, smem: int, stream: int, pdl: bool, cluster: int
) -> DriverValue:
    """Prepare a ``CUlaunchConfig``; it is never changed afterwards, so threads may share it."""
    driver = import_driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = smem
    config.hStream = driver.CUstream(stream)
    attributes = []
    ids = driver.CUlaunchAttributeID
    if pdl:
        early = driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if cluster > 1:
        clustered = driver.CUlaunchAttribute()
        clustered.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        clustered.value.clusterDim.x = cluster
        clustered.value.clusterDim.y = clustered.value.clusterDim.z = 1
        attributes.append(clustered)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@cache
def _driver_launch() -> tuple[DriverValue, DriverValue]:
    """Return the driver's launch call and its code of success."""
    driver = import_driver()
    return driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS


def _attributes(config: DriverValue) -> tuple[bool, int]:
    """Read from a `_launch_config`: programmatic dependent launch, blocks of a cluster."""
    ids, pdl, cluster = import_driver().CUlaunchAttributeID, False, 1
    for attribute in config.attrs[: config.numAttrs]:
        if attribute.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            cluster = attribute.value.clusterDim.x
        else:
            pdl = True
    return pdl, cluster


@dataclass(slots=True, eq=False)
class BoundLaunch:
    """A kernel, its parameters and its configuration: made once, enqueued any number of times.

    Threads may share it as long as nothing in it changes. Who had the parameters packed may change
    them between launches, which take a copy: then no two threads may use it at once. It holds
    addresses, not arrays: whoever keeps it keeps the arrays alive.
    """

    function: Function
    params: PackedParams
    config: DriverValue  # CUlaunchConfig

    @property
    def pdl(self) -> bool:
        """Whether the kernel may start before its predecessor ends."""
        return _attributes(self.config)[0]

    @property
    def cluster(self) -> int:
        """Blocks of a cluster, along x."""
        return _attributes(self.config)[1]

    def refusal(self, status: DriverValue) -> RuntimeError:
        """Error for a launch that the driver answered with ``status``."""
        c, function = self.config, self.function
        pdl, cluster = _attributes(c)
        attributes = (", PDL" if pdl else "") + (f", cluster {cluster}" if cluster > 1 else "")
        return RuntimeError(
            f"{function.name}: launch of grid {(c.gridDimX, c.gridDimY, c.gridDimZ)} x "
            f"{c.blockDimX} threads, {c.sharedMemBytes} B of shared memory{attributes} "
            f"on cuda:{function.device} failed: {describe_error(status)}"
        )


def bind(
    function: Function,
    params: PackedParams,
    *,
    grid: tuple[int, int, int],
    block: int,
    smem: int = 0,
    stream: int = 0,
    pdl: bool = False,
    cluster: int = 1,
) -> BoundLaunch:
    """Prepare a launch; `enqueue` makes it.

    Parameters
    ----------
    function : Function
        From `cupy_moe.runtime.jit.load`.
    params : PackedParams
        From `ParamLayout.pack` of the kernel's layout.
    grid : tuple of int
        Blocks in x, y, z.
    block : int
        Threads of a block.
    smem : int
        Bytes of dynamic shared memory.
    stream : int
        Stream handle; 0 is the legacy default stream.
    pdl : bool
        Programmatic dependent launch: the kernel may start before its predecessor in the stream,
        or in a graph of it, ends and must call ``griddepcontrol_wait`` before it reads what that
        one wrote. Needs compute capability 9.0.
    cluster : int
        Blocks of a cluster, along x. Needs compute capability 9.0 when larger than 1.
    """
    return BoundLaunch(function, params, _launch_config(grid, block, smem, stream, pdl, cluster))


def enqueue(launches: Iterable[BoundLaunch]) -> None:
    """Enqueue kernels in order; returns at once.

    Parameters
    ----------
    launches : iterable of BoundLaunch
        Their device must be current (`device_guard`).

    Raises
    ------
    RuntimeError
        If the driver refuses a launch; those before it are enqueued.
    """
    launch, success = _driver_launch()
    for bound in launches:
        (status,) = launch(bound.config, bound.function.handle, bound.params.address, 0)
        if status is not success:
            raise bound.refusal(status)
