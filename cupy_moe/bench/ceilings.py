"""What the GPU gives to anybody, measured in the same run as the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from cupy_moe.bench.timing import interleaved_us, median_us, sustained_us
from cupy_moe.bench.workloads import Work
from cupy_moe.runtime.streams import cupy_stream

__all__ = ["Ceilings", "DenseRate", "copy_bandwidth", "dense_bf16", "dense_fp8", "read_bandwidth"]

ROUNDS = 15
SIZE = 8192  # of the matrices whose product is the ceiling of the tensor cores

READ_KERNEL = r"""
extern "C" __global__ void read_all(const uint4* data, long long count, unsigned* sink) {
  unsigned folded = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  #pragma unroll 8
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint4 v = data[i];
    folded ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (folded == 0x9E3779B9u) *sink = folded;  // keeps the loads alive
}
"""


@dataclass(frozen=True)
class DenseRate:
    """FLOP per second of torch's product of two square matrices of random numbers.

    Attributes
    ----------
    number_format : str
        ``FP8`` or ``BF16``.
    how : str
        torch's function and its options.
    flops_per_s, sustained_flops_per_s : float
        After a rest, like the times that the floor is compared with, and back to back.
    """

    number_format: str
    how: str
    flops_per_s: float
    sustained_flops_per_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "number_format": self.number_format,
            "how": self.how,
            "tflops": self.flops_per_s / 1e12,
            "sustained_tflops": self.sustained_flops_per_s / 1e12,
        }


@dataclass(frozen=True)
class Ceilings:
    """Streaming read of 4 GiB, and a dense product in the format that the layers multiply in.

    Attributes
    ----------
    read_bytes_per_s : float
    dense : DenseRate
    """

    read_bytes_per_s: float
    dense: DenseRate

    def read_us(self, work: Work) -> float:
        """Time of the bytes alone."""
        return 1e6 * work.num_bytes / self.read_bytes_per_s

    def floor_us(self, work: Work) -> float:
        """Time that neither memory nor tensor cores can beat."""
        return max(self.read_us(work), 1e6 * work.flops / self.dense.flops_per_s)


def read_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second of a kernel that reads a buffer once."""
    import cupy
    import torch

    kernel = cupy.RawKernel(READ_KERNEL, "read_all")
    data, sink = cupy.zeros(num_bytes, np.uint8), cupy.zeros(1, np.uint32)
    blocks = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    stream = cupy_stream(torch.cuda.current_stream().cuda_stream)

    def work() -> None:
        with stream:
            kernel((blocks,), (512,), (data, np.int64(num_bytes // 16), sink))

    return num_bytes / (1e-6 * median_us(work))


def copy_bandwidth(num_bytes: int = 2 << 30) -> float:
    """Bytes read plus bytes written per second of a device-to-device copy."""
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / (1e-6 * median_us(lambda: target.copy_(source)))


def dense_fp8(size: int = SIZE) -> DenseRate:
    """Rate of E4M3 matrices, by the one of torch's two accumulations that is faster after a rest.

    Fast accumulation leaves the sums in the tensor cores, the other promotes them to FP32 on the
    way.
    """
    import torch

    def matrix() -> torch.Tensor:
        return torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)

    a, b, one = matrix(), matrix(), torch.ones((), device="cuda")

    def product(fast: bool) -> Callable[[], torch.Tensor]:
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        return lambda: torch._scaled_mm(a, b.t(), use_fast_accum=fast, **options)

    works = {
        "torch._scaled_mm without fast accumulation": product(False),
        "torch._scaled_mm with fast accumulation": product(True),
    }
    return _fastest("FP8", works, size)


def dense_bf16(size: int = SIZE) -> DenseRate:
    """Rate of BF16 matrices."""
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return _fastest("BF16", {"torch.matmul": lambda: a @ b.t()}, size)


def _fastest(number_format: str, works: dict[str, Callable[[], Any]], size: int) -> DenseRate:
    rested = {how: median(us) for how, us in interleaved_us(works, ROUNDS).items()}
    faster = min(rested, key=rested.__getitem__)
    sustained = sustained_us(works[faster], ROUNDS)
    flops = 2 * size**3
    rates = flops / (1e-6 * rested[faster]), flops / (1e-6 * sustained)
    return DenseRate(number_format, faster, *rates)
