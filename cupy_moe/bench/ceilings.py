"""What the GPU gives to anybody, measured in the same run as the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from cupy_moe.bench.timing import interleaved_us, median_us, sustained_us
from cupy_moe.runtime.streams import cupy_stream

__all__ = ["Ceilings", "copy_bandwidth", "dense_fp8_rates", "measure_ceilings", "read_bandwidth"]

ROUNDS = 15

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
class Ceilings:
    """Streaming read of 4 GiB, and torch's FP8 product of two 8192 x 8192 matrices.

    The product after a rest, like the times that the floor is compared with, and back to back. Of
    torch's two ways to accumulate the one that is faster after a rest is the ceiling: fast
    accumulation leaves the sums in the tensor cores, the other promotes them to FP32 on the way.

    Attributes
    ----------
    read_bytes_per_s, fp8_flops_per_s, sustained_fp8_flops_per_s : float
    fp8_fast_accumulation : bool
        Whether both FP8 rates are those of fast accumulation.
    """

    read_bytes_per_s: float
    fp8_flops_per_s: float
    sustained_fp8_flops_per_s: float
    fp8_fast_accumulation: bool

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Time that neither memory nor tensor cores can beat."""
        return 1e6 * max(num_bytes / self.read_bytes_per_s, flops / self.fp8_flops_per_s)


def measure_ceilings() -> Ceilings:
    """Measure both on the current device."""
    return Ceilings(read_bandwidth(), *dense_fp8_rates())


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


def dense_fp8_rates(size: int = 8192) -> tuple[float, float, bool]:
    """FLOP per second of torch's FP8 matrix product on random data.

    Returns
    -------
    rested, sustained : float
        Both of the accumulation that is faster after a rest.
    fast_accumulation : bool
        Whether that is ``use_fast_accum=True``.
    """
    import torch

    def matrix() -> torch.Tensor:
        return torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)

    a, b, one = matrix(), matrix(), torch.ones((), device="cuda")

    def product(fast: bool) -> Callable[[], torch.Tensor]:
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        return lambda: torch._scaled_mm(a, b.t(), use_fast_accum=fast, **options)

    works = {"promoted": product(False), "fast": product(True)}
    rested = {name: median(us) for name, us in interleaved_us(works, ROUNDS).items()}
    faster = min(rested, key=rested.__getitem__)
    sustained = sustained_us(works[faster], ROUNDS)
    flops = 2 * size**3
    return flops / (1e-6 * rested[faster]), flops / (1e-6 * sustained), faster == "fast"
